"""The HTTP server: accepts connections, authenticates requests and sends snapshots.

``transfer`` passes in a cache of snapshots, and ``publish`` an application of its own. Nothing here imports the HTTP
client.
"""
