"""Records running operations, stores the last records, and calls subscribers with each new record.

Code that fetches a state does not know whether the fetch is part of a heal. If its thread (or context) already has an
open recording, such as that of a heal, `Recorder.begin` returns a part of that recording: the phases, transfers and
retries of the fetch become those of the heal.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Final

from ft_transport.runtime.regular_files import open_regular
from ft_transport.telemetry.process_state import shortened
from ft_transport.telemetry.record import (
    Kind,
    Outcome,
    Phase,
    Record,
    Retry,
    Transfer,
    encode_json,
    now_unix_s,
    profiler_span,
    send_spans,
)

logger = logging.getLogger(__name__)

RECORDS_VARIABLE: Final = "FT_TRANSPORT_RECORDS"

Listener = Callable[[Record], None]

_MAX_PHASES: Final = 1000
_MAX_RETRIES: Final = 1000
# A weak reference: if a signal handler raises while a recording is opened or ended, that recording never ends, and the
# thread's next recording must not become a part of it.
_open: ContextVar[weakref.ref[Recording] | None] = ContextVar("ft_transport_recording", default=None)


def current() -> Recording | None:
    """Return the open recording of this thread (or context); ``None`` without one."""
    ref = _open.get()
    recording = ref() if ref is not None else None
    return None if recording is None or recording._has_ended else recording


def phase(name: str) -> None:
    """Begin a phase of this thread's recording, if the thread has an open recording."""
    recording = current()
    if recording is not None:
        recording.phase(name)


