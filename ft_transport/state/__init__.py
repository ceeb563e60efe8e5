"""The torch side: a state becomes a snapshot, and a snapshot becomes a state again.

Flattening, copying, copy-on-write, digests, DTensor layouts, and restoring into the receiver's own tensors.
``transfer``, ``checkpoint`` and ``publish`` come in. Nothing here knows the network.
"""
