"""The demo: a replica that starts late receives the live state of one that never stops training.

``python -m manager.demo`` starts both as processes of their own and compares them, loss by loss and bit by bit.
"""
