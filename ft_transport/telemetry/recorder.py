"""Makes records of running operations, keeps the last ones, and passes each on to its subscribers.

Fetching code does not know whether it is part of a heal. It opens a recording; in a thread (or context) that already
has an open recording, it gets a part of that one: its phases, transfers and retries become those of the heal.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Final

from ft_transport.runtime.regular_files import open_regular
from ft_transport.telemetry.process_state import shortened
from ft_transport.telemetry.record import Kind, Outcome, Phase, Record, Retry, Transfer, encode_json, now_unix_s
from ft_transport.telemetry.spans import ProfiledPhase, send_spans

logger = logging.getLogger(__name__)

NUM_KEPT: Final = 100
RECORDS_VARIABLE: Final = "FT_TRANSPORT_RECORDS"

Listener = Callable[[Record], None]

_MAX_PHASES: Final = 1000
_MAX_RETRIES: Final = 1000
# Weakly: an exception of a signal handler can cut off the call that opened or ends a recording, and the next record of
# the thread must not become a part of a recording that never ends.
_open: ContextVar[weakref.ref[Recording] | None] = ContextVar("ft_transport_recording", default=None)


def current() -> Recording | None:
    """Return the open recording of this thread, or context."""
    ref = _open.get()
    recording = ref() if ref is not None else None
    return None if recording is None or recording._has_ended else recording


def phase(name: str) -> None:
    """Begin a phase of this thread's recording, if one is open."""
    recording = current()
    if recording is not None:
        recording.phase(name)


class Recorder:
    """Keeps the last records of one replica's process. Any thread may use it.

    Args:
        path: A file to which each record is appended as a JSON line; ``None`` takes the file that the environment names
            in ``FT_TRANSPORT_RECORDS``, if any. A file that cannot be written causes one warning and no error.
        num_kept: Number of records in memory.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        num_kept: int = NUM_KEPT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        named = path if path is not None else os.environ.get(RECORDS_VARIABLE, "")
        self._path = Path(named) if named else None
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may end what it has interrupted
        self._kept: deque[Record] = deque(maxlen=num_kept)
        self._listeners: list[Listener] = []
        # Weakly: a recording that was dropped along with its manager makes no cycle.
        self._running: dict[int, weakref.ref[Recording]] = {}

    def begin(
        self, kind: Kind, *, replica: str = "", group_rank: int = 0, phase: str = "", began_s: float | None = None
    ) -> Recording:
        """Open a recording, or a part of this thread's open recording.

        Args:
            kind: The operation; ignored for a part.
            replica: Name that this replica gives itself.
            group_rank: Rank of this process in its replica.
            phase: The first phase. Empty names it after the kind; a part continues the phase of the whole.
            began_s: When it began, by the clock, if that was before this call.

        Returns:
            The recording, to be ended in the same thread, as a context manager or by `Recording.end`.
        """
        whole = current()
        return Recording(
            self,
            Record(
                kind=kind,
                begun_unix_s=now_unix_s(),
                length_s=0.0,
                outcome="ok",
                replica=replica,
                group_rank=group_rank,
            ),
            phase=phase,
            clock=self._clock,
            began_s=began_s,
            whole=whole._whole or whole if whole is not None else None,
        )

    def recent(self) -> tuple[Record, ...]:
        """Return the records that ended last, the newest at the end."""
        with self._lock:
            return tuple(self._kept)

    def running(self) -> tuple[Record, ...]:
        """Return the open recordings so far, the oldest first."""
        with self._lock:
            recordings = [recording for ref in self._running.values() if (recording := ref()) is not None]
        return tuple(running for recording in recordings if (running := recording.so_far()) is not None)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called with each record, in the thread that ended it.

        Returns:
            A function that ends the subscription.
        """
        with self._lock:
            self._listeners.append(listener)
        return lambda: self._unsubscribe(listener)

    def _unsubscribe(self, listener: Listener) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def _begun(self, recording: Recording) -> None:
        key = id(recording)
        with self._lock:
            self._running = {each: ref for each, ref in self._running.items() if ref() is not None}
            self._running[key] = weakref.ref(recording)

    def _keep(self, record: Record, recording: Recording) -> None:
        with self._lock:
            self._running.pop(id(recording), None)
        with self._lock:
            self._kept.append(record)
            listeners = tuple(self._listeners)
            path = self._path
        if path is not None:
            try:
                _append(path, encode_json(record) + b"\n")
            except OSError as error:
                with self._lock:
                    self._path = None
                logger.warning("records are no longer written to %s: %s", path, error)
        for listener in (send_spans, *listeners):
            try:
                listener(record)
            except Exception:
                logger.exception("a listener of records failed")


