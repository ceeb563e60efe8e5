"""Durable checkpoints: how a snapshot gets to disk and back, and how the ranks of a group agree on it."""
