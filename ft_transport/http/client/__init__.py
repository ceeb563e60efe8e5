"""The receiver's side: connections with deadlines, and fetches that fill memory in place.

``transfer``, ``publish`` and ``cli`` come in with an address, settings and memory. Nothing here knows the server.
"""