class Recording:
    """A record in the making. One thread begins its phases; any thread may add the rest."""

    def __init__(
        self,
        recorder: Recorder,
        beginning: Record,
        *,
        phase: str,
        clock: Callable[[], float],
        began_s: float | None,
        whole: Recording | None,
    ) -> None:
        self._recorder = recorder
        self._beginning = beginning
        self._clock = clock
        self._whole = whole
        now_s = clock()
        self._began_s = now_s if began_s is None else began_s
        if self._began_s < now_s:
            self._beginning = replace(beginning, begun_unix_s=beginning.begun_unix_s - (now_s - self._began_s))
        self._lock = threading.RLock()  # a signal handler may end what it has interrupted
        self._phases: list[Phase] = []
        self._phase = phase or beginning.kind
        self._phase_began_s = self._began_s
        self._transfers: dict[tuple[str, str], Transfer] = {}
        self._retries: list[Retry] = []
        self._notes: dict[str, str] = {}
        self._step: int | None = None
        self._num_bytes = 0
        self._has_ended = False
        self._profiled = ProfiledPhase()
        self._followed: Callable[[], Sequence[Transfer]] | None = None
        if whole is None:
            _open.set(weakref.ref(self))
            self._profiled.begin(beginning.kind, self._phase)
            recorder._begun(self)
        elif phase:
            whole.phase(phase)

    @property
    def is_part(self) -> bool:
        """Whether this recording belongs to a record that was begun before."""
        return self._whole is not None

    def phase(self, name: str) -> None:
        """End the current phase, and begin another one. A part's phases are those of the whole."""
        whole = self._whole or self
        with whole._lock:
            if name != whole._phase and not whole._has_ended:
                whole._end_phase(whole._clock())
                whole._phase = name
                whole._profiled.begin(whole._beginning.kind, name)

    def leave(self) -> None:
        """Detach from this thread: its next recording is a record of its own."""
        ref = _open.get()
        if ref is not None and ref() is self:
            _open.set(None)

    def transfer(self, transfer: Transfer) -> None:
        """Add the traffic with one peer; sums up transfers of the same peer and role."""
        whole = self._whole or self
        with whole._lock:
            _add(whole._transfers, transfer)

    def follow(self, transfers: Callable[[], Sequence[Transfer]] | None) -> None:
        """Set the function that returns running transfers, until ``None`` says that they were added by `transfer`.

        Args:
            transfers: Called by any thread, on request.
        """
        (self._whole or self)._followed = transfers

    def so_far(self) -> Record | None:
        """Return the record so far, shortened; ``None`` if it has ended."""
        followed = self._followed
        going_on = followed() if followed is not None else ()
        with self._lock:
            if self._has_ended:
                return None
            now_s = self._clock()
            transfers = dict(self._transfers)
            for transfer in going_on:
                _add(transfers, transfer)
            record = self._record("running", now_s, phases=(*self._phases, self._present(now_s)), transfers=transfers)
        return shortened(record)

    def retry(self, cause: BaseException | str, *, peer: str = "") -> None:
        """Add a failure after which the operation is retried."""
        whole, text = self._whole or self, cause if isinstance(cause, str) else _describe(cause)
        with whole._lock:
            if len(whole._retries) < _MAX_RETRIES:
                whole._retries.append(Retry(at_s=whole._clock() - whole._began_s, cause=text, peer=peer))

    def note(self, **notes: str) -> None:
        """Add facts that help to explain the record."""
        whole = self._whole or self
        with whole._lock:
            whole._notes.update(notes)

    def describe(self, *, step: int | None = None, num_bytes: int | None = None) -> None:
        """Set the final step and the size of the whole, as soon as they are known."""
        whole = self._whole or self
        with whole._lock:
            whole._step = whole._step if step is None else step
            whole._num_bytes = whole._num_bytes if num_bytes is None else num_bytes

    def end(self, outcome: Outcome = "ok", *, error: BaseException | str = "") -> Record | None:
        """End the recording, once; later calls and the ends of parts do nothing.

        Returns:
            The record, unless nothing was done.
        """
        if self._whole is not None:
            return None
        with self._lock:
            if self._has_ended:
                return None
            self._has_ended = True
            self._profiled.end()
            now_s = self._clock()
            self._end_phase(now_s)
            text = error if isinstance(error, str) else _describe(error)
            record = self._record(outcome, now_s, phases=tuple(self._phases), transfers=self._transfers, error=text)
        self.leave()
        self._recorder._keep(record, self)
        return record

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self.end("ok" if error is None else "failed", error=error or "")

    def _record(
        self,
        outcome: Outcome,
        now_s: float,
        *,
        phases: tuple[Phase, ...],
        transfers: dict[tuple[str, str], Transfer],
        error: str = "",
    ) -> Record:
        return replace(
            self._beginning,
            length_s=now_s - self._began_s,
            outcome=outcome,
            step=self._step,
            num_bytes=self._num_bytes,
            error=error,
            phases=phases,
            transfers=tuple(transfers.values()),
            retries=tuple(self._retries),
            notes=dict(self._notes),
        )

    def _present(self, now_s: float) -> Phase:
        start_s = self._phase_began_s - self._began_s
        return Phase(name=self._phase, start_s=start_s, length_s=now_s - self._phase_began_s)

    def _end_phase(self, now_s: float) -> None:
        if len(self._phases) < _MAX_PHASES:
            self._phases.append(self._present(now_s))
            self._phase_began_s = now_s


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _add(transfers: dict[tuple[str, str], Transfer], more: Transfer) -> None:
    key = (more.peer, more.role)
    known = transfers.get(key)
    if known is not None:
        more = replace(
            more,
            num_bytes=known.num_bytes + more.num_bytes,
            length_s=known.length_s + more.length_s,
            num_connections=known.num_connections + more.num_connections,
        )
    transfers[key] = more


def _append(path: Path, line: bytes) -> None:
    """Append one line with one write, so that processes that share a file do not mix their lines."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
