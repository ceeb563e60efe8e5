"""A newcomer follows the others while it receives the state: nobody waits, and its state is theirs, bit for bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from quorum_threads import Gate, lighthouse, loopback_transport, make_manager, run_replicas
from torch import nn

from ft_transport import HTTPTransport, Limits, PeerError, state_digest
from ft_transport.telemetry.record import Record
from manager import Manager, ManagerError, QuorumError
from manager.quorum import following, formation
from manager.state.replay import Replay

pytestmark = pytest.mark.usefixtures("quorum_ready")

WIDTH = 24
JOIN_AT = 4


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(following, "_LEAST_BYTES", 0)
    with lighthouse() as at:
        yield at


class InterruptionError(Exception):
    """Raised by a signal handler."""


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


class Job:
    """Replicas that train a model with buffers and a schedule. All have the same digest at the same step."""

    def __init__(self, address: str, kind: Callable[..., torch.optim.Optimizer], **keywords: Any) -> None:
        self.address, self.kind, self.keywords = address, kind, keywords
        self.gate = Gate()
        self.mutex = threading.Lock()
        self.digests: dict[int, set[str]] = {}
        self.end_at = 10**6
        self.after_step: Callable[[nn.Module], None] = lambda _model: None
        self.make_model: Callable[[], nn.Module] = make_model
        self.old = ("old 1", "old 2")

    def run(self, name: str, each_step: Callable[[Manager, bool], None] | None = None, **keywords: Any) -> Manager:
        manager = make_manager(self.address, name, **keywords)
        try:
            self._train(manager, each_step)
        finally:
            manager.shutdown()
        return manager

    def _train(self, manager: Manager, each_step: Callable[[Manager, bool], None] | None) -> None:
        generator = torch.Generator().manual_seed(len(manager.replica_id()))
        model = self.make_model()
        optimizer = self.kind(model.parameters(), **self.keywords)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        manager.register("model", model)
        manager.register("optimizer", optimizer)
        manager.register("schedule", schedule)
        manager.attach(optimizer)
        while manager.current_step() < self.end_at:
            try:
                manager.start_quorum()
            except InterruptionError:
                continue
            model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.reset_running_stats()  # Otherwise they differ between replicas.
            manager.average_gradients(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if manager.should_commit():
                optimizer.step()
                self.after_step(model)
                optimizer.zero_grad()
                schedule.step()
                is_whole = manager.is_participating()
                if is_whole:
                    state = {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "lr": schedule.get_last_lr(),
                    }
                    with self.mutex:
                        self.digests.setdefault(manager.current_step(), set()).add(state_digest(state))
            if each_step is not None:
                each_step(manager, manager.is_participating())


def transport_of(manager: Manager) -> HTTPTransport[Any]:
    transport = manager._replica.transport
    assert transport is not None
    return transport


def records_of(manager: Manager) -> list[Record]:
    return [each for each in transport_of(manager).recorder.recent() if each.kind == "heal"]


@pytest.fixture
def job(address: str) -> Job:
    return Job(address, torch.optim.AdamW)


def join(
    job: Job,
    receive: Callable[[], None],
    during: Callable[[Manager], None] = lambda _manager: None,
    *,
    replay_bytes: int = 1 << 20,
    num_passive: int = 5,
    are_equal: bool = True,
    **keywords: Any,
) -> tuple[Manager, list[int], list[int]]:
    """Let a newcomer join two replicas; all end some steps after it has begun to contribute.

    Args:
        job: The job.
        receive: Called before the newcomer receives the state, on the thread of the transfer.
        during: Called after each step that the newcomer makes without contributing.
        replay_bytes: The newcomer's setting.
        num_passive: Number of such steps after which the gate ``fetch`` opens.
        are_equal: Whether the replicas have equal states at equal steps.
        **keywords: Further settings of the newcomer.

    Returns:
        The newcomer's manager, and the steps before which it did not contribute, and did.
    """
    passive: list[int] = []
    active: list[int] = []

    def old(manager: Manager, _is_whole: bool) -> None:
        if manager.current_step() == JOIN_AT:
            job.gate.open("join")

    def newcomer() -> Manager:
        job.gate.wait("join")

        def step(manager: Manager, is_whole: bool) -> None:
            (active if is_whole else passive).append(manager.current_step())
            if not is_whole:
                during(manager)
            if len(passive) == num_passive:
                job.gate.open("fetch")
            if len(active) == 5:
                job.end_at = manager.current_step() + 2

        try:
            return job.run("newcomer", step, replay_bytes=replay_bytes, **keywords)
        finally:
            job.end_at = min(job.end_at, max(job.digests) + 2)

    with pytest.MonkeyPatch.context() as patch:
        fetch = HTTPTransport.fetch

        def held_fetch(self: Any, *args: Any, **options: Any) -> Any:
            if threading.current_thread().name.startswith("ft-transport-follow"):
                receive()
            return fetch(self, *args, **options)

        patch.setattr(HTTPTransport, "fetch", held_fetch)
        others = [partial(job.run, name, old) for name in job.old]
        manager = run_replicas(*others, newcomer)[-1]
    assert len(active) >= 5
    assert not are_equal or all(len(each) == 1 for each in job.digests.values())
    assert max(job.digests) >= job.end_at - 1
    return manager, passive, active


@pytest.mark.parametrize(
    ("kind", "keywords"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_a_newcomer_follows_and_has_the_state_of_the_others(
    address: str, kind: Callable[..., torch.optim.Optimizer], keywords: dict[str, Any]
) -> None:
    job = Job(address, kind, **keywords)
    manager, passive, active = join(job, lambda: job.gate.wait("fetch"))
    assert len(passive) >= 5
    assert passive == list(range(passive[0], active[0]))
    assert passive[0] > JOIN_AT
    (record,) = records_of(manager)
    assert record.outcome == "ok"
    assert f"made {len(passive) - 2} recorded steps" in record.notes["replay"]


class SignedMomentum(torch.optim.Optimizer):
    """A user's optimizer, after Lion (arXiv 2302.06675)."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in filter(lambda each: each.grad is not None, group["params"]):
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(torch.lerp(parameter.grad, momentum, group["beta"]).sign_(), alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - group["beta"])


