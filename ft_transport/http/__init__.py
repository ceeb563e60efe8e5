"""The network side: a server that sends the snapshots it is given, and clients that fill the memory they are given.

``transfer`` passes in memory and manifests; ``transport``, ``checkpoint`` and ``publish`` pass in addresses and keys.
Nothing here imports torch.
"""
