"""Turns a nested state of torch tensors into a snapshot, and a snapshot back into a state.

Modules flatten, copy, share and digest states, handle layouts of DTensors, and restore into the receiver's own tensors.
``transfer``, ``checkpoint`` and ``publish`` import this package. It does not use the network.
"""
