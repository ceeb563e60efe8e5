"""The torch side: turns a state into a snapshot, and a snapshot back into a state.

Flattening, copying, copy-on-write, digests, DTensor layouts, and restoring into the receiver's own tensors.
``transfer``, ``checkpoint`` and ``publish`` import this package. It does not use the network.
"""
