"""Replicas under a Lighthouse, each process a fresh one: what the benchmarks ``loop`` and ``heal`` have in common."""
