"""Publishing weights to inference engines: the facade of ``ft_transport.publish``."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

# Differs from the builtin one before Python 3.11.
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch.distributed as dist

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.settings import checked_directory_number, checked_root, compare_settings
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import ConfigurationError, PublishError
from ft_transport.publish.content import Files, WeightFormat, Weights
from ft_transport.publish.engines.engine import Engine
from ft_transport.publish.export import ExportJob, ExportMeans
from ft_transport.publish.notifier import EngineNotifier
from ft_transport.publish.report import (
    POLICIES,
    EngineState,
    Policy,
    PublishHandle,
    PublishReport,
    ReportStore,
)
from ft_transport.publish.versions import StoredVersions
from ft_transport.runtime.signal_safe import SafeEnd
from ft_transport.runtime.threads import at_exit
from ft_transport.settings import check_duration, check_number
from ft_transport.telemetry.metrics import weakly
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recorder, Recording
from ft_transport.transport import HTTPTransport

logger = logging.getLogger(__name__)

_SILENCE_TIMEOUT: Final = timedelta(seconds=5)
"""How long rank 0 may go without a heartbeat while engines are notified."""
_MARGIN_S: Final = 5.0
"""Added to the engines' deadline: time to post the report, and to find it."""

_numbers_decoder: Final = msgspec.msgpack.Decoder(list[int])


