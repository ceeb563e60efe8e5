"""Ranks and replicas agree: votes with one outcome for all, exchanges of data, meetings that notice the dead.

Everything but bulk data travels through key-value stores, in plain values, and is polled with deadlines
(``store_channel``): a rank that is missing can then be named, and nothing is broken afterwards. Data between ranks
travels over a gloo group of the room's own (``exchange``). ``checkpoint``, ``publish`` and ``manager`` come in. Nothing
here knows a file, a tensor of a state or an engine, and nothing is pickled.

One core (``ranks``: messages, answers, nonces, signatures, heartbeats, waits) lies under three ways to agree, because
they promise different things:

- ``consensus`` runs phases. Each rank does its part and votes; a pure function (``votes``) decides. Ranks are waited
  for as long as they show heartbeats, since a write may take minutes. A rank that fails, is interrupted or is given up
  has voted: any rank may settle the phase, and the next phase has the next number.
- ``manager.quorum.group_ranks`` asks one rank for an answer that it has to get elsewhere (from a Lighthouse). Ranks are
  waited for until the caller's deadline, whether or not they show life, because a training step has to end. A rank that
  was interrupted or late has not answered: its exchange stays open under its number until it has read the answer, which
  rank 0 alone writes, once. A phase that stayed open would make a rank redo its part; an exchange that went on without
  the rank would commit a step on some ranks and not on others.
- ``publish.report_store`` has rank 0 post reports, for which any rank may wait until its own deadline.
"""
