"""What a fetch brings: a state, the step that it shows, and how to compare it with what has become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ft_transport.errors import ConfigurationError
from ft_transport.settings import default_num_threads
from ft_transport.state.verify import find_differences
from ft_transport.wire.manifest import Manifest

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Received(Generic[T]):
    """A state that arrived whole and verified, and the committed step that it shows.

    Attributes:
        step: The step.
        state: The state.
        num_bytes_fetched: How many bytes of data came from peers, over the network or out of the memory of one on this
            host; ``None`` if they were not counted.
    """

    step: int
    state: T
    _manifest: Manifest
    num_bytes_fetched: int | None = None

    def differences(self, state: object) -> tuple[str, ...]:
        """Where ``state`` is not, bit for bit, what was sent; whatever load functions have made of it.

        Reads every byte of it once, and sends nothing.

        Args:
            state: The receiver's state after loading. Nothing may change it meanwhile.

        Returns:
            Paths, each with what differs; empty if nothing does.

        Raises:
            UnsupportedLeafError: A leaf of ``state`` has no safe encoding.
            ConfigurationError: It was fetched without ``is_comparable``.
        """
        if self._manifest.digests is None:
            raise ConfigurationError("expected a state that was fetched with is_comparable=True")
        return find_differences(self._manifest, state, num_threads=default_num_threads())


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedBefore:
    """What an earlier fetch brought into the receiver's tensors, which nothing has changed since.

    Attributes:
        received: What it returned, with ``verify_late`` or after `Received.differences` found none.
        is_changing: Says of one of these tensors whether it is expected to differ by now.
    """

    received: Received[Any]
    is_changing: Callable[[torch.Tensor], bool]
