"""The server's side: accepts connections, decides which requests it answers, and sends snapshots.

``transfer`` comes in with a cache of snapshots, ``publish`` with an application of its own. Nothing here knows the
client.
"""
