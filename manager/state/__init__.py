"""The state of one replica and its lock: registry, optimizer guard, step ledger.

All other packages of the manager import this one. It has no snapshots, peers or quorums.
"""
