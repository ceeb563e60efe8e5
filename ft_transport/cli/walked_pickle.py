"""Parses the pickle of a tensor into tuples, strings and numbers, without calling anything.

Supports the opcodes that ``torch.save`` writes for a tensor (see ``pickletools``). Time and memory are proportional to
the length of the pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final


def walk_pickle(pickled: bytes) -> Any:
    """Parse a pickle.

    A name becomes ``(module, name)``, a call ``(name, arguments)``, a persistent id ``("persistent", id)``.

    Raises:
        ValueError: An unsupported opcode.
        LookupError: The pickle ends early, or pops from an empty stack.
    """
    machine = _Machine(pickled)
    while (opcode := machine.take(1)) != b".":
        step = _STEPS.get(opcode)
        if step is None:
            raise ValueError(f"expected the pickle of a tensor, which has no {opcode!r}")
        step(machine)
    return machine.stack.pop()


class _Machine:
    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled
        self._at = 0
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self.stack: list[Any] = []

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes."""
        self._at += num_bytes
        if self._at > len(self._pickled):
            raise IndexError("it ends early")
        return self._pickled[self._at - num_bytes : self._at]

    def number(self, num_bytes: int, *, signed: bool = False) -> int:
        """Return the next number."""
        return int.from_bytes(self.take(num_bytes), "little", signed=signed)

    def name(self) -> None:
        """Push a module and a name in it."""
        lines = []
        for _ in range(2):
            end = self._pickled.index(b"\n", self._at)
            lines.append(self._pickled[self._at : end].decode())
            self._at = end + 1
        self.stack.append(tuple(lines))

    def keep(self, num_bytes: int) -> None:
        """Store the top of the stack under a number."""
        self._memo[self.number(num_bytes)] = self.stack[-1]

    def recall(self, num_bytes: int) -> None:
        """Push a stored value."""
        self.stack.append(self._memo[self.number(num_bytes)])

    def mark(self) -> None:
        """Begin a tuple."""
        self._marks.append(len(self.stack))

    def since_mark(self) -> None:
        """Make a tuple of the values since its beginning."""
        self.last(len(self.stack) - self._marks.pop())

    def last(self, count: int) -> None:
        """Make a tuple of the last values."""
        start = len(self.stack) - count
        if not 0 <= start <= len(self.stack):
            raise IndexError("it takes more than there is")
        self.stack[start:] = [tuple(self.stack[start:])]

    def persistent(self) -> None:
        """Make a persistent reference."""
        self.stack.append(("persistent", self.stack.pop()))


_STEPS: Final[dict[bytes, Callable[[_Machine], object]]] = {
    b"\x80": lambda machine: machine.take(1),  # PROTO
    b"c": _Machine.name,  # GLOBAL
    b"q": lambda machine: machine.keep(1),  # BINPUT
    b"r": lambda machine: machine.keep(4),  # LONG_BINPUT
    b"h": lambda machine: machine.recall(1),  # BINGET
    b"j": lambda machine: machine.recall(4),  # LONG_BINGET
    b"X": lambda machine: machine.stack.append(machine.take(machine.number(4)).decode()),  # BINUNICODE
    b"K": lambda machine: machine.stack.append(machine.number(1)),  # BININT1
    b"M": lambda machine: machine.stack.append(machine.number(2)),  # BININT2
    b"J": lambda machine: machine.stack.append(machine.number(4, signed=True)),  # BININT
    b"\x8a": lambda machine: machine.stack.append(machine.number(machine.number(1), signed=True)),  # LONG1
    b"G": lambda machine: machine.stack.extend(struct.unpack(">d", machine.take(8))),  # BINFLOAT
    b"\x88": lambda machine: machine.stack.append(True),  # NEWTRUE
    b"\x89": lambda machine: machine.stack.append(False),  # NEWFALSE
    b"(": _Machine.mark,  # MARK
    b"t": _Machine.since_mark,  # TUPLE
    b")": lambda machine: machine.last(0),  # EMPTY_TUPLE
    b"\x85": lambda machine: machine.last(1),  # TUPLE1
    b"\x86": lambda machine: machine.last(2),  # TUPLE2
    b"\x87": lambda machine: machine.last(3),  # TUPLE3
    b"Q": _Machine.persistent,  # BINPERSID
    b"R": lambda machine: machine.last(2),  # REDUCE
}
