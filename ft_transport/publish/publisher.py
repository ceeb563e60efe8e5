"""`Publisher`: publishes a trainer's weights to inference engines."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch.distributed as dist

from ft_transport.checkpoint.claim import RootClaim
from ft_transport.checkpoint.directory import NumberedDirectory
from ft_transport.checkpoint.settings import checked_directory, checked_directory_number, compare_settings
from ft_transport.coordination.agreement import Agreement
from ft_transport.coordination.ranks import RankGroup
from ft_transport.errors import ConfigurationError, PublishError
from ft_transport.publish.content import Files, WeightFormat, Weights
from ft_transport.publish.engines.engine import Engine
from ft_transport.publish.export import ExportJob, ExportResources
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
from ft_transport.settings import check_duration
from ft_transport.telemetry.metrics import weakly
from ft_transport.telemetry.record import Transfer
from ft_transport.telemetry.recorder import Recorder, Recording
from ft_transport.transport import HTTPTransport

logger = logging.getLogger(__name__)

_SILENCE_TIMEOUT: Final = timedelta(seconds=5)
"""Longest time without a heartbeat of rank 0 while rank 0 notifies the engines."""
_MARGIN_S: Final = 5.0
"""Seconds added to the deadline of the engines, so that rank 0 can post the report and the other ranks can read it."""

_numbers_decoder: Final = msgspec.msgpack.Decoder(list[int])


class Publisher:
    """Publishes versions of weights to inference engines.

    All ranks export a version together. A rank can continue training as soon as the version is on disk. Then a thread
    of rank 0 notifies all engines at the same time, and sends the outcome to the other ranks. No rank waits for HTTP
    inside a collective.

    Args:
        engines: Engines to notify; used only on rank 0.
        root: Directory of the versions. Each version is a subdirectory ``version-N``. Engines must see the directory
            under the same path. Only one publisher at a time can write there.
        process_group: All ranks that have parts of the weights. Default: all ranks of ``torch.distributed``, or this
            process alone if ``torch.distributed`` is not initialised.
        policy: Condition for `PublishHandle.result` to succeed. ``all``: every engine has confirmed the version.
            ``quorum``: more than half of the engines have. ``best_effort``: none. An engine that failed does not count
            until it has confirmed a later version; it is still notified of every version.
        engine_timeout: Longest time for the delivery of a version to an engine, from the end of the engine's previous
            delivery.
        timeout: Longest time without a heartbeat of a rank during an export.
        transport: Serves versions to engines that fetch them (`PullingEngine`, or `VLLMEngine` with ``pulls=True``);
            used only on rank 0. An engine that has an earlier version fetches only the changed elements, if that takes
            fewer bytes than the changed chunks. The metrics of the transport include this publisher. The publisher does
            not shut the transport down.
        keep_for: How long the publisher keeps an adapter after it has published the next version. Choose a time longer
            than the longest request: engines may read the adapter during a request, and vLLM exits if the files are
            missing. The time does not apply to weights, which engines read only once.
        weight_format: Tensor names, dtype and maximum file size of every version. Default: the trainer's names and
            dtypes.
        poll_interval: Time between two polls of an idle engine for its version. An engine that lost the newest version
            in a restart, or was unreachable, gets the version again. The publisher polls an engine that is down less
            often. ``None`` disables polling.
        private: Whether only the owner may read files and directories (modes 0400 and 0700), so that only engines of
            the same user can read them. By default the umask applies.

    Attributes:
        recorder: Records each publish (``ft_transport.telemetry``).

    Raises:
        CheckpointInUseError: Another publisher writes to this root.
        ConfigurationError: A setting is invalid.
        TransportError: A rank failed. All ranks raise the same error.
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
        keep_for: timedelta = timedelta(hours=1),
        weight_format: WeightFormat | None = None,
        poll_interval: timedelta | None = timedelta(seconds=10),
        private: bool = False,
    ) -> None:
        check_duration("keep_for", keep_for, at_least=timedelta(0))
        if poll_interval is not None:
            check_duration("poll_interval", poll_interval, at_least=timedelta.resolution)
        for name, duration in (("engine_timeout", engine_timeout), ("timeout", timeout)):
            check_duration(name, duration, at_least=timedelta.resolution)
        self._root = checked_directory(root)
        # An engine may still be loading the previous version.
        self._timeout_s = 2 * engine_timeout.total_seconds() + _MARGIN_S
        group = RankGroup.of(process_group)
        self._agreement = Agreement(group, "publish", timeout)
        self._reports = ReportStore(group, _SILENCE_TIMEOUT)
        self._directory = NumberedDirectory(self._root, "version", None, is_private=private)
        self._claim = RootClaim(self._root, is_private=private)
        self.recorder = Recorder()
        self._stop_readings: Callable[[], None] = lambda: None
        self._versions = StoredVersions(self._directory, transport, keep_for_s=keep_for.total_seconds())
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
        self._resources = ExportResources(
            agreement=self._agreement,
            directory=self._directory,
            weight_format=chosen,
            check_features=self._notifier.check_features,
            is_private=private,
        )
        # If the publisher was garbage-collected without a close, another publisher may own its engines by now.
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
        """Export a version, and begin to notify the engines.

        Every rank must call this method, on the training thread, with its own part of the weights. When the method
        returns, the version is on disk, and the trainer may change the weights.

        Args:
            version: Number of the version, greater than that of every version of this run and of earlier runs.
            weights: A LoRA adapter, or all weights of a model by name, or a function that returns either. The tensors
                are DTensors, or whole tensors with the same values on every rank.
            files: Other files for the version's directory, by name, such as ``config.json``; used only on rank 0. The
                publisher copies the file of a ``Path``, writes bytes and text unchanged, and converts a mapping to
                JSON. `model_files` returns the files of a model's directory.
            missing_ok: Whether the weights may lack tensor names of the previous version. If a whole layer is missing,
                vLLM keeps the layer's previous values. If a part of a layer is missing, the values of the layer are
                undefined.

        Raises:
            PublishError: The weights contain nothing that engines can use, a file is invalid, or names are missing.
            StaleVersionError: An equal or greater version was published before.
            TransportError: A rank failed. All ranks raise the same error.
        """
        version = checked_directory_number("version", version)
        if self._is_closed:
            raise PublishError("expected an open publisher, but this one is closed")
        recording = self.recorder.begin("publish", phase="export")
        recording.describe(step=version)
        try:
            directory = ExportJob(self._resources, version, weights, files, missing_ok).run()
            if self._agreement.is_first:
                recording.phase("deliver")
                notifying = self._notifier.notify(self._versions.delivery(version, directory))
                notifying.add_done_callback(lambda notified: self._end_publish(recording, notified))
            else:
                recording.end()
            recording.leave()
        except BaseException as error:
            recording.end("failed", error=error)
            raise
        return PublishHandle(version, directory, self._reports, self._timeout_s)

    def latest(self) -> int | None:
        """Return the newest version in the root; ``None`` if there is none. All ranks must call this method."""
        versions = self._agreement.value_of_first("find the newest version", self._directory.numbers, _numbers_decoder)
        return versions[-1] if versions else None

    def add_engine(self, engine: Engine) -> None:
        """Add an engine to notify. Any thread of rank 0 may call this method; on other ranks it does nothing.

        The publisher delivers the newest version to the engine in the background, with the usual deadline. The policy
        counts the engine from the next publish on.

        Args:
            engine: The engine to add.

        Raises:
            ConfigurationError: The object is not an engine, or another engine has the same URL.
            PublishError: The publisher is closed.
        """
        if self._agreement.is_first and (adding := self._notifier.add(engine)) is not None:
            # Keeps this publisher alive until the engine has the version.
            adding.add_done_callback(lambda _: self.root)

    def remove_engine(self, url: str) -> None:
        """Stop notifying an engine. Any thread of rank 0 may call this method; on other ranks it does nothing.

        The publisher cancels a running delivery to the engine. If the delivery has paused the engine, the publisher
        resumes the engine in the background, unless the engine's weights may be half replaced. The policy no longer
        counts the engine, not even in a running publish. The publisher may delete versions that the engine uses, so end
        the engine's requests first.

        Args:
            url: URL of the engine.

        Raises:
            ConfigurationError: No engine has this URL.
            PublishError: The publisher is closed.
        """
        if self._agreement.is_first:
            self._notifier.remove(url)

    def engines(self) -> tuple[EngineState, ...]:
        """Return the state of each engine, without waiting. Any thread may call this. Empty on ranks other than 0."""
        return self._notifier.states()

    def close(self, timeout: timedelta | None = None) -> None:
        """Wait for running deliveries, then stop the publisher's thread. Idempotent.

        Args:
            timeout: Longest wait, after which the publisher cancels the deliveries. Default: a little more than twice
                ``engine_timeout``.
        """
        self._is_closed = True
        deadline_s = time.monotonic() + (self._timeout_s if timeout is None else timeout.total_seconds())
        self._end(lambda: self._close(deadline_s))

    def _close(self, deadline_s: float) -> None:
        self._stop_readings()
        self._notifier.wait(deadline_s)
        self._notifier.close()
        self._agreement.close()
        self._resources.stager.close()
        self._claim.release()

    def _close_at_exit(self) -> None:
        # A forked child has no copy of the threads.
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
        """Complete the record of a publish. Called by a callback, which keeps the publisher alive until then."""
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
    """Wait for deliveries when the process exits: a thread that still runs at exit may abort the process."""
    for publisher in list(_publishers):
        publisher._close_at_exit()
