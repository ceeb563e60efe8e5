from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError
from datetime import timedelta
from typing import Any

import pytest

from manager import Manager
from manager.config import ManagerConfig, named_arguments
from manager.errors import ConfigError
from manager.quorum.decision import WorldSizeMode

S = timedelta(seconds=1)


def test_it_is_frozen_and_has_torchfts_defaults_but_for_one() -> None:
    """A newcomer waits for a state as long as ``timeout``: meanwhile no quorum of the others may time out."""
    config = ManagerConfig()
    assert (config.timeout, config.quorum_timeout, config.use_async_quorum, config.init_sync) == (
        60 * S,
        90 * S,
        True,
        True,
    )
    with pytest.raises(FrozenInstanceError):
        config.timeout = S  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"timeout": 91 * S}, r"quorum_timeout of at least timeout, got 90 s and 91 s: otherwise the quorum would"),
        ({"connect_timeout": 91 * S}, r"quorum_timeout of at least connect_timeout"),
        ({"heartbeat_interval": 3 * S}, r"heartbeat_timeout of at least twice heartbeat_interval, got 1 s and 3 s"),
        ({"timeout": 5}, r"datetime\.timedelta as timeout, got int 5"),
        ({"quorum_timeout": 0 * S}, r"quorum_timeout that is positive, got 0:00:00"),
        ({"min_replica_size": 0}, "min_replica_size of at least 1, got 0"),
        ({"min_replica_size": True}, "whole number"),
        ({"max_retries": -1}, "max_retries of at least 0, got -1"),
        ({"world_size_mode": "dynamic"}, "WorldSizeMode as world_size_mode, got str 'dynamic'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(settings: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        ManagerConfig(**settings)


def test_timeouts_that_were_not_given_are_fitted_to_those_that_were() -> None:
    short = ManagerConfig.from_keywords({"quorum_timeout": 6 * S}, timeout=None)
    assert (short.timeout, short.quorum_timeout, short.connect_timeout) == (4 * S, 6 * S, 2 * S)
    long = ManagerConfig.from_keywords({}, timeout=600 * S)
    assert (long.timeout, long.quorum_timeout, long.connect_timeout) == (600 * S, 900 * S, 10 * S)
    with pytest.raises(ConfigError, match="quorum_timeout of at least timeout"):
        ManagerConfig.from_keywords({"quorum_timeout": 5 * S}, timeout=6 * S)
    assert ManagerConfig.from_keywords({"port": 1, "rank": 0}, timeout=None).rank == 0


def test_the_environment_has_the_last_word_under_torchfts_names() -> None:
    environment = {
        "TORCHFT_TIMEOUT_SEC": "7",
        "TORCHFT_QUORUM_TIMEOUT_SEC": "90",
        "TORCHFT_CONNECT_TIMEOUT_SEC": "3",
        "TORCHFT_QUORUM_RETRIES": "2",
        "TORCHFT_LIGHTHOUSE": "http://lighthouse:29510",
        "RANK": "1",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "1234",
    }
    config = ManagerConfig().with_environment(environment)
    assert (config.timeout, config.quorum_timeout, config.connect_timeout, config.quorum_retries) == (
        7 * S,
        90 * S,
        3 * S,
        2,
    )
    assert (config.rank, config.world_size, config.store_addr, config.store_port) == (1, 4, "host", 1234)
    assert config.lighthouse_addr == "http://lighthouse:29510"
    given = ManagerConfig(rank=0, world_size=2, store_addr="x", store_port=1, lighthouse_addr="http://y:1")
    kept = given.with_environment(environment)
    assert (kept.rank, kept.world_size, kept.store_addr, kept.lighthouse_addr) == (0, 2, "x", "http://y:1")
    alone = ManagerConfig().with_environment({})
    assert (alone.rank, alone.world_size, alone.store_addr, alone.lighthouse_addr) == (0, 1, None, None)


@pytest.mark.parametrize(
    ("environment", "pattern"),
    [
        ({"TORCHFT_TIMEOUT_SEC": "soon"}, "whole number in TORCHFT_TIMEOUT_SEC, got 'soon'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank below world_size 2, got 2"),
        ({"WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT"),
        ({"MASTER_ADDR": "host"}, "both store_addr and store_port"),
    ],
)
def test_an_environment_that_cannot_work_is_refused(environment: dict[str, str], pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        ManagerConfig().with_environment(environment)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TORCHFT_TIMEOUT_SEC": "120"}, (120, 180, 10)),
        ({"TORCHFT_QUORUM_TIMEOUT_SEC": "9"}, (6, 9, 3)),
        ({"TORCHFT_CONNECT_TIMEOUT_SEC": "100"}, (60, 100, 100)),
        ({"TORCHFT_TIMEOUT_SEC": "120", "TORCHFT_QUORUM_TIMEOUT_SEC": "300"}, (120, 300, 10)),
        ({}, (60, 90, 10)),
    ],
)
def test_timeouts_are_fitted_to_those_that_the_environment_sets(
    environment: dict[str, str], expected: tuple[int, int, int]
) -> None:
    config = ManagerConfig().with_environment(environment)
    assert (config.timeout, config.quorum_timeout, config.connect_timeout) == tuple(each * S for each in expected)


@pytest.mark.parametrize(("quorum_timeout", "is_warned"), [(60, True), (70, False)])
def test_a_quorum_timeout_that_another_replicas_wait_may_exceed_is_a_warning(
    quorum_timeout: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ManagerConfig(quorum_timeout=quorum_timeout * S).with_environment({})
    assert ("more than timeout and connect_timeout together" in caplog.text) is is_warned


def test_an_environment_that_contradicts_itself_is_refused() -> None:
    environment = {"TORCHFT_TIMEOUT_SEC": "120", "TORCHFT_QUORUM_TIMEOUT_SEC": "60"}
    with pytest.raises(ConfigError, match="quorum_timeout of at least timeout, got 60 s and 120 s"):
        ManagerConfig().with_environment(environment)


@pytest.mark.parametrize(
    ("arguments", "keywords", "pattern"),
    [
        ((), {"min_replicas": 2}, r"got 'min_replicas'; did you mean 'min_replica_size'\?"),
        ((), {"lighthouse_address": "http://here:1"}, r"did you mean 'lighthouse_addr'\?"),
        ((), {"colour": "red"}, r"got 'colour'; the keywords are checkpoint_store, "),
        ((), {"config": ManagerConfig(), "timeout": S}, r"both: config and \['timeout'\]"),
        ((2,), {"min_replica_size": 2}, "min_replica_size once, got it by position and by name"),
        ((2, True, S), {"timeout": S}, "timeout once"),
        (tuple(range(20)), {}, "at most 22 positional arguments, as torchft's Manager takes, got 23"),
    ],
)
def test_arguments_that_the_manager_does_not_take_are_refused_by_name(
    arguments: tuple[Any, ...], keywords: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(ConfigError, match=pattern):
        Manager(None, None, None, *arguments, **keywords)


def test_positional_arguments_follow_torchfts_order() -> None:
    upstream = pytest.importorskip("torchft.manager").Manager
    parameters = list(inspect.signature(upstream).parameters.values())[3:]
    given = named_arguments(range(len(parameters)), {}, others=())
    assert given == {parameter.name: position for position, parameter in enumerate(parameters)}


def test_torchfts_own_enumeration_is_understood() -> None:
    upstream = pytest.importorskip("torchft.manager", exc_type=ImportError).WorldSizeMode
    assert ManagerConfig(world_size_mode=upstream.FIXED_WITH_SPARES).world_size_mode is WorldSizeMode.FIXED_WITH_SPARES


def test_ranks_of_all_replicas_are_not_taken_for_those_of_this_one() -> None:
    """Ray Train counts the ranks of all replicas, and makes a group of ``torch.distributed`` for each replica."""
    environment = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for group, expected in ((None, (3, 4)), ((3, 4), (3, 4)), ((1, 2), (1, 2)), ((0, 1), (0, 1))):
        config = ManagerConfig().with_environment(environment, group)
        assert (config.rank, config.world_size) == expected
    config = ManagerConfig(rank=2, world_size=3).with_environment(environment, (0, 1))
    assert (config.rank, config.world_size) == (2, 3)
