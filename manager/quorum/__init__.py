"""Quorums: the replicas agree which of them train the next step, and which have to heal first.

The modules form three levels. At the top is the loop of one replica, below it the replica's membership in the job, and
at the bottom the decision, which is pure. ``Manager`` imports the loop. Only ``lighthouse`` imports torchft.
"""