class Publisher:
    """Publishes versions of weights to inference engines.

    All ranks export a version together, and are free as soon as it is on disk. Rank 0 then notifies all engines at
    once, on its own thread, and posts the outcome; no rank waits in a collective for HTTP.

    Args:
        engines: Engines to notify. Rank 0 notifies its own; other ranks' engines are ignored.
        root: A directory for versions, ``version-N`` each; engines see it under the same path. One publisher at a time
            writes there.
        process_group: All ranks that hold parts of the weights. By default all of ``torch.distributed``, or this
            process alone if that is not initialised.
        policy: When `PublishHandle.result` succeeds: ``all`` engines have confirmed the version, a ``quorum`` (more
            than half), or any number (``best_effort``). An engine that failed is notified of every further version, and
            counts again once it has confirmed one.
        engine_timeout: Deadline of each engine for each version, from when it is done with the previous one.
        timeout: How long a rank may go without a heartbeat during an export.
        transport: Serves versions, from rank 0, to engines that pull them (`PullingEngine`); only rank 0 uses it. Its
            metrics cover this publisher. The publisher does not shut it down. Engines that have an earlier version get
            the elements that changed, if they are fewer bytes than the chunks that changed.
        keep: Number of newest versions that are never deleted.
        keep_for: How long an adapter is kept after the next version: longer than any request runs, because engines may
            read it during a request, and vLLM exits if it is missing. Weights are read once.
        weight_format: Names, dtype and size of files of every version, if they differ from the trainer's.
        poll_interval: How often each idle engine is polled for its version. An engine that lost the newest version by a
            restart, or was unreachable, gets it again. An engine that is down is polled less often. ``None``: no polls.
        private: Whether only the owner may read files and directories (0400, 0700), so that only engines of the same
            user read them; else the umask applies.

    Attributes:
        recorder: Records each publish (``ft_transport.telemetry``).

    Raises:
        CheckpointInUseError: Another publisher writes to this root.
        ConfigurationError: A setting cannot work.
        TransportError: A rank failed; the same error on all ranks.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        root: str | os.PathLike[str],
        process_group: dist.ProcessGroup | None = None,
        *,
        policy: Policy = "all",
        engine_timeout: timedelta = timedelta(seconds=60),
        timeout: timedelta = timedelta(minutes=10),
        transport: HTTPTransport[Any] | None = None,
        keep: int = 2,
        keep_for: timedelta = timedelta(hours=1),
        weight_format: WeightFormat | None = None,
        poll_interval: timedelta | None = timedelta(seconds=10),
        private: bool = False,
    ) -> None:
        check_duration("keep_for", keep_for, at_least=timedelta(0))
        if poll_interval is not None:
            check_duration("poll_interval", poll_interval, at_least=timedelta.resolution)
        keep = check_number("keep", keep, at_least=1)
        for name, duration in (("engine_timeout", engine_timeout), ("timeout", timeout)):
            check_duration(name, duration, at_least=timedelta.resolution)
        self._root = checked_root(root)
        # An engine may still be loading the previous version.
        self._timeout_s = 2 * engine_timeout.total_seconds() + _MARGIN_S
        group = RankGroup.of(process_group)
        self._agreement = Agreement(group, "publish", timeout)
        self._reports = ReportStore(group, _SILENCE_TIMEOUT)
        self._directory = NumberedDirectory(self._root, "version", None, is_private=private)
        self._claim = RootClaim(self._root, is_private=private)
        self.recorder = Recorder()
        self._stop_readings: Callable[[], None] = lambda: None
        self._versions = StoredVersions(self._directory, transport, keep=keep, keep_for_s=keep_for.total_seconds())
        self._end = SafeEnd()
        self._is_closed = False
        self._process_id = os.getpid()
        self._notifier = EngineNotifier(
            policy,
            engine_timeout.total_seconds(),
            poll_interval_s=poll_interval.total_seconds() if poll_interval is not None else None,
            reports=self._reports,
            versions=self._versions,
        )
        chosen = weight_format if weight_format is not None else WeightFormat()
        self._means = ExportMeans(
            agreement=self._agreement,
            directory=self._directory,
            weight_format=chosen,
            check_features=self._notifier.check_features,
            is_private=private,
        )
        # If the publisher was dropped without a close, its engines may belong to another publisher by now.
        weakref.finalize(self, self._notifier.stop_polling).atexit = False
        _publishers.add(self)

        def check() -> Mapping[str, object]:
            if policy not in POLICIES:
                raise ConfigurationError(f"expected one of {POLICIES} as policy, got {policy!r}")
            if transport is not None and not isinstance(transport, HTTPTransport):
                raise ConfigurationError(f"expected an HTTPTransport as transport, got {type(transport).__name__}")
            if not isinstance(chosen, WeightFormat):
                raise ConfigurationError(f"expected a WeightFormat as weight_format, got {type(chosen).__name__}")
            for engine in engines if self._agreement.is_first else ():
                self._notifier.insert(engine)
            return {"policy": policy, "engine_timeout": engine_timeout, **chosen.stated()}

        try:
            compare_settings(self._agreement, "compare the settings", check)
            self._agreement.on_first("set up the root", self._set_up_root)
            if transport is not None:
                transport.process_status.metrics.follow(self.recorder)
                if self._agreement.is_first:
                    self._stop_readings = transport.process_status.metrics.collect(weakly(self._notifier.lag.readings))
                    weakref.finalize(self, self._stop_readings).atexit = False
        except BaseException:
            self.close()
            raise

    @property
    def root(self) -> Path:
        """The directory of versions."""
        return self._root

    def publish(
        self,
        version: int,
        weights: Weights | Callable[[], Weights],
        *,
        files: Files | None = None,
        missing_ok: bool = False,
    ) -> PublishHandle:
        """Export a version, and begin to notify the engines. Every rank calls it alike, on the training thread.

        When this returns, the version is on disk, and the weights may be changed.

        Args:
            version: Greater than every earlier version, earlier runs included.
            weights: A LoRA adapter, or all weights by name; or a function that returns them. Whole tensors, the same on
                every rank, or DTensors.
            files: Other files for the directory, by name, such as ``config.json``: a ``Path`` is copied, bytes and a
                str are the content, a mapping becomes JSON. Used only on rank 0. See `model_files`.
            missing_ok: Whether weights may lack names of the previous weights. vLLM keeps its values of layers that are
                missing entirely; a layer that is missing in part then has undefined values.

        Raises:
            PublishError: The weights contain nothing that engines could use, a file is invalid, or names are missing.
            StaleVersionError: The version is not newer.
            TransportError: A rank failed; the same error on all ranks.
        """
        version = checked_directory_number("version", version)
        if self._is_closed:
            raise PublishError("expected a publisher that is open, this one is closed")
        recording = self.recorder.begin("publish", phase="export")
        recording.describe(step=version)
        try:
            directory = ExportJob(self._means, version, weights, files, missing_ok).run()
            if self._agreement.is_first:
                recording.phase("deliver")
                notifying = self._notifier.notify(self._versions.delivery(version, directory))
                notifying.add_done_callback(lambda notified: self._end_publish(recording, notified))
            else:
                recording.end()
        except BaseException as error:
            recording.end("failed", error=error)
            raise
        recording.leave()
        return PublishHandle(version, directory, self._reports, self._timeout_s)

    def latest(self) -> int | None:
        """Return the newest version, also of earlier runs; ``None`` without any. All ranks call it."""
        versions = self._agreement.value_of_first("find the newest version", self._directory.numbers, _numbers_decoder)
        return versions[-1] if versions else None

    def add_engine(self, engine: Engine) -> None:
        """Add an engine to the notified ones. Any thread of rank 0 may call it; on other ranks it does nothing.

        The engine is notified of the newest version in the background, with the same deadlines, and counts from the
        next publish.

        Args:
            engine: The engine.

        Raises:
            ConfigurationError: The object is not an engine, or its URL is already in use.
            PublishError: The publisher is closed.
        """
        if self._agreement.is_first and (adding := self._notifier.add(engine)) is not None:
            # Keeps this publisher alive until the engine has the version.
            adding.add_done_callback(lambda _: self.root)

    def remove_engine(self, url: str) -> None:
        """Stop notifying an engine. Any thread of rank 0 may call it; on other ranks it does nothing.

        A running delivery is cancelled; an engine that is paused for it is resumed in the background, unless its
        weights may be half replaced. The policy no longer counts the engine, even in a running publish, and no version
        is kept for it: end its requests first.

        Args:
            url: URL of the engine.

        Raises:
            ConfigurationError: No engine has this URL.
            PublishError: The publisher is closed.
        """
        if self._agreement.is_first:
            self._notifier.remove(url)

    def engines(self) -> tuple[EngineState, ...]:
        """Return the state of each engine, without waiting. Any thread of rank 0 may call it; others have none."""
        return self._notifier.states()

    def close(self, timeout: timedelta | None = None) -> None:
        """Wait for running notifications, and end the thread. May be called twice.

        Args:
            timeout: How long to wait; engines that have not confirmed by then are given up. Default: the engines'
                deadline.
        """
        self._is_closed = True
        deadline_s = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        self._end(lambda: self._close(deadline_s))

    def _close(self, deadline_s: float) -> None:
        self._stop_readings()
        self._notifier.wait(deadline_s)
        self._notifier.close()
        self._agreement.close()
        self._means.close()
        self._claim.release()

    def _close_at_exit(self) -> None:
        # A forked child has none of the threads.
        if self._process_id == os.getpid() and not self._is_closed:
            self.close(timedelta(seconds=60))

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self.close()

    def _set_up_root(self) -> None:
        self._claim.take("a publisher", _MARGIN_S)
        self._directory.recover()
        newest = self._versions.newest()
        if newest is not None:
            self._notifier.begin_with(newest)

    def _end_publish(self, recording: Recording, notified: Future[PublishReport]) -> None:
        """End the record of a publish. The reference to this method keeps the publisher alive until then."""
        error = notified.exception() if not notified.cancelled() else None
        if notified.cancelled() or error is not None:
            recording.end("abandoned", error=error or "")
            return
        report = notified.result()
        for each in report.engines:
            recording.transfer(Transfer(peer=each.url, role="engine", num_bytes=0, length_s=each.seconds))
        for failed in report.failed():
            recording.retry(f"{failed.outcome}: {failed.body}", peer=failed.url)
        recording.end("failed" if report.failed() else "ok", error="; ".join(each.url for each in report.failed()))


_publishers: weakref.WeakSet[Publisher] = weakref.WeakSet()


@at_exit
def _close_all() -> None:
    """Let notifications finish when the process exits; a thread that is cut off may abort the process."""
    for publisher in list(_publishers):
        publisher._close_at_exit()
