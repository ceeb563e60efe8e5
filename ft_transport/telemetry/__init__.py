"""Records, metrics and explanations of every heal, save, load and publish, as values.

Every subpackage may import it. Nothing here imports another subpackage but ``runtime`` and the errors, uses tensors or
waits: the recording thread is the training thread.
"""
