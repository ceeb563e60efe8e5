"""The keeper: a small process beside each trainer process, which goes on when the trainer dies.

The trainer starts the keeper (``process``), and gives it duties: work that the keeper does in the trainer's place, from
the moment of the trainer's death. The keeper imports neither torch nor aiohttp. ``manager`` defines the duties.
"""
