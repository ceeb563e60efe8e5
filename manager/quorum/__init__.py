"""Quorums: the replicas agree which of them train the next step, and which have to heal first.

The modules form three levels: the loop of one replica, below it its membership in the job, and below that the decision,
which is pure. ``Manager`` imports the loop. Only ``lighthouse`` imports torchft.
"""
