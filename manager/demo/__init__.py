"""The demo: replicas train a language model, some are killed, and they restart with other weights and heal.

``python -m manager.demo`` starts each replica as a process, and compares the replicas' states at every step.
"""
