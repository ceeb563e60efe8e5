"""The demo: replicas that train a language model are killed, come back with other weights, and heal.

``python -m manager.demo`` starts them as processes of their own and compares every state that any of them held.
"""
