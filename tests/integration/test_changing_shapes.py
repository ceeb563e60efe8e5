"""Modules with a loading of their own take states of other shapes than theirs; torch's loading is asked before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from quorum_threads import loopback_transport
from state_equality import exact
from torch import nn
from torch.ao.quantization import FakeQuantize, HistogramObserver, MovingAveragePerChannelMinMaxObserver

from ft_transport import CheckpointStore
from manager import Manager, StateMismatchError
from manager.quorum.reports import misfits, structure_of
from manager.state.compatibility import names_loaded_freely, tables_of

_TIMEOUT = timedelta(seconds=20)


class Bank(nn.Module):
    """Grows, and takes what has grown elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, drawn: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, drawn.detach()])
        self.register_buffer(f"at_{len(self.seen)}", torch.ones(1))
        return drawn

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_args: Any) -> None:
        for name in [name for name, _ in self.named_buffers()]:
            delattr(self, name)
        for name, value in state_dict.items():
            if name.startswith(prefix):
                self.register_buffer(name.removeprefix(prefix), value.clone())


class Hooked(nn.Module):
    """The same by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0))
        self.register_load_state_dict_pre_hook(self._make_room)

    @staticmethod
    def _make_room(module: nn.Module, state_dict: Any, prefix: str, *_args: Any) -> None:
        module.queue = torch.zeros_like(state_dict[f"{prefix}queue"])

    def forward(self, drawn: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.queue, drawn.detach().sum().view(1)])
        return drawn


class Noting(nn.Module):
    """Has an extra state, of one tensor or of several."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[torch.Tensor] = []

    def forward(self, drawn: torch.Tensor) -> torch.Tensor:
        self.noted.append(drawn.detach().mean())
        return drawn

    def get_extra_state(self) -> Any:
        return {"all": torch.stack(self.noted) if self.noted else torch.zeros(0), "each": self.noted}

    def set_extra_state(self, state: Any) -> None:
        self.noted = list(state["each"])


def observed(observer: Any, **keywords: Any) -> nn.Module:
    return FakeQuantize(observer=observer, quant_min=-128, quant_max=127, dtype=torch.qint8, **keywords)


class Replica:
    def __init__(self, seed: int, *, lazy: bool = False, store: CheckpointStore | None = None) -> None:
        torch.manual_seed(seed)
        first = nn.LazyLinear(4) if lazy else nn.Linear(4, 4)
        self.model = nn.Sequential(
            first,
            nn.LazyBatchNorm1d() if lazy else nn.BatchNorm1d(4),
            Bank(),
            Hooked(),
            Noting(),
            observed(MovingAveragePerChannelMinMaxObserver, ch_axis=1, qscheme=torch.per_channel_symmetric),
            HistogramObserver(),
            nn.Linear(4, 2),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.manager = Manager(checkpoint_transport=loopback_transport(), timeout=_TIMEOUT, checkpoint_store=store)
        self.manager.register("model", self.model)
        self.manager.register("optimizer", self.optimizer)
        self.manager.attach(self.optimizer)

    def train(self, num_steps: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        for _ in range(num_steps):
            step = self.manager.current_step()
            self.manager.start_step(step)
            self.optimizer.zero_grad()
            self.model(torch.randn(3, 4, generator=draws)).square().mean().backward()
            self.optimizer.step()
            self.manager.load_state_dict({"step": step + 1})

    def state(self) -> object:
        """Which keys come first is of no account, as a module that grows adds its last."""
        whole: Any = self.manager.replica_state()
        model = dict(sorted(whole["user"]["model"].items()))
        return exact({"model": model, "optimizer": whole["user"]["optimizer"]})


@pytest.fixture
def replica() -> Iterator[Callable[..., Replica]]:
    with ExitStack() as managers:

        def make(seed: int, **options: Any) -> Replica:
            made = Replica(seed, **options)
            managers.callback(made.manager.shutdown)
            return made

        yield make


@pytest.mark.parametrize(("num_steps", "lazy"), [(0, False), (5, False), (0, True)])
def test_what_has_other_shapes_is_taken_from_a_peer_and_a_checkpoint(
    replica: Callable[..., Replica], tmp_path: Path, num_steps: int, lazy: bool
) -> None:
    peer = replica(0, store=CheckpointStore(tmp_path))
    peer.train(3, seed=1)
    peer.manager.snapshot(3).result(_TIMEOUT.total_seconds())
    peer.manager.save(wait=True)
    healed = replica(1, lazy=lazy)
    resumed = replica(2, lazy=lazy, store=CheckpointStore(tmp_path, read_only=True))
    for each in (healed, resumed):
        each.train(num_steps, seed=2)
    structures = [structure_of(tables_of(each.manager._state.registry)) for each in (peer, healed)]
    assert misfits(*structures) == ()

    healed.manager.recover(peer.manager.metadata())
    assert resumed.manager.resume() is not None

    for _ in range(2):
        assert healed.state() == peer.state()
        assert resumed.state() == peer.state()
        for each in (peer, healed, resumed):
            each.train(1, seed=3)


@pytest.mark.parametrize("change", ["dtype", "shape"])
def test_beside_them_torchs_own_modules_are_still_asked(replica: Callable[..., Replica], change: str) -> None:
    peer, ours = replica(0), replica(1)
    if change == "dtype":
        ours.model[1].bfloat16()
    else:
        ours.model[1] = nn.BatchNorm1d(3)
    peer.train(1, seed=1)
    peer.manager.snapshot(1).result(_TIMEOUT.total_seconds())
    with pytest.raises(StateMismatchError, match=r"dtypes, shapes and shards under 'model'; 1\.weight is"):
        ours.manager.recover(peer.manager.metadata())


def test_a_module_of_torch_has_no_loading_of_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.utils.spectral_norm(nn.Linear(4, 4)), nn.MultiheadAttention(4, 2))
    model.append(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    is_free = names_loaded_freely(model)
    assert [name for name in model.state_dict() if is_free(name)] == []
