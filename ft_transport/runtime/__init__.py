"""What Python leaves to its users: interrupted threads, slow imports, files that are none, the end of a process.

Every room of both packages may come in. Nothing here imports another room.
"""
