"""Publishing weights to inference engines: who is told, how, and what came of it."""
