"""The network: an HTTP server that sends snapshots, and HTTP clients that receive them.

``transfer`` passes in snapshots to send, and memory to receive into. ``transport``, ``checkpoint`` and ``publish`` pass
in addresses and keys. Nothing here imports torch.
"""
