"""What happened, as values: every heal, save, load and publish is recorded, measured and explained.

Every room of both packages may come in. Nothing here imports another room but ``runtime`` and the errors, knows a
tensor or waits for anything: who records is training.
"""
