"""The weight-transfer backend ``ft_transport`` of vLLM, with which each worker fetches versions from a publisher.

vLLM loads this module in each of its processes, through the entry point in the group ``vllm.general_plugins``. Nothing
else may import it, because it imports vLLM. ``--weight-transfer-config '{"backend": "ft_transport"}'`` selects the
backend, and ``VLLMEngine(pulls=True)`` updates the server in two phases:

1. ``/init_weight_transfer_engine`` with an order: one worker on each host fetches the version into host memory and
   verifies it; the other workers there map that memory. The model keeps the previous version.
2. When every worker has the version: ``/start_weight_update``, ``/update_weights``, ``/finish_weight_update``. Each
   worker loads the version into its model. ``/init_weight_transfer_engine`` without an order then asks for the outcome.

vLLM reads the workers' responses in the order of ranks, up to the first error. It takes those that it has not read for
the responses to its next call (https://github.com/vllm-project/vllm/pull/57846, 0.32). So all workers first agree on an
outcome, and only the last one raises the error. A call of a session never fails, because vLLM would close the session
only on the worker that failed.

A worker always loads all tensors, even if it has fetched only a delta, by vLLM's layerwise reload, as vLLM's own
backends for whole checkpoints do. It cannot know whether the model still has the previous version: ``/sleep?level=2``
and ``/collective_rpc`` discard or replace weights without a call of the backend. For the same reason, vLLM's sparse
patches (vllm/model_executor/model_loader/checkpoint_weight_patch.py, 0.32) are not used. They also replace
``Tensor.copy_`` for the whole process, allocate a full tensor for each patch, cannot express NaN, and skip the
processing after the load, which layers with quantized or packed weights need.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from ft_transport.credentials import Keys
from ft_transport.errors import TransportError, escape_peer_text
from ft_transport.publish.allowed_sources import AllowedSources
from ft_transport.publish.engines.pulling import MAX_VERSION_DIGITS, REASONS, Order, Reason
from ft_transport.publish.received_weights import ReceivedWeights, log_failure
from ft_transport.publish.shared_weights import HostMemory, SharedWeights

logger = logging.getLogger(__name__)

NAME: Final = "ft_transport"
_TIMEOUT: Final = timedelta(minutes=10)
_MAX_SHOWN_CHARACTERS: Final = 2000


@dataclass
class Request(WeightTransferInitInfo):
    """A publisher's request to all workers of a server.

    Attributes:
        fields: ``version``, and the fields of an `Order` if the workers should fetch the version. Not yet checked.
    """

    fields: Mapping[str, object]


class PullingBackend(WeightTransferEngine[Request, WeightTransferUpdateInfo]):
    """Fetches versions into a worker's host memory, and loads them into the worker's part of the model.

    vLLM calls all methods on the worker's thread, and sends the text of an error to the publisher. So each error has
    one of the texts in `REASONS`, and the worker's log has the details.
    """

    supports_draft_weight_update: ClassVar = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._keys = Keys.from_environment()
        self._is_open = False
        self._loaded: int | None = None
        self._fetched: SharedWeights | None = None

    def shutdown(self) -> None:
        """Free the fetched version. The next version is fetched completely."""
        self._fetched = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> Request:
        """Return the request unchecked: an error here would be raised on every worker."""
        return Request(init_dict)

    def init_transfer_engine(self, init_info: Request) -> None:
        """Carry out a request.

        Raises:
            TransportError: A worker failed. Only the last worker raises the error.
        """
        order = self._checked(init_info.fields)
        reason = _agreed(order if not isinstance(order, Order) else None)
        # Only if all workers fetch: they wait for each other.
        if reason is None and isinstance(order, Order):
            reason = _agreed(self._fetch(order))
        if reason is not None and all(group.rank_in_group == group.world_size - 1 for group in _groups()):
            raise TransportError(f"{REASONS[reason][1]} ({reason}); see the log of the engine")

    def _checked(self, fields: Mapping[str, object]) -> Order | Reason | None:
        """Return the order in a request. Without an order, check that the model has the version.

        Returns:
            The order, or the reason of a failure; ``None`` if the model has the version.
        """
        version = fields.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 10**MAX_VERSION_DIGITS:
            return "malformed"
        if "address" not in fields:
            return None if self._loaded == version else "not_loaded"
        if (read := Order.read(version, fields)) is None:
            return "malformed"
        order, signature = read
        try:
            if self._keys is not None and not order.is_proved(self._keys, signature):
                return "unproved"
            # Not in `_fetch`, where a worker that fails alone would leave the others waiting.
            if self._fetched is None:
                self._fetched = self._new_weights()
        except Exception as error:
            return log_failure(version, error)
        return "session_open" if self._is_open else order

    def _fetch(self, order: Order) -> Reason | None:
        """Fetch a version. Return the reason of a failure of this worker, or ``None``."""
        assert self._fetched is not None, "a checked order has a place for its weights"
        try:
            self._fetched.fetch(order.address, order.version)
        except Exception as error:
            return log_failure(order.version, error)
        self._loaded = None
        return None

    def _new_weights(self) -> SharedWeights:
        allowed, memory = AllowedSources(None, loopback_only=self._keys is None), HostMemory()
        received = ReceivedWeights(
            None, allowed, paused=nullcontext, keys=self._keys, tls=None, timeout=_TIMEOUT, memory=memory
        )
        group = get_tp_group()
        return SharedWeights(received, memory, group.rank_in_group, partial(_gather, group.cpu_group, group.world_size))

    def start_weight_update(self) -> None:
        """Begin a session."""
        self._is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the fetched version."""
        fetched = self._fetched
        if fetched is None or fetched.version is None or fetched.version != update_info.get("version"):
            return
        try:
            self._load(fetched.tensors())
            self._loaded = fetched.version
        except Exception as error:
            # Without a traceback: vLLM's error may contain names of published tensors.
            text = escape_peer_text(f"{type(error).__name__}: {error}", max_characters=_MAX_SHOWN_CHARACTERS)
            logger.warning("version %d could not be loaded: %s", fetched.version, text)

    def receive_weights(self, update_info: WeightTransferUpdateInfo) -> None:
        """Not used: `update_weights` does not call this method."""
        raise NotImplementedError

    def finish_weight_update(self) -> None:
        """End a session."""
        self._is_open = False

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(iter(tensors.items()))
        finally:
            # Also after a failure: otherwise parameters would have no memory, and vLLM would treat the tensors that it
            # has read as a part of the next version.
            finalize_layerwise_reload(self.model, self.model_config)
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()


def _groups() -> Sequence[Any]:
    """Return groups that together connect all workers of this engine, and no worker of another data-parallel engine."""
    return get_tp_group(), get_pcp_group(), get_pp_group()


def _agreed(failure: Reason | None) -> Reason | None:
    """Return the reason of the worst failure of all workers, or ``None``."""
    reasons = [None, *REASONS]
    worst = torch.tensor(reasons.index(failure))
    for group in _groups():
        dist.all_reduce(worst, dist.ReduceOp.MAX, group.cpu_group)
    return reasons[int(worst)]


def _gather(group: Any, size: int, data: bytes) -> list[bytes]:
    """Return the data of all workers of a group, in the order of their ranks."""
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group)
    longest = max(1, *map(int, lengths))
    padded = [torch.zeros(longest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(padded, torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8), group)
    return [each[: int(length)].numpy().tobytes() for each, length in zip(padded, lengths, strict=True)]


def register() -> None:
    """Register the backend. vLLM calls this function in each of its processes, perhaps more than once."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, PullingBackend)
