"""Serves this process's state to peers, and receives the states of peers: connects ``state`` with ``http``.

``HTTPTransport`` consists of a server and a client of this package. ``checkpoint`` takes snapshots through the server.
"""
