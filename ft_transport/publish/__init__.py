"""Publishes weights from a trainer to inference engines.

A trainer uses ``Publisher``. An engine that fetches weights over HTTP uses ``WeightReceiver``. The package ``engines``
has a module for each kind of engine, and the code that these modules share.
"""
