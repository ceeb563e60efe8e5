"""Measurements, each beside its ceiling and its peers in the same run: ``python -m benchmarks --help``."""
