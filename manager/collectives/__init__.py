"""Collectives between replicas: process groups, which each new quorum configures again, and checked reductions.

``manager.quorum`` and ``manager.manager`` import this package. Modules here do not import ``manager.state``.
"""
