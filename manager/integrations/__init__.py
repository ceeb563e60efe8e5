"""Adapters that let the trainer of a framework use a manager. Only the user's import loads one, and its framework."""
