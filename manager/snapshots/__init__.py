"""Snapshots of a replica's state: when to take one, what a step boundary copies, and which memory is shared.

The managers call this package at each step boundary. The transport calls it for each request. It never imports
``manager.quorum``.
"""
