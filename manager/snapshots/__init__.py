"""Snapshots of a replica: when to take one, copies at the step boundary, and shared memory.

The managers call it at each step boundary, the transport for each request. It has no access to quorums.
"""
