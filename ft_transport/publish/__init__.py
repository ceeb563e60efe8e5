"""Publishing weights to inference engines: which are notified, how, and with what outcome.

``Publisher`` is the way in on the trainer's side, ``WeightReceiver`` on an engine's. ``engines`` has one file for each
kind of engine, and what they share.
"""