def test_a_named_optimizer_is_replayed(address: str) -> None:
    manager, passive, _ = join(
        job := Job(address, SignedMomentum), lambda: job.gate.wait("fetch"), replay_optimizers=(SignedMomentum,)
    )
    assert len(passive) >= 5
    (record,) = records_of(manager)
    assert f"made {len(passive) - 2} recorded steps" in record.notes["replay"]


def test_its_state_can_neither_be_saved_nor_served_before_it_contributes(job: Job) -> None:
    refused: list[str] = []

    def during(manager: Manager) -> None:
        with pytest.raises(ManagerError, match="follows the other replicas") as caught:
            manager.snapshot(manager.current_step())
        refused.append(str(caught.value))

    join(job, lambda: job.gate.wait("fetch"), during)
    assert len(refused) >= 5


def test_a_newcomer_waits_for_other_receivers_without_failed_steps_of_the_others(job: Job) -> None:
    """Each source may have one snapshot, which another receiver reads for 15 steps."""
    leases: dict[str, Any] = {}
    failed: list[int] = []
    joined_at: list[int] = []
    before: dict[str, int] = {}

    def old(manager: Manager, _is_whole: bool) -> None:
        step, name = manager.current_step(), manager.replica_id()
        if before.get(name) == step:
            failed.append(step)
        before[name] = step
        if step == JOIN_AT:
            manager.snapshot(step).result(timeout=10)
            leases[name] = transport_of(manager).server.lease(step)
            job.gate.open("join")
        if step == JOIN_AT + 15:
            leases.pop(name).release()

    def newcomer() -> None:
        job.gate.wait("join")

        def step(manager: Manager, is_whole: bool) -> None:
            joined_at.append(manager.current_step())
            if is_whole:
                job.end_at = min(job.end_at, manager.current_step() + 2)

        job.run("newcomer", step, replay_bytes=1 << 20)

    limits = Limits(max_snapshots=1)
    replicas = [partial(job.run, name, old, checkpoint_transport=loopback_transport(limits=limits)) for name in job.old]
    run_replicas(*replicas, newcomer)
    assert not failed
    assert joined_at[0] > JOIN_AT + 15
    assert all(len(each) == 1 for each in job.digests.values())


def test_a_newcomer_does_not_wait_for_other_receivers_for_ever(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formation, "_MAX_BUSY", 20)
    leases: list[Any] = []

    def old(manager: Manager, _is_whole: bool) -> None:
        if manager.current_step() == JOIN_AT:
            manager.snapshot(JOIN_AT).result(timeout=10)
            leases.append(transport_of(manager).server.lease(JOIN_AT))
            job.gate.open("join")

    def newcomer() -> None:
        job.gate.wait("join")
        try:
            with pytest.raises(QuorumError, match=r"expected a snapshot of step .* got none in 20 quorums"):
                job.run(
                    "newcomer", replay_bytes=1 << 20, timeout=timedelta(seconds=1), connect_timeout=timedelta(seconds=1)
                )
        finally:
            leases.pop().release()
            job.end_at = 0

    transport = loopback_transport(limits=Limits(max_snapshots=1))
    run_replicas(partial(job.run, "old", old, checkpoint_transport=transport), newcomer)


