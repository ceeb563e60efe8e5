"""The collectives between replicas: process groups that are configured again when members change.

``quorum`` and ``Manager`` import this package. It has no access to the state.
"""
