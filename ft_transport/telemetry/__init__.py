"""Records and metrics of every heal, save, load and publish, and the status of a process.

Every subpackage may import this package. It imports only ``runtime`` and the errors, and uses no tensors. Its functions
never wait, because the training thread calls them.
"""
