"""The HTTP client of receivers: connections with deadlines, and fetches that write into the receiver's memory.

``transfer``, ``publish`` and ``cli`` call this package with an address, settings and memory. It does not import the
server.
"""
