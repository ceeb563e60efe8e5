"""Where rank 0 posts what came of a version, and where every rank that wants to know waits, with its own deadline.

In the key-value store of ``torch.distributed``: nobody waits in a collective for HTTP. While engines are told, rank 0
posts heartbeats too, so that nobody waits for one that is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from ft_transport.errors import DeadlineExceededError, RankGoneError
from ft_transport.publish.report import PublishReport, decode_report, encode_report

T = TypeVar("T")

_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.25
"""A thousand ranks may wait, and one process holds the store."""
_LOOK_S: Final = 0.25
_NUM_KEPT: Final = 256
"""So many versions can be asked for; what was posted of older ones is forgotten."""


class ReportStore:
    """Reports by version. Posting belongs to rank 0; any thread of any rank may wait.

    Args:
        store: A part of the group's store that nobody else uses; ``None`` where there is one rank.
        silence_s: Rank 0 is given up when it has shown no heartbeat for so long.
    """

    def __init__(self, store: Any, silence_s: float) -> None:
        self._store = store
        self._silence_s = silence_s
        self._num_ticks = 0
        self._here: dict[int, PublishReport] = {}
        self._posted: list[int] = []
        self._changed = threading.Condition()

    def post(self, report: PublishReport) -> None:
        """Makes a report known; a later one of the same version replaces it."""
        with self._changed:
            self._here[report.version] = report
            if report.version not in self._posted:
                self._posted.append(report.version)
            old, self._posted = self._posted[:-_NUM_KEPT], self._posted[-_NUM_KEPT:]
            for version in old:
                del self._here[version]
            self._changed.notify_all()
        if self._store is not None:
            self._asked(lambda store: store.set(f"report/{report.version}", encode_report(report).hex()))
            for version in old:
                self._asked(partial(_forget, version))

    def tick(self) -> None:
        """Shows that rank 0 is at work."""
        if self._store is not None:
            self._num_ticks += 1
            self._asked(lambda store: store.set("alive", str(self._num_ticks)))

    def wait_here(self, version: int, until: Callable[[PublishReport], bool], timeout_s: float) -> PublishReport:
        """Waits on rank 0.

        Raises:
            DeadlineExceededError: There is none within ``timeout_s``.
        """
        with self._changed:
            if not self._changed.wait_for(
                lambda: version in self._here and until(self._here[version]), timeout=timeout_s
            ):
                raise _late(version, timeout_s, self._here.get(version))
            return self._here[version]

    def wait_there(self, version: int, until: Callable[[PublishReport], bool], timeout_s: float) -> PublishReport:
        """Waits on another rank.

        Raises:
            DeadlineExceededError: There is none within ``timeout_s``.
            RankGoneError: Rank 0 shows no heartbeat, or the store does not answer.
        """
        deadline_s = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        report: PublishReport | None = None
        sign = b""
        seen_s = looked_s = time.monotonic()
        while True:
            found = self._get(f"report/{version}")
            if found is not None:
                report = decode_report(bytes.fromhex(found.decode()))
                if until(report):
                    return report
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise _late(version, timeout_s, report)
            if now_s > looked_s + _LOOK_S:
                looked_s = now_s
                latest = self._get("alive") or b""
                if latest != sign:
                    sign, seen_s = latest, now_s
                elif now_s > seen_s + self._silence_s:
                    raise RankGoneError(
                        f"expected rank 0, which tells the engines of version {version}, to show that it is alive; it "
                        f"has not for {self._silence_s:g} s",
                        ranks=(0,),
                    )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _get(self, key: str) -> bytes | None:
        if not self._asked(lambda store: store.check([key])):
            return None
        found: bytes = self._asked(lambda store: store.get(key))
        return found

    def _asked(self, ask: Callable[[Any], T]) -> T:
        try:
            return ask(self._store)
        except RuntimeError as error:  # DistError and its like
            raise RankGoneError(
                f"expected the key-value store of torch.distributed to answer: {error}", ranks=(0,)
            ) from error


def _forget(version: int, store: Any) -> None:
    store.delete_key(f"report/{version}")


def _late(version: int, timeout_s: float, report: PublishReport | None) -> DeadlineExceededError:
    known = f"; so far: {report}" if report is not None else ""
    return DeadlineExceededError(f"expected to hear of version {version} within {timeout_s:g} s{known}")
