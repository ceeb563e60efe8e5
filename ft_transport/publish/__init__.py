"""Publishing weights to inference engines: selection of the engines, deliveries, and their outcomes.

``Publisher`` is the entry point on the trainer's side, ``WeightReceiver`` on an engine's. ``engines`` has one file for
each kind of engine, and their shared code.
"""
