"""Records and metrics of every heal, save, load and publish, and the status of a process, as values.

Every subpackage may import it. Nothing here imports another subpackage but ``runtime`` and the errors, uses tensors or
waits: the recording thread is the training thread.
"""
