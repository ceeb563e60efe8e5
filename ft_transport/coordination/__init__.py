"""Agreement between ranks and replicas: votes with one outcome for all, data exchange, rendezvous that detect death.

All messages except bulk data travel through key-value stores as plain values. Waits poll the store until a deadline
(``store``), so an error can name a missing rank, and no connection breaks. Data between ranks travels over a gloo group
that this package owns (``gloo_exchange``). ``checkpoint``, ``publish`` and ``manager`` use this package. Nothing here
depends on files, tensors of a state or engines, and nothing is pickled.

One core (``ranks``: messages, answers, nonces, signatures, heartbeats, waits) supports three protocols, which promise
different things:

- ``agreement`` runs phases. Each rank does its part and votes; a pure function (``votes``) decides. Ranks wait for each
  other as long as heartbeats arrive, since a write may take minutes. A rank that fails, is interrupted or is given up
  counts as having voted: any rank may settle the phase, and the next phase has the next number.
- ``manager.quorum.rank_exchange`` asks one rank for an answer that it gets elsewhere (from a Lighthouse). Ranks wait
  until the caller's deadline, with or without heartbeats, because a training step has to end. An interrupted or late
  rank has not answered: its exchange stays open under its number until it has read the answer, which only rank 0
  writes, once. A phase that stayed open would make a rank redo its part; an exchange that continued without the rank
  would commit a step on some ranks and not on others.
- ``publish.report`` lets rank 0 post reports; any rank may wait for them until its own deadline.
"""
