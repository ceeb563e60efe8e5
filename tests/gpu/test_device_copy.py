"""On a real device: ordered behind the queued work, into pinned memory, bit for bit."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from state_equality import exact
from state_tools import file_of, file_of_state, on_host, open_stager, receive, take
from torch import nn

from ft_transport.state.snapshot import Taking

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def _queue_work() -> None:
    """Keeps the training stream busy for a while after this returns."""
    torch.cuda._sleep(200_000_000)


def test_a_snapshot_shows_the_kernels_that_were_only_queued() -> None:
    parameter = torch.zeros(1 << 22, device="cuda")
    with open_stager() as stager:
        take(stager, 0, parameter).close()  # the arena is there, so that nothing else waits for the device
        for step in range(1, 6):
            _queue_work()
            parameter.add_(1)
            snapshot = take(stager, step, parameter)
            # Whatever the trainer does from here on comes too late.
            parameter.add_(0)
            received = receive(file_of(snapshot))
            assert torch.equal(received, torch.full((1 << 22,), float(step)))
            snapshot.close()


def test_tensors_are_cast_one_by_one_on_the_device() -> None:
    state = [torch.randn(1 << 20, device="cuda") for _ in range(8)]
    expected = [tensor.bfloat16().cpu() for tensor in state]
    with open_stager() as stager:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        snapshot = stager.begin(Taking(step=1, state=state, float_dtype=torch.bfloat16)).finish()
        peak = torch.cuda.max_memory_allocated() - before
        assert all(torch.equal(*pair) for pair in zip(receive(file_of(snapshot)), expected, strict=True))
        snapshot.close()
    assert peak <= 2 * state[0].nbytes


def test_the_training_stream_is_not_waited_for_beyond_the_boundary() -> None:
    parameter = torch.ones(1 << 20, device="cuda")
    with open_stager() as stager:
        take(stager, 0, parameter).close()
        torch.cuda.synchronize()
        pending = stager.begin(Taking(step=1, state=parameter, deferrable=lambda tensor: True))
        _queue_work()
        later = torch.cuda.Event()
        later.record()
        pending.copy_deferred()
        assert not later.query(), "the copy waited for work that was queued after the boundary"
        snapshot = pending.finish()
        assert receive(file_of(snapshot)).sum() == 1 << 20
        snapshot.close()
        torch.cuda.synchronize()


@pytest.mark.parametrize("on_any_stream", [False, True])
def test_a_step_that_is_queued_during_the_copies_runs_after_them(on_any_stream: bool) -> None:
    from concurrent.futures import ThreadPoolExecutor

    parameter = torch.zeros(1 << 26, device="cuda")
    with open_stager() as stager, ThreadPoolExecutor(1) as pool:
        take(stager, 0, parameter).close()
        for step in range(1, 6):
            _queue_work()
            parameter.fill_(float(step))
            pending = stager.begin(Taking(step=step, state=parameter, deferrable=lambda tensor: True))
            in_flight = pool.submit(pending.copy_deferred).result()
            assert in_flight is not None
            if on_any_stream:
                in_flight.wait(timedelta(seconds=20))
            else:
                in_flight.before_write()
            parameter.fill_(-1)
            snapshot = pending.finish()
            assert receive(file_of(snapshot)).unique().tolist() == [float(step)]
            snapshot.close()


def test_the_arena_is_pinned_while_it_lives() -> None:
    with open_stager() as stager:
        pending = stager.begin(Taking(step=1, state=torch.ones(1000, device="cuda")))
        assert pending._arena.data.is_pinned()
        pending.finish().close()


def test_every_dtype_and_layout_comes_back_from_the_device() -> None:
    whole = torch.randint(0, 255, (4 * 6 * 16,), dtype=torch.uint8, device="cuda")
    state: dict[str, torch.Tensor] = {
        str(dtype): whole.view(dtype)
        for dtype in (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint32)
    }
    grid = torch.randn(4, 6, device="cuda")
    state |= {
        "transposed": grid.t(),
        "with holes": grid[:, ::2],
        "expanded": grid[0].expand(3, 6),
        "view": grid[1:3],
        "grid": grid,
        "conjugate": torch.randn(3, dtype=torch.complex64, device="cuda").conj(),
        "complex128": torch.randn(2, 3, dtype=torch.complex128, device="cuda").t(),
        "empty": torch.zeros(0, 3, device="cuda"),
        "host": torch.ones(3),
    }
    # Copied to the host, what is expanded would be so no more.
    expected = {**on_host(state), "expanded": grid[0].cpu().expand(3, 6)}
    assert exact(receive(file_of_state(state))) == exact(expected)


def test_a_receiver_on_the_device_gets_the_bits_into_its_own_tensors() -> None:
    state = {"a": torch.randn(100, 3), "b": torch.randn(3, 4).t(), "n": torch.tensor([float("nan"), -0.0])}
    own = {name: torch.zeros_like(tensor).cuda() for name, tensor in state.items()}
    received = receive(file_of_state({name: tensor.cuda() for name, tensor in state.items()}), into=own)
    assert exact(on_host(received)) == exact(state)
    assert all(received[name] is own[name] for name in own)


def test_a_trainer_on_the_device_continues_as_if_nothing_had_happened() -> None:
    torch.manual_seed(3)

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(number)).cuda()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    model, optimizer = make()
    for number in range(2):
        step(model, optimizer, number)
    with open_stager() as stager:
        snapshot = take(stager, 2, {"m": model.state_dict(), "o": optimizer.state_dict()})
        file = file_of(snapshot)
        snapshot.close()
    fresh, fresh_optimizer = make()
    received = receive(file)
    fresh.load_state_dict(received["m"])
    fresh_optimizer.load_state_dict(received["o"])
    for number in range(2, 4):
        step(model, optimizer, number)
        step(fresh, fresh_optimizer, number)
    assert exact(fresh.state_dict()) == exact(model.state_dict())
