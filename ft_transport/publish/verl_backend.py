"""The checkpoint engine ``ft_transport`` of verl, with which rollout workers fetch the actor's weights.

The user's configuration selects the engine (``checkpoint_engine.backend``) and names this module
(``checkpoint_engine.custom_backend_module``), which verl then imports in each of its processes. Nothing else may import
the module, because it imports verl. For each update, verl 0.9.1 (verl/checkpoint_engine/base.py) makes these calls:

1. ``prepare`` on all workers, ``build_topology`` in the driver, and ``init_process_group`` on all workers. With these
   calls, the rollout workers learn the address and the job token of actor rank 0, and the number of the next version.
2. ``send_weights`` on all actor ranks, and at the same time ``receive_weights`` on all rollout workers. Rank 0 copies
   the weights into its host memory, encodes the changes since the previous version as a delta, and serves both. Each
   rollout worker waits for the version, fetches the delta or else the weights into its own host memory, verifies them,
   and passes them to verl's rollout.

Versions count the updates since rank 0 started. They do not depend on verl's ``global_steps``, which may be missing,
repeat, or decrease after a restart.

Ray and verl run all methods on one thread of the worker, and resume the driver at the first error of a worker. The
workers without an error then continue with the update until its end or its deadline, perhaps beside the next update.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, Final, TypeAlias

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ft_transport.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Keys
from ft_transport.errors import ConfigurationError, PublishError
from ft_transport.http.bind_address import ADVERTISE_VARIABLE
from ft_transport.http.client.fetch_settings import FetchHandle
from ft_transport.publish.allowed_sources import AllowedSources
from ft_transport.publish.deltas import pair_of
from ft_transport.publish.received_weights import ReceivedWeights
from ft_transport.settings import TransportSettings, check_duration
from ft_transport.state.blocks import CASTABLE
from ft_transport.state.snapshot import Taking
from ft_transport.transport import HTTPTransport
from ft_transport.wire.delta import TensorPair, encode_delta

logger = logging.getLogger(__name__)

NAME: Final = "ft_transport"
Source: TypeAlias = Mapping[str, Any]
"""The address and the token of actor rank 0, and the number of the next version."""


@CheckpointEngineRegistry.register(NAME)
class FTTransportCheckpointEngine(CheckpointEngine):
    """Serves the weights on actor rank 0, and fetches them on each rollout worker.

    verl calls all methods on one thread of the worker.

    Args:
        bucket_size: Ignored. verl passes the size of the buckets in which its other engines send the weights.
        is_master: Whether this process is actor rank 0.
        rollout_dtype: Dtype to which floating-point weights are cast before the transfer: float64, float32, float16 or
            bfloat16. With ``None``, the weights keep their dtypes.
        timeout_s: Longest time that a rollout worker waits for rank 0 to collect the weights, and longest time of the
            fetch that follows, in seconds.

    Attributes:
        num_bytes_fetched: Number of bytes that this rollout worker fetched for its last complete version.

    Raises:
        ConfigurationError: A setting is invalid.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        rollout_dtype: str | torch.dtype | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        del bucket_size
        timeout = check_duration("timeout_s", timedelta(seconds=timeout_s))
        # The configuration has a name, and a caller in Python may pass the dtype, as for verl's other engines.
        dtype = getattr(torch, str(rollout_dtype).removeprefix("torch."), None) if rollout_dtype is not None else None
        if rollout_dtype is not None and dtype not in CASTABLE:
            raise ConfigurationError(f"expected a floating-point dtype as rollout_dtype, got {rollout_dtype!r}")
        self._sender = _Sender(dtype, timeout) if is_master else None
        self._receiver = _Receiver(timeout)

    @property
    def num_bytes_fetched(self) -> int:
        """Number of bytes that this rollout worker fetched for its last complete version."""
        return self._receiver.num_bytes_fetched

    def prepare(self) -> Source | None:
        """Return the source of the next version on actor rank 0, ``None`` on all other workers."""
        return self._sender.next_source() if self._sender is not None else None

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[Source | None]
    ) -> tuple[dict[str, list[Source | None]], dict[str, list[Source | None]]]:
        """Return the arguments of `init_process_group`: the source for each rollout worker, ``None`` for the actor."""
        return {"source": [None] * actor_wg_world_size}, {"source": [metadata[0]] * rollout_world_size}

    def init_process_group(self, source: Source | None) -> None:
        """Begin an update. Cancels a fetch of an earlier update.

        Raises:
            ConfigurationError: This rollout worker lacks the job token, which the actor has.
        """
        if source is not None:
            self._receiver.begin(source)

    def finalize(self) -> None:
        """Do nothing: both sides keep the version, because the next delta applies to it."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Serve the weights on actor rank 0. Other ranks only take part in the collectives of the iterator.

        Returns:
            Metrics, which verl adds to those of the step; empty on other ranks than 0.

        Raises:
            PublishError: ``rollout_dtype`` does not suit the weights.
            Exception: The error of the iterator.
        """
        if self._sender is not None:
            return await self._sender.send(weights, global_steps)
        with torch.no_grad():
            for _ in weights:
                pass
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Fetch the weights, then yield them by name, in the order of rank 0.

        The tensors are on the accelerator of this worker; without an accelerator, in host memory. The caller must not
        change them.

        Raises:
            TransportError: The weights did not arrive completely, or not in time.
        """
        async for name, tensor in self._receiver.receive(global_steps):
            yield name, tensor


class _Sender:
    """Serves the versions, on actor rank 0.

    Args:
        dtype: Dtype to which floating-point weights are cast; ``None`` for no cast.
        timeout: Longest time for which a request may wait for its version.
    """

    def __init__(self, dtype: torch.dtype | None, timeout: timedelta) -> None:
        self._dtype = dtype
        self._timeout = timeout
        self._token = secrets.token_hex(32) if Keys.from_environment() is None else None
        self._transport: HTTPTransport[Any] | None = None
        self._has_failed = False
        self._version = 0
        # The served version: its tensors in host memory, and its number, ``None`` while the tensors change.
        self._weights: dict[str, torch.Tensor] = {}
        self._served: int | None = None

    def next_source(self) -> Source:
        if self._has_failed and self._transport is not None:
            # The server would refuse the next version's receivers for some seconds, because of the earlier failure.
            self._transport.shutdown(wait=False)
            self._transport, self._has_failed = None, False
        if self._transport is None:
            node = None if ADVERTISE_VARIABLE in os.environ else ray.util.get_node_ip_address()
            settings = TransportSettings(token=self._token, advertise=node)
            self._transport = HTTPTransport(self._timeout, settings=settings)
        self._version += 1
        return {"address": self._transport.metadata(), "version": self._version, "token": self._token}

    async def send(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None) -> dict[str, float]:
        assert self._transport is not None, "verl calls prepare before send_weights"
        began_s = time.monotonic()
        base, self._served = self._served, None
        try:
            # On this thread, whose current device and process groups the iterator uses.
            with torch.no_grad():
                delta = self._collect(self._transport, weights, base)
            collected_s = time.monotonic()
            if base is not None and delta is not None:
                self._transport.keep_delta(base, delta)
            state = {"weights": self._weights}
            # `_collect` calls `materialize` before it changes the tensors, so no copy is necessary.
            taking = Taking(step=self._version, state=state, lasting=lambda _: True)
            await asyncio.to_thread(lambda server: server.take(taking).publish(), self._transport.server)
        except BaseException as error:
            self._has_failed = True
            self._transport.server.snapshot_failed(self._version, error, is_final=True)
            raise
        self._served = self._version
        num_bytes, num_delta_bytes = sum(each.nbytes for each in self._weights.values()), len(delta or b"")
        logger.info(
            "version %d (global step %s): %d bytes, the delta has %d bytes, collected in %.2f s",
            *(self._version, global_steps, num_bytes, num_delta_bytes, collected_s - began_s),
        )
        return {
            f"{NAME}/weights_bytes": num_bytes,
            f"{NAME}/delta_bytes": num_delta_bytes,
            f"{NAME}/collect_s": collected_s - began_s,
        }

    def _collect(
        self, transport: HTTPTransport[Any], weights: Iterable[tuple[str, torch.Tensor]], base: int | None
    ) -> bytes | None:
        """Copy the weights into host memory. Return the delta from the version ``base``, if it is useful."""
        transport.server.materialize()
        earlier, self._weights = self._weights, {}
        num_bytes = sum(each.nbytes for each in earlier.values())
        pairs = self._copy(weights, earlier)
        delta = encode_delta(self._version, base, pairs, num_bytes=num_bytes) if base is not None else None
        for _ in pairs:
            pass  # `encode_delta` stops early if too many elements have changed.
        return delta

    def _copy(
        self, weights: Iterable[tuple[str, torch.Tensor]], earlier: dict[str, torch.Tensor]
    ) -> Iterator[TensorPair]:
        """Copy each tensor into the memory of its earlier version, after its pair of both versions was read.

        Tensors without an earlier version have no pair. A receiver fetches them completely.
        """
        for name, tensor in weights:
            new, own = self._cast(name, tensor.detach()).cpu().contiguous(), earlier.pop(name, None)
            if own is not None and (own.dtype, own.shape) == (new.dtype, new.shape):
                yield pair_of(name, own, new)
                self._weights[name] = own.copy_(new)
            else:
                # A copy, because verl may change the tensor or reuse its memory.
                self._weights[name] = new.clone()

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._dtype is None or not tensor.is_floating_point():
            return tensor
        if tensor.dtype not in CASTABLE:
            raise PublishError(
                f"expected weights that can be cast to {self._dtype}, got {tensor.dtype}, whose scales would be cast "
                "as well; set rollout_dtype to null for quantized weights",
                path=name,
            )
        return tensor.to(self._dtype)


class _Receiver:
    """Fetches the versions, on a rollout worker.

    Args:
        timeout: Longest time of the wait for a version, and of a fetch.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._source: Source = {}
        self._received: ReceivedWeights | None = None
        self._handle = FetchHandle()
        self._is_complete = True

    @property
    def num_bytes_fetched(self) -> int:
        return self._received.num_bytes_fetched if self._received is not None else 0

    def begin(self, source: Source) -> None:
        earlier, self._source = self._source, source
        is_same = all(earlier.get(each) == source[each] for each in ("address", "token"))
        # If the earlier update has not ended well, its thread or the rollout may still use its tensors.
        if self._received is None or not self._is_complete or not is_same:
            self._handle.cancel("verl began another update")
            self._received = self._new(source)
        self._handle = FetchHandle()

    def _new(self, source: Source) -> ReceivedWeights:
        keys = Keys.of(source["token"]) if source["token"] is not None else Keys.from_environment()
        if keys is None:
            raise ConfigurationError(
                f"expected {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE} in the environment of this rollout worker, as in "
                "that of the actor, got neither; set it for all workers, or for none"
            )
        allowed = AllowedSources(None, loopback_only=False)
        return ReceivedWeights(None, allowed, paused=nullcontext, keys=keys, tls=None, timeout=self._timeout)

    async def receive(self, global_steps: int | None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        assert self._received is not None, "verl calls init_process_group before receive_weights"
        self._is_complete = False
        received = self._received
        await asyncio.to_thread(self._fetch, received, self._source, self._handle, global_steps)
        device = torch.accelerator.current_accelerator(check_available=True)
        for name, tensor in received.tensors.items():
            # verl shares tensors with the engine through the device's IPC, which cannot share host memory.
            yield name, tensor if device is None else tensor.to(device)
        if self._received is received:
            self._is_complete = True

    @staticmethod
    def _fetch(received: ReceivedWeights, source: Source, handle: FetchHandle, global_steps: int | None) -> None:
        began_s = time.monotonic()
        received.wait_until_served(source["address"], source["version"], handle)
        served_s = time.monotonic()
        received.fetch(source["address"], source["version"], handle)
        logger.info(
            "version %d (global step %s): waited for %.2f s, fetched %d bytes in %.2f s",
            *(source["version"], global_steps, served_s - began_s),
            *(received.num_bytes_fetched, time.monotonic() - served_s),
        )