def test_after_a_failed_transfer_it_heals(job: Job) -> None:
    def receive() -> None:
        job.gate.wait("fetch")
        raise PeerError("the source has died")

    manager, passive, _ = join(job, receive)
    assert len(passive) >= 5
    (record,) = records_of(manager)
    assert "abandoned: PeerError: the source has died" in record.notes["replay"]


def test_with_more_gradients_than_replay_bytes_it_heals(job: Job) -> None:
    manager, passive, _ = join(job, lambda: job.gate.wait("fetch"), replay_bytes=10_000, num_passive=4)
    assert len(passive) >= 4
    (record,) = records_of(manager)
    assert record.notes["replay"].startswith("abandoned: the gradients of the recorded steps have ")
    assert "more than replay_bytes (10000)" in record.notes["replay"]


def test_if_a_recorded_step_is_made_differently_the_comparison_finds_it_and_it_heals(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Replay.run

    def wrong(self: Replay) -> None:
        for record in list(self._records)[-1:]:
            next(iter(record.gradients.values())).view(-1)[0].add_(1e-3)
        run(self)

    monkeypatch.setattr(Replay, "run", wrong)
    manager, passive, _ = join(job, lambda: job.gate.wait("fetch"))
    assert len(passive) >= 5
    (record,) = records_of(manager)
    assert "abandoned" in record.notes["replay"]


def test_a_loop_that_ends_before_it_has_the_state_is_told(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def old(manager: Manager, _is_whole: bool) -> None:
        if manager.current_step() == JOIN_AT:
            job.gate.open("join")

    def newcomer() -> None:
        job.gate.wait("join")

        def step(manager: Manager, is_whole: bool) -> None:
            assert not is_whole
            job.end_at = manager.current_step()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(following.Follower, "_advance", lambda _self: None)
            job.run("newcomer", step, replay_bytes=1 << 20)

    run_replicas(partial(job.run, "old 1", old), newcomer)
    assert "this replica ends before it has the state" in caplog.text


def test_one_other_survives_a_difference(job: Job) -> None:
    """A change of the weights after a step is not replayed."""
    job.old = ("old 1",)
    job.after_step = decay
    manager, passive, _ = join(job, lambda: job.gate.wait("fetch"))
    assert len(passive) >= 5
    (record,) = records_of(manager)
    assert "abandoned" in record.notes["replay"]


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(0.99)


def test_after_an_interruption_of_its_beginning_it_heals(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    init, interrupted = Replay.__init__, []

    def interrupt(self: Replay, *args: Any) -> None:
        if not interrupted:
            interrupted.append(True)
            raise InterruptionError
        init(self, *args)

    monkeypatch.setattr(Replay, "__init__", interrupt)
    join(job, lambda: None)
    assert interrupted


class Counting(nn.Linear):
    """Has state that is no tensor."""

    num_calls = 0

    def get_extra_state(self) -> int:
        return self.num_calls

    def set_extra_state(self, state: int) -> None:
        self.num_calls = state


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Sequential(Counting(WIDTH, 4)), "the module 'model' has state functions of its own"),
        (lambda: nn.Sequential(Renormalising(), nn.Linear(4, 4)), "more than its step changes parameters"),
    ],
)
def test_what_steps_do_not_explain_is_not_replayed(job: Job, make: Callable[[], nn.Module], reason: str) -> None:
    job.make_model = make
    # Each replica renormalises the rows of its own batches.
    manager, passive, _ = join(job, lambda: None, are_equal="module" in reason)
    assert not passive
    (record,) = records_of(manager)
    assert reason in record.notes["replay"]


class Renormalising(nn.Module):
    """Changes its weights in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, max_norm=0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.embedding(inputs[:, 0].abs().long() % 8)  # type: ignore[no-any-return]


class OwnAdamW(torch.optim.AdamW):
    """An optimizer of a user."""


def test_the_record_of_a_heal_says_why_it_did_not_follow(address: str) -> None:
    manager, passive, _ = join(Job(address, OwnAdamW), lambda: None)
    assert not passive
    (record,) = records_of(manager)
    assert record.notes["replay"].startswith("not used: OwnAdamW may compute more than a function of gradients")
