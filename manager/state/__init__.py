"""The training state of one replica, and the lock around it: registered objects, optimizer hooks, step counts.

Other packages of the manager import this one. Modules here do not import snapshots, recovery or quorums.
"""