class Recorder:
    """Records the operations of a process, and stores the last records. Thread-safe.

    Args:
        path: File to which each record is appended as a line of JSON; ``None`` for the file that the environment
            variable ``FT_TRANSPORT_RECORDS`` names, if it is set. If a write fails, the recorder logs one warning and
            writes no more records to the file.
        num_stored: Maximum number of records in memory.
        clock: Returns monotonic time, in seconds.
    """

    def __init__(
        self,
        *,
        path: str | os.PathLike[str] | None = None,
        num_stored: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        named = path if path is not None else os.environ.get(RECORDS_VARIABLE, "")
        self._path = Path(named) if named else None
        self._clock = clock
        # Reentrant, because a signal handler may end the operation whose recording it has interrupted.
        self._lock = threading.RLock()
        self._records: deque[Record] = deque(maxlen=num_stored)
        self._listeners: list[Listener] = []
        # Weak references, so that a recording and its recorder make no reference cycle.
        self._running: dict[int, weakref.ref[Recording]] = {}

    def begin(
        self, kind: Kind, *, replica: str = "", group_rank: int = 0, phase: str = "", began_s: float | None = None
    ) -> Recording:
        """Open a recording, or a part of this thread's open recording.

        Args:
            kind: Kind of the operation; ignored for a part.
            replica: Name of this replica in its own settings.
            group_rank: Rank of this process in its replica.
            phase: Name of the first phase. If empty, a recording names it after ``kind``, and a part continues the
                current phase.
            began_s: Time at which the operation began, in seconds by the recorder's clock; ``None`` for now.

        Returns:
            The recording. End it on the same thread, as a context manager or with `Recording.end`.
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
        """Return the last records, the newest at the end."""
        with self._lock:
            return tuple(self._records)

    def running(self) -> tuple[Record, ...]:
        """Return the record so far of each open recording, the oldest first."""
        with self._lock:
            recordings = [recording for ref in self._running.values() if (recording := ref()) is not None]
        return tuple(running for recording in recordings if (running := recording.so_far()) is not None)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with each new record, on the thread that ends the recording.

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

    def _add_running(self, recording: Recording) -> None:
        key = id(recording)
        with self._lock:
            self._running = {each: ref for each, ref in self._running.items() if ref() is not None}
            self._running[key] = weakref.ref(recording)

    def _store(self, record: Record, recording: Recording) -> None:
        with self._lock:
            self._running.pop(id(recording), None)
            self._records.append(record)
            listeners = tuple(self._listeners)
            path = self._path
        if path is not None:
            try:
                _append(path, encode_json(record) + b"\n")
            except OSError as error:
                with self._lock:
                    self._path = None
                logger.warning(
                    "cannot write to the file of records, %s: %s; no more records are written to it", path, error
                )
        for listener in (send_spans, *listeners):
            try:
                listener(record)
            except Exception:
                logger.exception("a subscriber of records raised an error for a record of kind %s", record.kind)


class Recording:
    """The record of a running operation. One thread begins the phases; any thread may call the other methods."""

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
        self._lock = threading.RLock()  # reentrant, like the recorder's lock
        self._phases: list[Phase] = []
        self._phase = phase or beginning.kind
        self._phase_began_s = self._began_s
        self._transfers: dict[tuple[str, str], Transfer] = {}
        self._retries: list[Retry] = []
        self._notes: dict[str, str] = {}
        self._step: int | None = None
        self._num_bytes = 0
        self._has_ended = False
        self._span = ExitStack()
        self._running_transfers: Callable[[], Sequence[Transfer]] | None = None
        if whole is None:
            _open.set(weakref.ref(self))
            self._span.enter_context(profiler_span(beginning.kind, self._phase))
            recorder._add_running(self)
        elif phase:
            whole.phase(phase)

    def phase(self, name: str) -> None:
        """End the current phase, and begin the phase ``name``. Called on a part, this affects the whole recording."""
        whole = self._whole or self
        with whole._lock:
            if name != whole._phase and not whole._has_ended:
                whole._end_phase(whole._clock())
                whole._phase = name
                whole._span.close()
                whole._span.enter_context(profiler_span(whole._beginning.kind, name))

    def leave(self) -> None:
        """Detach this recording from its thread, so that the thread's next recording does not become a part of it."""
        ref = _open.get()
        if ref is not None and ref() is self:
            _open.set(None)

    def enter(self) -> None:
        """Attach this recording to the calling thread, so that the thread's next recording becomes a part of it."""
        _open.set(weakref.ref(self))

    def transfer(self, transfer: Transfer) -> None:
        """Add a transfer from or to one peer. Transfers with the same peer and role are summed."""
        whole = self._whole or self
        with whole._lock:
            _add(whole._transfers, transfer)

    def follow(self, transfers: Callable[[], Sequence[Transfer]] | None) -> None:
        """Set the function that returns running transfers, for `so_far`.

        Args:
            transfers: Function that any thread may call; ``None`` once the transfers have ended and the caller adds
                them with `transfer`.
        """
        (self._whole or self)._running_transfers = transfers

    def so_far(self) -> Record | None:
        """Return a shortened record of the operation so far; ``None`` if the recording has ended."""
        running_transfers = self._running_transfers
        running = running_transfers() if running_transfers is not None else ()
        with self._lock:
            if self._has_ended:
                return None
            now_s = self._clock()
            transfers = dict(self._transfers)
            for transfer in running:
                _add(transfers, transfer)
            phases = (*self._phases, self._current_phase(now_s))
            record = self._record("running", now_s, phases=phases, transfers=transfers)
        return shortened(record)

    def retry(self, cause: BaseException | str, *, peer: str = "") -> None:
        """Add a failure after which the operation continues with another attempt."""
        whole, text = self._whole or self, cause if isinstance(cause, str) else _describe(cause)
        with whole._lock:
            if len(whole._retries) < _MAX_RETRIES:
                whole._retries.append(Retry(at_s=whole._clock() - whole._began_s, cause=text, peer=peer))

    def note(self, **notes: str) -> None:
        """Add further facts to the record, by name."""
        whole = self._whole or self
        with whole._lock:
            whole._notes.update(notes)

    def describe(self, *, step: int | None = None, num_bytes: int | None = None) -> None:
        """Set the step and the size of the state. Call this as soon as the operation knows them."""
        whole = self._whole or self
        with whole._lock:
            whole._step = whole._step if step is None else step
            whole._num_bytes = whole._num_bytes if num_bytes is None else num_bytes

    def end(self, outcome: Outcome = "ok", *, error: BaseException | str = "") -> Record | None:
        """End the recording. On a part, and after the first call, this has no effect.

        Returns:
            The record; ``None`` if the call had no effect.
        """
        if self._whole is not None:
            return None
        with self._lock:
            if self._has_ended:
                return None
            self._has_ended = True
            self._span.close()
            now_s = self._clock()
            self._end_phase(now_s)
            text = error if isinstance(error, str) else _describe(error)
            record = self._record(outcome, now_s, phases=tuple(self._phases), transfers=self._transfers, error=text)
        self.leave()
        self._recorder._store(record, self)
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

    def _current_phase(self, now_s: float) -> Phase:
        start_s = self._phase_began_s - self._began_s
        return Phase(name=self._phase, start_s=start_s, length_s=now_s - self._phase_began_s)

    def _end_phase(self, now_s: float) -> None:
        if len(self._phases) < _MAX_PHASES:
            self._phases.append(self._current_phase(now_s))
            self._phase_began_s = now_s


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _add(transfers: dict[tuple[str, str], Transfer], more: Transfer) -> None:
    key = (more.peer, more.role)
    earlier = transfers.get(key)
    if earlier is not None:
        more = replace(
            more,
            num_bytes=earlier.num_bytes + more.num_bytes,
            length_s=earlier.length_s + more.length_s,
            num_connections=earlier.num_connections + more.num_connections,
        )
    transfers[key] = more


def _append(path: Path, line: bytes) -> None:
    """Append a line to a file with one write, so that lines of several processes do not mix."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
