"""Support that the standard library lacks: safety from signal handlers, forks and FIFOs, deadlines, and lazy imports.

All packages may import this package. It imports only ``ft_transport.errors``.
"""
