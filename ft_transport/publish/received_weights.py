"""Receives versions into an engine's own tensors, or into new tensors, from allowed sources only.

After a failed transfer, the tensors have the previous version, or are marked as unusable.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch

from ft_transport.credentials import Keys, TLSFiles
from ft_transport.errors import (
    ConfigurationError,
    DeadlineExceededError,
    FetchFailedError,
    PeerUnreachableError,
    RestoreError,
    TransportError,
    escape_peer_text,
)
from ft_transport.http.client.connection import Connection
from ft_transport.http.client.fetch_settings import FetchHandle, FetchSettings, FetchTimeout
from ft_transport.http.client.manifests import fetch_deltas, fetch_manifest
from ft_transport.http.peer_address import PeerAddress
from ft_transport.publish.allowed_sources import AllowedSources, SourceRefusedError
from ft_transport.publish.deltas import changes_of, flip
from ft_transport.publish.engines.pulling import Reason
from ft_transport.publish.order_queue import OrderRefusedError
from ft_transport.settings import Limits, TransportSettings
from ft_transport.state.matching import Incoming
from ft_transport.state.placements import is_dtensor
from ft_transport.state.prefaulted import PrefaultedMemory
from ft_transport.state.tensors import extent_bytes, has_own_memory, overlaps_itself
from ft_transport.telemetry.recorder import Recorder
from ft_transport.transfer.client import FetchRequest, StateClient
from ft_transport.transfer.sources import FetchPeers
from ft_transport.wire.delta import TensorChanges

logger = logging.getLogger(__name__)

_UNREACHABLE_TIMEOUT: Final = timedelta(seconds=10)
"""Short, because a publisher orders only versions that its transport already serves."""

_MAX_SHOWN_CHARACTERS: Final = 2000

Weights: TypeAlias = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]


class WeightsDifferError(RestoreError):
    """The published version does not have the same tensors as the engine."""


class WeightsUnusableError(RestoreError):
    """A weight of the engine is not a tensor into which data can be received."""


_REASONS: Final[Sequence[tuple[type[Exception], Reason]]] = (
    (ConfigurationError, "malformed"),
    (SourceRefusedError, "source_refused"),
    (WeightsDifferError, "weights_differ"),
    (WeightsUnusableError, "weights_unusable"),
    (DeadlineExceededError, "too_slow"),
    (PeerUnreachableError, "source_unreachable"),
    (TransportError, "source_failed"),
)


def log_failure(version: int, error: Exception) -> Reason:
    """Log why a version could not be received. Return the reason, which is all that the publisher may learn."""
    reason = _reason_of(error)
    is_own = reason in ("engine_failed", "weights_unusable") and not isinstance(error, TransportError)
    text = escape_peer_text(f"{type(error).__name__}: {error}", max_characters=_MAX_SHOWN_CHARACTERS)
    logger.warning("version %d could not be received: %s", version, text, exc_info=is_own)
    return reason


def _reason_of(error: Exception) -> Reason:
    if isinstance(error, OrderRefusedError):
        return error.reason
    if isinstance(error, FetchFailedError) and error.failures:
        error = error.failures[-1] if isinstance(error.failures[-1], PeerUnreachableError) else error
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "engine_failed")


class ReceivedWeights:
    """Receives versions into an engine's tensors. One thread at a time may fetch; any thread may read the attributes.

    Args:
        weights: The engine's tensors by name, or a function that returns them. ``None`` for new tensors in host memory,
            as many and as large as each version requires.
        allowed: Decides from which addresses versions may be fetched.
        paused: Returns a context manager. Inside the context, no forward pass reads the tensors.
        keys: Keys of the job; ``None`` without a job token.
        tls: Certificates for fetching versions.
        timeout: Longest duration of fetching a version.
        memory: Provides the memory of new tensors; ``None`` for private memory.

    Attributes:
        version: The version of the tensors. ``None`` before the first version, while the tensors change, and after a
            transfer that left the tensors unusable.
        num_bytes_fetched: Number of bytes that were fetched for the last complete version.
        tensors: The tensors of the last complete version, if ``weights`` is ``None``.
    """

    def __init__(
        self,
        weights: Weights | None,
        allowed: AllowedSources,
        *,
        paused: Callable[[], AbstractContextManager[object]],
        keys: Keys | None,
        tls: TLSFiles | None,
        timeout: timedelta,
        memory: PrefaultedMemory | None = None,
    ) -> None:
        self._weights = weights
        self._allowed = allowed
        self._paused = paused
        self._timeout = timeout
        settings = TransportSettings(limits=Limits(stall_timeout=timedelta(seconds=10)), tls=tls)
        self._client = StateClient[Any](
            settings,
            timeout=timeout,
            num_connections=4,
            keys=keys,
            certificates=settings.certificates(),
            recorder=Recorder(),
            prefaulted=memory,
        )
        self.version: int | None = None
        self.num_bytes_fetched = 0
        self.tensors: Mapping[str, torch.Tensor] = {}

    def fetch(self, address: str, version: int, handle: FetchHandle) -> None:
        """Receive a version.

        Args:
            address: URL of the transport that serves the version.
            version: Number of the version.
            handle: Counts the received bytes; cancelling the handle ends the fetch.

        Raises:
            SourceRefusedError: The receiver may not fetch from this address.
            DeadlineExceededError: The handle was cancelled, or the timeout expired.
            WeightsDifferError: The version has other tensors than the engine, and nothing was received; or it has
                different values for the names of a tied tensor, and the tensors are unusable.
            WeightsUnusableError: A weight of the engine is unusable; nothing was received.
            TransportError: The version did not arrive completely. If ``destination_touched`` is set, the tensors are
                unusable.
            Exception: The engine's ``weights`` or ``paused`` raised an error.
        """
        try:
            self._fetch(self._allowed.choose(address, is_given_up=lambda: bool(handle.reason)), version, handle)
        except TransportError as error:
            if not handle.reason:
                raise
            # The error is a consequence of the cancelled handle.
            ended = DeadlineExceededError(handle.reason)
            ended.destination_touched = error.destination_touched
            raise ended from error

    def wait_until_served(self, address: str, version: int, handle: FetchHandle) -> None:
        """Wait until a source serves a version, for at most ``timeout``. The arguments and errors are those of `fetch`.

        A source serves the delta of a version before the version. So a `fetch` after this call finds the delta.
        """
        source = self._allowed.choose(address, is_given_up=lambda: bool(handle.reason))
        settings = self._settings(handle)
        with Connection.of(source, settings) as connection:
            fetch_manifest(connection, version, settings)

    def _fetch(self, source: PeerAddress, version: int, handle: FetchHandle) -> None:
        given = self._weights() if callable(self._weights) else self._weights
        own = _own_weights(given if given is not None else self.tensors)
        into = {"weights": {names[0]: tensor for names, tensor in own}}

        def check(incoming: Incoming) -> None:
            if given is not None:
                _refuse_others(incoming, {name for names, _ in own for name in names})

        settings = self._settings(handle)
        changes, num_delta_bytes = self._deltas(source, version, own, settings)
        applied: list[tuple[torch.Tensor, TensorChanges]] = []
        with self._paused():
            # No version until the fetch is complete, or its changes are undone, which may fail as well.
            base, self.version = self.version, None
            try:
                for change in changes:
                    flip(*change)
                    applied.append(change)
                received = self._client.fetch(
                    FetchRequest(
                        peers=FetchPeers(sources=[source]),
                        step=version,
                        # New settings, with the full timeout: entering the pause may have taken long.
                        settings=self._settings(handle),
                        into=into,
                        check=check,
                        known="into",
                    )
                )
            except BaseException as error:
                if not getattr(error, "destination_touched", False):
                    for change in reversed(applied):
                        flip(*change)
                    self.version = base
                raise
            if given is not None:
                _refuse_unfilled(received.state["weights"], own)
            else:
                _own_weights(received.state["weights"])  # The next version must fit into these tensors.
                self.tensors = received.state["weights"]
            self.version = received.step
            self.num_bytes_fetched = num_delta_bytes + (received.num_bytes_fetched or 0)

    def _settings(self, handle: FetchHandle) -> FetchSettings:
        settings = self._client.fetch_settings(FetchTimeout(total=self._timeout, unreachable=_UNREACHABLE_TIMEOUT))
        return dataclasses.replace(settings, timeouts=dataclasses.replace(settings.timeouts, handle=handle))

    def _deltas(
        self, source: PeerAddress, version: int, own: _Own, settings: FetchSettings
    ) -> tuple[list[tuple[torch.Tensor, TensorChanges]], int]:
        """Fetch the deltas from the current version to another one. Return their changes and their size in bytes.

        Without a usable delta, there are no changes, and the size is 0.
        """
        base = self.version
        if base is None:
            return [], 0
        max_bytes = sum(each.nbytes for _, each in own)
        try:
            deltas = fetch_deltas(source, base, version, max_bytes=max_bytes, settings=settings)
            changes = changes_of(deltas, {name: tensor for names, tensor in own for name in names})
        except TransportError as error:
            logger.info("version %d: the deltas from version %d cannot be used: %s", version, base, error)
            return [], 0
        return changes, sum(delta.num_bytes for delta in deltas)


_Own: TypeAlias = list[tuple[list[str], torch.Tensor]]


def _own_weights(weights: Mapping[str, object]) -> _Own:
    """Return each of the engine's tensors once, with all its names, as a plain tensor with the same memory.

    Raises:
        WeightsUnusableError: A value is not a tensor into which data can be received, or two tensors overlap.
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
            raise WeightsUnusableError(f"expected a tensor with its own memory to receive into, got {kind}", path=name)
        key = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride()) if plain.numel() else (name,)
        own.setdefault(key, ([], plain))[0].append(name)
    found = list(own.values())
    by_start = sorted((str(each.device), each.data_ptr(), extent_bytes(each), names[0]) for names, each in found)
    for (device, start, length, name), (other_device, other_start, other_length, other) in itertools.pairwise(by_start):
        if device == other_device and other_length and other_start < start + length:
            raise WeightsUnusableError(
                f"expected weights that do not overlap, but {other} begins inside the memory of {name}", path=other
            )
    return found


def _refuse_unfilled(state: Mapping[str, torch.Tensor], own: _Own) -> None:
    """Check that all tensors were received in place, and that all names of a tied tensor have the same value."""
    for names, tensor in own:
        if state[names[0]] is not tensor and tensor.numel():
            raise RestoreError("expected this tensor to be received in place, got another tensor", path=names[0])
        for name in names[1:]:
            if not torch.equal(_bits_of(state[name]), _bits_of(tensor)):
                raise WeightsDifferError(
                    f"expected the value of {names[0]}, because both share memory in the engine, got another value",
                    path=name,
                )


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _refuse_others(incoming: Incoming, own: Set[str]) -> None:
    """Refuse a version that does not have exactly the engine's tensors."""
    names = set(incoming.keys("weights") or ())
    if incoming.mismatches or names != own:
        missing, unexpected = sorted(own - names)[:5], sorted(names - own)[:5]
        differing = "; ".join(
            f"{each.path}: {each.own} in the engine, {each.received} published" for each in incoming.mismatches[:5]
        )
        raise WeightsDifferError(
            f"expected exactly the engine's weights; missing: {missing or 'none'}, unexpected: {unexpected or 'none'}, "
            f"differing: {differing or 'none'}; nothing was received"
        )
