"""Who holds the state lock: the record that outlives a wrecked library lock.

Words: a *section* is what a caller opens and releases. A *root hold* is one acquisition of the library's
reader/writer lock; it carries one section or, where a thread nests, several, and the library's lock opens when the
last of them is closed, in whatever order and by whatever thread. A *token* stands for a section in the record.

How it stays whole when a signal handler raises, at no cost to the normal path (no thread, no lock of its own):

1. The record changes only by single dict operations, which a signal cannot split. Everything else that touches it or
   the library runs under ``except BaseException``, which calls `HoldTable.repair`: a short-lived thread, which
   handlers cannot reach, builds a new `Generation`, takes in it what is still held, and abandons the old one. Those
   who wait move over with what is left of their deadline.
2. A handler can raise in the first instruction of a release, before any ``try``; an ``__exit__`` has no other
   protection. The section then stays open while its object becomes unreachable. A weak reference, whose callback is a
   C function and so cannot be interrupted, reports it; the next call, or the next slice of anybody's wait, closes it.
3. Handlers that raise again and again can stop even the call of the repair. So whoever waits, although none of the
   holds in force is as old as the wait, rebuilds. That is always safe, since a rebuild takes no hold away, and a
   thread that was just about to record one acquires again.

Two threads never need a lock to agree, because each publishes first and looks afterwards, so that at least one sees
the other: whoever acquires publishes its hold, then looks whether the generation is still the current one, while a
rebuild publishes the generation, then reads the holds. The same decides between a thread that nests a section in a
hold and one that closes that hold (`Root.closers`), and between a rebuild and a release (`Root.handles`).
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
import weakref
from collections.abc import Callable

from readerwriterlock.rwlock import Lockable

from manager.errors import Kind
from manager.state.lock_generation import Generation, GenerationWreckedError

_logger = logging.getLogger(__name__)

# A rebuild takes a fraction of a millisecond. Events would wait with locks that a signal can wreck.
_POLL_S = 0.0002
_MAX_THREAD_STARTS = 8
# To wait that long for nobody's sake is suspicious; to suspect wrongly costs one rebuild.
_SUSPICIOUS_WAIT_S = 0.1


class Root:
    """One acquisition of the library's lock.

    Attributes:
        kind: How it holds the lock.
        generation: Where it holds it; set to another one only by a rebuild.
        opened_s: When it was acquired, on the monotonic clock.
        handles: The library's handle by generation. To pop it is the permission to release it.
        sections: The open sections.
        closers: Who is about to close the hold because it saw no section left.
    """

    __slots__ = ("closers", "generation", "handles", "kind", "opened_s", "sections")

    def __init__(self, kind: Kind, generation: Generation) -> None:
        """Describe an acquisition that has not been made yet."""
        self.kind: Kind = kind
        self.generation = generation
        self.opened_s = 0.0
        self.handles: dict[Generation, Lockable] = {generation: generation.new_handle(kind)}
        self.sections: dict[Token, bool] = {}
        self.closers: dict[object, bool] = {}


class Token(weakref.ref[object]):
    """What the record knows of a section; not the section itself, whose loss has to be noticed.

    Attributes:
        root: The hold it belongs to.
        what: What the section was opened for.
        kind: What the section was opened as, which in a write hold may be a read.
        detached: Whether it belongs to no thread.
        thread_id: Who opened it.
        thread_name: Who opened it.
        opened_s: When, on the monotonic clock.
        repaired: Whether a rebuild has closed it.
    """

    __slots__ = ("detached", "kind", "opened_s", "repaired", "root", "thread_id", "thread_name", "what")

    root: Root
    what: str
    kind: Kind
    detached: bool
    thread_id: int
    thread_name: str
    opened_s: float
    repaired: bool

    # By identity: the inherited ones ask the section, which may be gone.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @property
    def is_open(self) -> bool:
        """Whether its section is still to be closed."""
        # Without a root if a handler broke in as it was made.
        root: Root | None = getattr(self, "root", None)
        return root is not None and self in root.sections


class _RepairOrder:
    """What a rebuild has to do; carried out twice, it does no harm."""

    __slots__ = ("drop", "is_done", "is_started", "lost")

    def __init__(self, drop: tuple[Token, ...]) -> None:
        self.drop = drop
        self.lost: list[Token] = []
        self.is_started = False
        self.is_done = False


class HoldTable:
    """The record of holds and the current generation of the library's lock. All methods are for any thread.

    Attributes:
        roots: Every hold that is in force, the oldest first.
    """

    def __init__(self, *, is_wait_useless: Callable[[], bool]) -> None:
        """Start with nothing held.

        Args:
            is_wait_useless: Asked in every slice of a wait, by the waiting thread; the wait ends on a True.
        """
        self._is_wait_useless = is_wait_useless
        self._generation = Generation(keep_waiting=self._keep_waiting, ready=True)
        self.roots: dict[Root, bool] = {}
        self._abandoned: set[Token] = set()
        # Only taken by rebuilding threads, which no handler can interrupt.
        self._rebuilding = threading.Lock()

    def new_token(self, section: object, kind: Kind, what: str, *, detached: bool) -> Token:
        """Return a token that reports the loss of the section from now on; it belongs to a hold of its own yet."""
        root = Root(kind, self._generation)
        # The callback is a C function: it cannot be interrupted by a handler.
        token = Token(section, self._abandoned.add)
        token.root = root
        token.kind = kind
        token.what = what
        token.detached = detached
        token.thread_id = threading.get_ident()
        token.thread_name = threading.current_thread().name
        token.opened_s = time.monotonic()
        token.repaired = False
        return token

    def acquire(self, token: Token, deadline_s: float) -> bool:
        """Make a hold for the token, waiting until a time on the monotonic clock.

        Returns:
            Whether it is held. If not, the deadline has passed or the wait became useless.
        """
        while True:
            generation = self._generation
            root = token.root
            if root.generation is not generation:
                root = token.root = Root(token.kind, generation)
            root.sections[token] = True
            try:
                try:
                    if self._wait_for_library(root, deadline_s):
                        token.opened_s = root.opened_s = time.monotonic()
                        self.roots[root] = True
                        if self._generation is generation or self._was_adopted(root):
                            return True
                    else:
                        root.sections.pop(token, None)
                        return False
                except GenerationWreckedError:
                    root.sections.pop(token, None)
                    if time.monotonic() >= deadline_s:
                        return False
                except BaseException:
                    self.repair(token)
                    raise
            except BaseException:
                self._repair_if_not_done(token)
                raise

    def nest(self, root: Root, token: Token) -> bool:
        """Add the token to a hold; False if the last section of it is just being closed by another thread."""
        token.root = root
        try:
            root.sections[token] = True
            while root.closers and root in self.roots:
                time.sleep(0)
            if root in self.roots:
                return True
            root.sections.pop(token, None)
            return False
        except BaseException:
            self.close(token)
            raise

    def close(self, token: Token) -> bool:
        """Close a section, and its hold if it was the last; an exception that interrupts this does not prevent it.

        Returns:
            Whether it was open.
        """
        try:
            try:
                root = token.root
                # The pop decides between two threads that close the same section.
                if not root.sections.pop(token, False):
                    return False
                if not root.sections:
                    self._close_root(root, token)
                return True
            except BaseException:
                self.repair(token)
                raise
        except BaseException:
            self._repair_if_not_done(token)
            raise

    def close_abandoned(self) -> None:
        """Close the sections whose objects are gone."""
        if not self._abandoned:
            return
        for token in list(self._abandoned):
            if not token.is_open:
                self._abandoned.discard(token)
        if self._abandoned:
            for token in self.repair():
                _logger.warning(
                    "a %s section (%r) opened by thread %r was dropped without a release; it is closed now",
                    token.kind,
                    token.what,
                    token.thread_name,
                )

    def repair(self, *drop: Token) -> list[Token]:
        """Close the given and the abandoned sections and replace the library's lock; nothing can interrupt it.

        Returns:
            The abandoned sections.
        """
        order = _RepairOrder(drop)
        try:
            self._carry_out(order)
        except BaseException:
            self._carry_out(order)
            raise
        return order.lost

    def _wait_for_library(self, root: Root, deadline_s: float) -> bool:
        while not root.generation.ready:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)
        return root.handles[root.generation].acquire(True, max(0.0, deadline_s - time.monotonic()))

    def _was_adopted(self, root: Root) -> bool:
        """Whether a rebuild that went on meanwhile took the hold over into the current generation."""
        while True:
            generation = self._generation
            while not generation.ready:
                time.sleep(_POLL_S)
            if generation is self._generation:
                if root.generation is generation:
                    return True
                self.roots.pop(root, None)
                root.sections.clear()
                return False

    def _close_root(self, root: Root, closer: object) -> None:
        root.closers[closer] = True
        if root.sections:
            root.closers.pop(closer, None)
            return
        is_ours = self.roots.pop(root, False)
        # Whoever nests looks in the table first. A closer that stayed would make a cycle of hold and token.
        root.closers.pop(closer, None)
        if not is_ours:
            return
        while root.handles:
            try:
                generation, handle = root.handles.popitem()
            except KeyError:
                return
            while not generation.ready:
                time.sleep(_POLL_S)
            try:
                handle.release()
            except GenerationWreckedError:
                continue

    def _keep_waiting(self, start_s: float) -> bool:
        # This runs in the midst of the library, so that to release anything by way of the library could deadlock.
        self.close_abandoned()
        if time.monotonic() - start_s > _SUSPICIOUS_WAIT_S and not any(
            root.sections and root.opened_s <= start_s for root in list(self.roots)
        ):
            self.repair()
        return not self._is_wait_useless()

    def _repair_if_not_done(self, token: Token) -> None:
        # For a handler that raised again before the first attempt had begun.
        if not token.repaired:
            self.repair(token)

    def _carry_out(self, order: _RepairOrder) -> None:
        raised: BaseException | None = None
        num_starts = 0
        while not order.is_done:
            try:
                if num_starts == _MAX_THREAD_STARTS:
                    # No thread is to be had: to rebuild here is not safe from handlers, but better than nothing.
                    self._rebuild(order)
                elif not order.is_started:
                    num_starts += 1
                    _thread.start_new_thread(self._rebuild, (order,))
                    order.is_started = True
                time.sleep(_POLL_S)
            except BaseException as error:
                raised = error
        if raised is not None:
            raise raised

    def _rebuild(self, order: _RepairOrder) -> None:
        with self._rebuilding:
            if order.is_done:
                return
            try:
                for token in order.drop:
                    self._drop(token)
                for token in list(self._abandoned):
                    self._abandoned.discard(token)
                    if token.is_open:
                        self._drop(token)
                        order.lost.append(token)
                self._replace_generation()
            finally:
                order.is_done = True

    def _replace_generation(self) -> None:
        old = self._generation
        new = Generation(keep_waiting=self._keep_waiting, ready=False)
        try:
            self._generation = new
            for root in list(self.roots):
                self._adopt(root, old, new)
        finally:
            new.ready = True
            old.wrecked = True

    def _drop(self, token: Token) -> None:
        token.root.sections.pop(token, None)
        token.root.closers.pop(token, None)
        token.repaired = True

    def _adopt(self, root: Root, old: Generation, new: Generation) -> None:
        if root.generation is not old:
            # Published too late for an earlier rebuild: its thread sees that, and acquires again.
            return
        if not root.sections:
            root.closers[new] = True
            if not root.sections:
                self.roots.pop(root, None)
                return
            root.closers.pop(new, None)
        handle = new.new_handle(root.kind)
        is_free = handle.acquire(True, 0)
        assert is_free, "a generation that is not ready is held by nobody else"
        root.handles.clear()
        root.handles[new] = handle
        root.generation = new
        if root not in self.roots and root.handles.pop(new, None) is not None:
            handle.release()
