"""The ranks of a group agree: each phase of a collective operation ends in a vote and one outcome for all.

Votes travel through the key-value store of ``torch.distributed`` and are decided by a pure function; data travels over
a gloo group of the room's own. ``checkpoint`` and ``publish`` come in. Nothing here knows a file, a tensor of a state
or an engine, and nothing is pickled.
"""
