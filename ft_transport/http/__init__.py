"""The network side: a server that sends what it is given, and clients that fill the memory they are given.

``transfer`` comes in with memory and manifests; ``transport``, ``checkpoint`` and ``publish`` with addresses and
keys. Nothing here imports torch.
"""
