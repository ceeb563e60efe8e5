"""Agreement between ranks and replicas: votes with one outcome for all, data exchange, and a rendezvous of members.

All messages except bulk data travel through key-value stores, as plain values. A wait polls the store until a deadline
(``store``), so its error can name the missing rank, and no connection breaks. Bulk data between ranks travels over a
gloo group that this package owns (``gloo_exchange``). ``checkpoint``, ``publish`` and ``manager`` use this package.
Nothing here depends on files, tensors of a state or engines. Nothing is pickled.

One core (``ranks``: messages, answers, nonces, signatures, heartbeats, waits) supports three protocols with different
promises:

- ``agreement`` runs phases. Each rank does its part and votes, and a pure function (``votes``) decides. A write may
  take minutes, so ranks wait for each other as long as heartbeats arrive. If a rank fails, is interrupted or stops its
  heartbeats, the phase fails without waiting for it, and the next phase has the next number.
- ``manager.quorum.rank_exchange`` makes rank 0 answer all ranks, for example with a quorum from the Lighthouse. Since a
  training step has to end, ranks wait until the caller's deadline, with or without heartbeats. If a rank is interrupted
  or late, the exchange stays open under its number until that rank has read the answer. Otherwise some ranks could
  commit a step that the others do not. (A phase must not stay open, because a rank would do its part twice.)
- ``publish.report`` lets rank 0 post reports. Any rank may wait for a report until its own deadline.
"""
