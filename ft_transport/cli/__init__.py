"""The command ``ft-transport``: inspects jobs, replicas, files and checkpoints, for people and for scripts.

No other package imports this one. This package may import private modules of ``ft_transport`` and ``manager``.
"""
