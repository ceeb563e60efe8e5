"""The torch side: states become snapshots, and snapshots become states again. Nothing here knows the network."""
