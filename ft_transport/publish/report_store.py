"""Where rank 0 posts what came of a version, and where every rank that wants to know waits, with its own deadline.

In the key-value store of ``torch.distributed``: no rank waits in a collective for HTTP. While engines are told, rank 0
shows heartbeats, so that no rank waits for one that is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

import msgspec

from ft_transport.coordination.heartbeat import Heartbeat, HeartbeatWatch
from ft_transport.coordination.plain_values import from_json
from ft_transport.coordination.store_channel import AT_ONCE, Pacing, StoreChannel
from ft_transport.errors import DeadlineExceededError, RankGoneError
from ft_transport.publish.report import PublishReport
from ft_transport.runtime.handler_safety import SafeCondition

_LONGEST_PAUSE_S: Final = 0.25
"""A thousand ranks may wait, and one process holds the store."""
_LOOK_S: Final = 0.25
_ALIVE: Final = "alive"
_NUM_KEPT: Final = 256
"""So many versions can be asked for; what was posted of older ones is forgotten."""

_report_decoder: Final = msgspec.json.Decoder(PublishReport)


class ReportStore:
    """Reports by version. Posting belongs to rank 0; any thread of any rank may wait.

    Args:
        channel: To a part of the group's store that nothing else uses; ``None`` where there is one rank.
        silence_s: Rank 0 is given up when it has shown no heartbeat for so long.
    """

    def __init__(self, channel: StoreChannel | None, silence_s: float) -> None:
        self._channel = channel
        self._silence_s = silence_s
        self._timeout = timedelta(seconds=silence_s)
        self._heartbeat = (
            Heartbeat(channel, _ALIVE, interval_s=0, timeout=self._timeout) if channel is not None else None
        )
        self._here: dict[int, PublishReport] = {}
        self._posted: list[int] = []
        self._changed = SafeCondition()

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
        if self._channel is not None:
            self._channel.post(_key(report.version), msgspec.json.encode(report), self._timeout)
            for version in old:
                self._channel.remove(_key(version), self._timeout)

    def tick(self) -> None:
        """Shows that rank 0 is at work."""
        if self._heartbeat is not None:
            self._heartbeat.beat()

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
        assert self._channel is not None, "there is one where there are several ranks"
        looked_s = time.monotonic()
        deadline_s = looked_s + timeout_s
        watch = HeartbeatWatch({0: _ALIVE}, self._channel, looked_s)
        pacing = Pacing(_LONGEST_PAUSE_S)
        report: PublishReport | None = None
        while True:
            found = self._channel.get([_key(version)], AT_ONCE)
            if found is not None:
                report = from_json(found[0], _report_decoder)
                if until(report):
                    return report
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise _late(version, timeout_s, report)
            if now_s > looked_s + _LOOK_S:
                looked_s = now_s
                if watch.silent([0], self._silence_s, now_s):
                    raise RankGoneError(
                        f"expected rank 0, which tells the engines of version {version}, to show that it is alive; it "
                        f"has not for {self._silence_s:g} s",
                        ranks=(0,),
                    )
            pacing.pause(max(0.0, deadline_s - now_s))


def _key(version: int) -> str:
    return f"report/{version}"


def _late(version: int, timeout_s: float, report: PublishReport | None) -> DeadlineExceededError:
    known = f"; so far: {report}" if report is not None else ""
    return DeadlineExceededError(f"expected to hear of version {version} within {timeout_s:g} s{known}")
