"""An engine's own tensors. A version gets into them as a whole or not at all."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch

from ft_transport.errors import RestoreError, TransportError
from ft_transport.http.client.fetch_settings import FetchHandle, FetchSettings, FetchTimeout
from ft_transport.http.peer_address import PeerAddress
from ft_transport.keys import Keys
from ft_transport.publish.deltas import AppliedChanges, OwnChange, changes_of
from ft_transport.settings import TransportSettings
from ft_transport.state.dtensors import is_dtensor
from ft_transport.state.dtypes import overlaps_itself
from ft_transport.state.matching import Incoming
from ft_transport.state.views import extent_bytes, has_own_memory
from ft_transport.telemetry.recorder import Recorder
from ft_transport.tls import TLSFiles
from ft_transport.transfer.client import FetchRequest, StateClient
from ft_transport.transfer.sources import FetchPeers

logger = logging.getLogger(__name__)

_NUM_CONNECTIONS: Final = 4
_STALL_TIMEOUT: Final = timedelta(seconds=10)
_UNREACHABLE_TIMEOUT: Final = timedelta(seconds=10)
"""A publisher orders only versions that it already serves, so no receiver needs to wait for its start."""

Weights: TypeAlias = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]


class WeightsDifferError(RestoreError):
    """The version has other tensors than the engine."""


class WeightsUnusableError(RestoreError):
    """The engine has a value that cannot be received into."""


class ReceivedWeights:
    """Receives versions into an engine's tensors. One thread at a time fetches; any thread may read the attributes.

    Args:
        weights: See ``WeightReceiver``.
        paused: See ``WeightReceiver``.
        keys: The job's keys, if it has any.
        timeout: Timeout for fetching a version.

    Attributes:
        version: The version that the tensors hold; ``None`` before the first, while they change, and after one that
            failed on its way.
        num_bytes_fetched: Number of bytes that the last version took.
    """

    def __init__(
        self,
        weights: Weights,
        *,
        paused: Callable[[], AbstractContextManager[object]],
        keys: Keys | None,
        tls: TLSFiles | None = None,
        timeout: timedelta,
    ) -> None:
        self._weights = weights
        self._paused = paused
        self._timeout = timeout
        settings = TransportSettings(stall_timeout=_STALL_TIMEOUT, tls=tls)
        self._client = StateClient[Any](
            settings,
            timeout=timeout,
            num_connections=_NUM_CONNECTIONS,
            keys=keys,
            certificates=settings.certificates(),
            recorder=Recorder(),
        )
        self.version: int | None = None
        self.num_bytes_fetched = 0

    def fetch(self, source: PeerAddress, version: int, handle: FetchHandle) -> None:
        """Receive a version.

        Args:
            source: The server of the version.
            version: The version.
            handle: Counts bytes, and ends the fetch.

        Raises:
            WeightsDifferError: The version has other tensors; nothing was received.
            WeightsUnusableError: The engine has an unusable value; nothing was received.
            TransportError: The version did not arrive. With ``destination_touched`` the tensors hold no version any
                more.
            Exception: An error of the engine's own functions.
        """
        own = _own_weights(self._weights() if callable(self._weights) else self._weights)
        into = {"weights": {names[0]: tensor for names, tensor in own}}

        def check(incoming: Incoming) -> None:
            _refuse_others(incoming, {name for names, _ in own for name in names})

        settings = self._settings(handle)
        changes, num_delta_bytes = self._deltas(source, version, own, settings)
        applied = AppliedChanges()
        with self._paused():
            # Until the version is complete or undone: the undo may fail as well.
            base, self.version = self.version, None
            try:
                applied.apply(changes)
                received = self._client.fetch(
                    FetchRequest(
                        peers=FetchPeers(sources=[source]),
                        step=version,
                        # Starts the timeout again: the pause may have waited for a long forward pass.
                        settings=self._settings(handle),
                        into=into,
                        check=check,
                        known="into",
                    )
                )
            except BaseException as error:
                if not getattr(error, "destination_touched", False):
                    applied.undo()
                    self.version = base
                raise
            _refuse_unfilled(received.state["weights"], own)
            self.version = received.step
            self.num_bytes_fetched = num_delta_bytes + (received.num_bytes_fetched or 0)

    def _settings(self, handle: FetchHandle) -> FetchSettings:
        settings = self._client.fetch_settings(FetchTimeout(total=self._timeout, unreachable=_UNREACHABLE_TIMEOUT))
        return dataclasses.replace(settings, timeouts=dataclasses.replace(settings.timeouts, handle=handle))

    def _deltas(
        self, source: PeerAddress, version: int, own: _Own, settings: FetchSettings
    ) -> tuple[list[OwnChange], int]:
        """Return the changes from the current version to another, and their bytes; empty if no delta applies."""
        base = self.version
        if base is None:
            return [], 0
        max_bytes = sum(each.nbytes for _, each in own)
        try:
            deltas = self._client.fetch_deltas(source, base, version, max_bytes=max_bytes, settings=settings)
            changes = changes_of(deltas, {name: tensor for names, tensor in own for name in names})
        except TransportError as error:
            logger.info("version %d: the deltas from version %d are of no use: %s", version, base, error)
            return [], 0
        return changes, sum(delta.num_bytes for delta in deltas)


_Own: TypeAlias = list[tuple[list[str], torch.Tensor]]


def _own_weights(weights: Mapping[str, object]) -> _Own:
    """Return the engine's tensors, each once with all its names, as plain tensors that share its memory.

    Raises:
        WeightsUnusableError: A value is not a tensor that bytes can be received into, or two tensors overlap.
    """
    own: dict[tuple[object, ...], tuple[list[str], torch.Tensor]] = {}
    for name, value in weights.items():
        plain: object = value
        if isinstance(value, torch.Tensor) and not is_dtensor(value):
            plain = value.detach().as_subclass(torch.Tensor)
        if not has_own_memory(plain) or (not plain.is_contiguous() and overlaps_itself(plain.shape, plain.stride())):
            kind = (
                f"{type(value).__name__} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
            )
            raise WeightsUnusableError(
                f"expected a tensor with memory of its own to receive into, got {kind}", path=name
            )
        key = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride()) if plain.numel() else (name,)
        own.setdefault(key, ([], plain))[0].append(name)
    found = list(own.values())
    by_start = sorted((str(each.device), each.data_ptr(), extent_bytes(each), names[0]) for names, each in found)
    for (device, start, length, name), (other_device, other_start, other_length, other) in itertools.pairwise(by_start):
        if device == other_device and other_length and other_start < start + length:
            raise WeightsUnusableError(
                f"expected weights that do not overlap, {other} begins inside {name}", path=other
            )
    return found


def _refuse_unfilled(state: Mapping[str, torch.Tensor], own: _Own) -> None:
    """Check that the engine's own tensors hold the received values, and that all names of a tie have the same value."""
    for names, tensor in own:
        if state[names[0]] is not tensor and tensor.numel():
            raise RestoreError("expected it to be received in place, it was not", path=names[0])
        for name in names[1:]:
            if not torch.equal(_bits_of(state[name]), _bits_of(tensor)):
                raise WeightsDifferError(
                    f"expected the same as {names[0]}, with which it shares memory here", path=name
                )


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _refuse_others(incoming: Incoming, own: Set[str]) -> None:
    """Check that the version has exactly the engine's tensors."""
    names = set(incoming.keys("weights") or ())
    if incoming.mismatches or names != own:
        missing, unexpected = sorted(own - names)[:5], sorted(names - own)[:5]
        differing = "; ".join(
            f"{each.path}: {each.own} here, {each.received} there" for each in incoming.mismatches[:5]
        )
        raise WeightsDifferError(
            f"expected the weights that are here; missing: {missing or 'none'}, unexpected: {unexpected or 'none'}, "
            f"differing: {differing or 'none'}; nothing was received"
        )
