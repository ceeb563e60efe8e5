"""Which samples of a step are whose: the same samples in each step, and each sample once in an epoch."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manager import ConfigError, ElasticSampler, ManagerError, RegistryError
from manager.state.elastic_sampler import Place


class Trained:
    """Stands in for a manager at a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def current_step(self) -> int:
        return self.step


def samples_of_step(samplers: list[ElasticSampler], step: int, num_replicas: int) -> list[int]:
    """The samples of all replicas and ranks, sorted."""
    starts = [
        (start, sampler)
        for sampler in samplers
        for replica in range(num_replicas)
        for start in sampler.starts(step, Place(replica, num_replicas))
    ]
    assert len({start for start, _ in starts}) == len(starts), "no microbatch is drawn twice"
    return sorted(index for start, sampler in starts for index in sampler.samples(start))


@given(
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 7),
    num_rounds=st.integers(1, 5),
    num_ranks=st.integers(1, 3),
    shuffle=st.booleans(),
    replicas=st.lists(st.integers(1, 7), min_size=1, max_size=12),
)
def test_every_epoch_has_each_sample_once_whoever_contributes(
    *, num_samples: int, batch_size: int, num_rounds: int, num_ranks: int, shuffle: bool, replicas: list[int]
) -> None:
    def samplers(num_ranks: int) -> list[ElasticSampler]:
        return [
            ElasticSampler(
                num_samples,
                batch_size=batch_size,
                num_microbatches=num_rounds * all_ranks,
                seed=7,
                shuffle=shuffle,
                rank=rank,
                num_ranks=num_ranks,
            )
            for rank in range(num_ranks)
        ]

    all_ranks = num_ranks
    alone = samplers(1)
    drawn: list[int] = []
    for step, num_replicas in enumerate(replicas):
        samples = samples_of_step(samplers(num_ranks), step, num_replicas)
        assert samples == samples_of_step(alone, step, 1)
        drawn += samples
    counts = Counter(drawn)
    num_epochs, rest = divmod(len(drawn), num_samples)
    assert all(num_epochs <= counts[index] <= num_epochs + 1 for index in range(num_samples))
    assert sum(counts[index] > num_epochs for index in range(num_samples)) == rest


def test_orders_depend_on_seed_and_epoch() -> None:
    orders = {
        tuple(ElasticSampler(50, batch_size=50, num_microbatches=1, seed=seed).samples(50 * epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)
    in_order = ElasticSampler(5, batch_size=5, num_microbatches=1, shuffle=False)
    assert in_order.samples(5) == [0, 1, 2, 3, 4]
    stream = ElasticSampler(1 << 60, batch_size=2, num_microbatches=1, shuffle=False)
    assert stream.samples(1 << 50) == [1 << 50, (1 << 50) + 1]


def test_a_run_with_other_steps_continues_at_the_same_sample() -> None:
    before = ElasticSampler(1000, batch_size=4, num_microbatches=6, seed=3)
    seen = [index for step in range(5) for index in samples_of_step([before], step, 2)]
    trained = Trained(5)
    before.follow(weakref.WeakMethod(trained.current_step))
    after = ElasticSampler(1000, batch_size=10, num_microbatches=2)
    after.load_state_dict(before.state_dict())
    assert after.state_dict() == before.state_dict()
    assert after.description() != before.description()
    seen += [index for step in range(5, 49) for index in samples_of_step([after], step, 1)]
    assert sorted(seen) == list(range(1000))


def test_samplers_with_one_order_have_one_description() -> None:
    def description(**arguments: Any) -> str:
        chosen = {"batch_size": 2, "num_microbatches": 4, "seed": 1, **arguments}
        return ElasticSampler(100, **chosen).description()

    assert description() == description(num_ranks=1)
    others = [{"batch_size": 4}, {"num_microbatches": 8}, {"seed": 2}, {"shuffle": False}, {"num_ranks": 2}]
    assert len({description(), *(description(**each) for each in others)}) == 6
    joined = ElasticSampler(100, batch_size=2, num_microbatches=4, seed=9)
    trained, source = Trained(7), ElasticSampler(100, batch_size=2, num_microbatches=4, seed=1)
    source.follow(weakref.WeakMethod(trained.current_step))
    joined.load_state_dict(source.state_dict())
    assert joined.description() == source.description()


def test_a_dataset_of_another_length_is_refused() -> None:
    state = ElasticSampler(10, batch_size=1, num_microbatches=1).state_dict()
    with pytest.raises(RegistryError, match="expected a sampler of 11 samples, got the state of one of 10"):
        ElasticSampler(11, batch_size=1, num_microbatches=1).load_state_dict(state)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_samples": 0},
        {"batch_size": 0},
        {"num_microbatches": 0},
        {"num_microbatches": 3, "num_ranks": 2},
        {"rank": 1},
        {"rank": -1},
    ],
    ids=str,
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, int]) -> None:
    chosen = {"num_samples": 10, "batch_size": 2, "num_microbatches": 2, **arguments}
    with pytest.raises(ConfigError):
        ElasticSampler(chosen.pop("num_samples"), **chosen)  # type: ignore[arg-type]


def test_a_loop_over_the_loader_itself_is_refused() -> None:
    with pytest.raises(ManagerError, match="ElasticBatches"):
        next(iter(ElasticSampler(10, batch_size=1, num_microbatches=1)))
