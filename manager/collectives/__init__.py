"""The collectives between replicas: process groups that are configured again when members change, and their ends.

``quorum`` and ``Manager`` come in. Nothing here knows the state.
"""
