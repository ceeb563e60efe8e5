"""Publishing weights to inference engines: who is told, how, and what came of it.

``Publisher`` is the way in on the trainer's side, ``WeightReceiver`` on an engine's. ``engines`` has one file for each
kind of engine.
"""
