"""The settings of a manager in a quorum, with their defaults. They are checked before the manager starts anything."""

import difflib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Final, TypedDict
from urllib.parse import urlsplit

from ft_transport.errors import ConfigurationError
from ft_transport.settings import NotNegative, check_duration, check_fields
from manager.quorum.decision import WorldSizeMode

logger = logging.getLogger(__name__)

LIGHTHOUSE_ENV: Final = "TORCHFT_LIGHTHOUSE"

_DEFAULT_TIMEOUT: Final = timedelta(seconds=60)
_DEFAULT_QUORUM_TIMEOUT: Final = timedelta(seconds=90)
_DEFAULT_CONNECT_TIMEOUT: Final = timedelta(seconds=10)
_QUORUM_SHARE: Final = 1.5
"""``quorum_timeout`` divided by ``timeout``, if only one of the two was given."""
_CONNECT_SHARE: Final = 1 / 3
"""``connect_timeout`` divided by a given ``quorum_timeout`` that is shorter than the default."""

_TORCHFT_ORDER: Final = (
    "min_replica_size",
    "use_async_quorum",
    "timeout",
    "quorum_timeout",
    "connect_timeout",
    "rank",
    "world_size",
    "world_size_mode",
    "store_addr",
    "store_port",
    "lighthouse_addr",
    "replica_id",
    "port",
    "hostname",
    "heartbeat_interval",
    "checkpoint_transport",
    "init_sync",
    "max_retries",
    "quorum_retries",
)
"""The arguments after ``state_dict`` in torchft's ``Manager``, in their order."""


class TorchftKeywords(TypedDict, total=False):
    """Keywords of `Manager` that become fields of a `ManagerConfig`; the names are those of torchft's ``Manager``.

    ``port`` is accepted and ignored: torchft starts a server on this port, and this package has no such server.
    """

    min_replica_size: int
    use_async_quorum: bool
    quorum_timeout: timedelta
    connect_timeout: timedelta
    rank: int | None
    world_size: int | None
    world_size_mode: WorldSizeMode
    store_addr: str | None
    store_port: int | None
    lighthouse_addr: str | None
    replica_id: str | None
    hostname: str | None
    port: int | None
    heartbeat_interval: timedelta
    init_sync: bool
    max_retries: int | None
    quorum_retries: int
    compare_every: int | None


def named_arguments(
    positional: Sequence[Any], keywords: Mapping[str, Any], *, others: Collection[str]
) -> dict[str, Any]:
    """Return the positional and the keyword arguments of `Manager` in one dict, by name.

    Args:
        positional: The positional arguments after ``state_dict``, in the order of torchft's ``Manager``.
        keywords: The keyword arguments.
        others: Further keywords of `Manager`: those that are neither torchft's nor fields of `ManagerConfig`.

    Raises:
        ConfigurationError: A keyword is unknown, an argument is given twice, or there are too many arguments.
    """
    if len(positional) > len(_TORCHFT_ORDER):
        raise ConfigurationError(
            f"expected at most {3 + len(_TORCHFT_ORDER)} positional arguments, as torchft's Manager takes, got "
            f"{3 + len(positional)}"
        )
    named = dict(zip(_TORCHFT_ORDER, positional, strict=False))
    known = {*_TORCHFT_ORDER, *(each.name for each in fields(ManagerConfig)), *others}
    for name in keywords:
        if name in named:
            raise ConfigurationError(f"expected {name} once, got it by position and by name")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, 0.5)
            advice = f"did you mean {close[0]!r}?" if close else f"the keywords are {', '.join(sorted(known))}"
            raise ConfigurationError(f"expected a keyword of Manager, got {name!r}; {advice}")
    return {**named, **keywords}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerConfig:
    """The settings of a replica in a quorum, under torchft's names.

    torchft's environment variables override the timeouts and retries, and provide other settings that are not given.

    Attributes:
        min_replica_size: Smallest number of replicas with which a step can be committed.
        use_async_quorum: Whether the quorum forms while ``forward`` runs. If this replica may be behind,
            ``start_quorum`` waits for the quorum in any case.
        timeout: Deadline of a collective, a commit, a transfer of state and a wait for the lock.
            ``TORCHFT_TIMEOUT_SEC`` overrides it.
        quorum_timeout: Deadline to form a quorum. It must be longer than the slowest step of any replica plus
            ``timeout``: a healing replica may wait that long for a state. ``TORCHFT_QUORUM_TIMEOUT_SEC`` overrides it.
        connect_timeout: Deadline to reach the Lighthouse, the replica's store or the members of a process group.
            ``TORCHFT_CONNECT_TIMEOUT_SEC`` overrides it.
        rank: Rank of this process within the replica. Default: ``RANK``, or 0; that of ``torch.distributed`` if its
            default group is smaller than ``WORLD_SIZE``.
        world_size: Number of ranks of the replica. Default: ``WORLD_SIZE``, or 1; that of ``torch.distributed`` if it
            is smaller.
        world_size_mode: Which replicas of the quorum contribute gradients.
        store_addr: Host of the replica's store. Default: ``MASTER_ADDR``. Without a host, a replica of one rank starts
            a store.
        store_port: Port of the replica's store. Default: ``MASTER_PORT``.
        lighthouse_addr: Address of the Lighthouse, ``http://host:port``. Default: ``TORCHFT_LIGHTHOUSE``. Without an
            address, this process starts a Lighthouse.
        replica_id: Name of the replica. As in torchft, a number at the end of the name is the replica's index.
        hostname: Host name at which other replicas reach a store that this process starts. Default: the host of the
            transport's address.
        heartbeat_interval: Time between two heartbeats to the Lighthouse.
        heartbeat_timeout: Silence after which the Lighthouse declares a replica dead. It must equal the Lighthouse's
            ``--heartbeat_timeout_ms``. A Lighthouse that this process starts uses this value.
        init_sync: Whether all replicas load the state of one replica at step 0.
        max_retries: How many steps in a row may fail to commit; ``None`` for any number.
        quorum_retries: How often the replica requests a quorum again after a request timed out. While the Lighthouse
            cannot be reached, the replica requests the quorum until ``quorum_timeout``, whatever this number is.
            ``TORCHFT_QUORUM_RETRIES`` overrides it.
        compare_every: Interval, in steps, at which the replicas compare their states; ``None`` for never. A comparison
            digests the memory that attached optimizers change (about 0.1 s per GB on one core, in the background), and
            the next optimizer step waits for the digests. A replica that differs from the majority heals. Without a
            majority, all replicas raise `StatesDivergedError`.
        verify_heal: Whether a replica compares every bit of a loaded state with the source's state after it has
            healed.
        replay_bytes: Largest size, in bytes, of the gradients that a newcomer records while it receives the state and
            the others train; ``None`` to let all replicas wait until the newcomer has the state.
        replay_optimizers: Further classes of optimizers whose steps a newcomer may record and make later, beside
            torch's own. A step must be a function of the gradients, the hyperparameters and the optimizer's
            ``state_dict`` alone. A subclass must be named itself.
    """

    min_replica_size: int = 1
    use_async_quorum: bool = True
    timeout: timedelta = _DEFAULT_TIMEOUT
    quorum_timeout: timedelta = _DEFAULT_QUORUM_TIMEOUT
    connect_timeout: timedelta = _DEFAULT_CONNECT_TIMEOUT
    rank: NotNegative | None = None
    world_size: int | None = None
    world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC
    store_addr: str | None = None
    store_port: int | None = None
    lighthouse_addr: str | None = None
    replica_id: str | None = None
    hostname: str | None = None
    heartbeat_interval: timedelta = timedelta(milliseconds=100)
    heartbeat_timeout: timedelta = timedelta(seconds=1)
    init_sync: bool = True
    max_retries: NotNegative | None = None
    quorum_retries: NotNegative = 0
    verify_heal: bool = True
    compare_every: int | None = None
    replay_bytes: NotNegative | None = None
    replay_optimizers: Sequence[type] = ()

    def __post_init__(self) -> None:
        # Accept a member of torchft's own enumeration with the same name.
        mode = WorldSizeMode.__members__.get(getattr(self.world_size_mode, "name", ""), self.world_size_mode)
        object.__setattr__(self, "world_size_mode", mode)
        check_fields(self)
        self._check_ladder()

    @classmethod
    def from_keywords(cls, keywords: TorchftKeywords, *, timeout: timedelta | None) -> "ManagerConfig":
        """Return a config made from torchft's keywords. Missing timeouts are derived from the given timeouts.

        Raises:
            ConfigurationError: A keyword has a wrong type or value, or the timeouts contradict each other.
        """
        for name in ("quorum_timeout", "connect_timeout"):
            check_duration(name, keywords.get(name, _DEFAULT_TIMEOUT))
        check_duration("timeout", timeout if timeout is not None else _DEFAULT_TIMEOUT)
        given: dict[str, Any] = {name: value for name, value in keywords.items() if name != "port"}
        quorum_timeout = given.get("quorum_timeout", _DEFAULT_QUORUM_TIMEOUT)
        if timeout is None:
            timeout = min(_DEFAULT_TIMEOUT, quorum_timeout / _QUORUM_SHARE)
        given.setdefault("quorum_timeout", max(_DEFAULT_QUORUM_TIMEOUT, timeout * _QUORUM_SHARE))
        given.setdefault("connect_timeout", min(_DEFAULT_CONNECT_TIMEOUT, given["quorum_timeout"] * _CONNECT_SHARE))
        return cls(timeout=timeout, **given)

    def with_environment(
        self, environment: Mapping[str, str] = os.environ, group: tuple[int, int] | None = None
    ) -> "ManagerConfig":
        """Return this config with missing values filled in from the environment.

        Timeouts and retries in the environment override those of this config.

        Args:
            environment: The environment.
            group: Rank and size of the default group of ``torch.distributed``, if it is initialised. If it is smaller
                than ``WORLD_SIZE``, the launcher counts the ranks of all replicas, as Ray Train does. Then the group's
                rank and size replace ``RANK`` and ``WORLD_SIZE``.

        Raises:
            ConfigurationError: A variable for a number contains none, or the resulting settings contradict each other.
        """
        if group is not None and "WORLD_SIZE" in environment and group[1] < _number_from(environment, "WORLD_SIZE"):
            environment = {**environment, "RANK": str(group[0]), "WORLD_SIZE": str(group[1])}
        changes: dict[str, Any] = {}
        for name, variable in (
            ("timeout", "TORCHFT_TIMEOUT_SEC"),
            ("quorum_timeout", "TORCHFT_QUORUM_TIMEOUT_SEC"),
            ("connect_timeout", "TORCHFT_CONNECT_TIMEOUT_SEC"),
        ):
            if variable in environment:
                changes[name] = timedelta(seconds=_number_from(environment, variable))
        changes.update(self._fitted_to(changes))
        if "TORCHFT_QUORUM_RETRIES" in environment:
            changes["quorum_retries"] = _number_from(environment, "TORCHFT_QUORUM_RETRIES")
        for name, variable, default in (("rank", "RANK", 0), ("world_size", "WORLD_SIZE", 1)):
            if getattr(self, name) is None:
                changes[name] = _number_from(environment, variable) if variable in environment else default
        if self.store_addr is None and "MASTER_ADDR" in environment:
            changes["store_addr"] = environment["MASTER_ADDR"]
        if self.store_port is None and "MASTER_PORT" in environment:
            changes["store_port"] = _number_from(environment, "MASTER_PORT")
        if self.lighthouse_addr is None and environment.get(LIGHTHOUSE_ENV):
            changes["lighthouse_addr"] = environment[LIGHTHOUSE_ENV]
        if lighthouse_addr := changes.get("lighthouse_addr", self.lighthouse_addr):
            changes["lighthouse_addr"] = _with_scheme(lighthouse_addr)
        filled = replace(self, **changes)
        if filled.timeout + filled.connect_timeout > filled.quorum_timeout:
            logger.warning(
                "expected a quorum_timeout of more than timeout and connect_timeout together, got %s, %s and %s: while "
                "one replica waits up to timeout for a state, the quorum of the other replicas may time out",
                filled.quorum_timeout,
                filled.timeout,
                filled.connect_timeout,
            )
        assert filled.rank is not None, "it has just been filled in"
        assert filled.world_size is not None, "it has just been filled in"
        if filled.rank >= filled.world_size:
            raise ConfigurationError(f"expected a rank below world_size {filled.world_size}, got {filled.rank}")
        if (filled.store_addr is None) != (filled.store_port is None):
            raise ConfigurationError(
                f"expected both store_addr and store_port, or neither; got {filled.store_addr!r} and "
                f"{filled.store_port!r}"
            )
        if filled.world_size > 1 and filled.store_addr is None:
            raise ConfigurationError(
                f"expected the address of the store that this replica's {filled.world_size} ranks share, in store_addr "
                "and store_port, or in MASTER_ADDR and MASTER_PORT (torchrun sets them)"
            )
        return filled

    def _fitted_to(self, environment: Mapping[str, timedelta]) -> dict[str, timedelta]:
        """Return new values for those timeouts of this config that contradict timeouts from the environment."""
        if not environment:
            return {}
        fitted: dict[str, timedelta] = {}
        quorum_timeout = environment.get("quorum_timeout")
        if quorum_timeout is None:
            timeout = environment.get("timeout", timedelta(0))
            fitted["quorum_timeout"] = quorum_timeout = max(
                self.quorum_timeout, timeout * _QUORUM_SHARE, *environment.values()
            )
        if "timeout" not in environment and self.timeout > quorum_timeout:
            fitted["timeout"] = quorum_timeout / _QUORUM_SHARE
        if "connect_timeout" not in environment and self.connect_timeout > quorum_timeout:
            fitted["connect_timeout"] = quorum_timeout * _CONNECT_SHARE
        changed = {name: value for name, value in fitted.items() if value != getattr(self, name)}
        for name, value in changed.items():
            logger.info("%s is now %s, because of other timeouts that environment variables set", name, value)
        return changed

    def _check_ladder(self) -> None:
        """Check that no wait has a longer deadline than the wait around it.

        Otherwise the outer wait would time out first, and hide the reason.

        Raises:
            ConfigurationError: An inner wait has a longer deadline.
        """
        ladder = (
            ("heartbeat_timeout", 2, "heartbeat_interval", "the Lighthouse would declare a live replica dead"),
            ("quorum_timeout", 1, "connect_timeout", "an unreachable Lighthouse would look like a slow quorum"),
            ("quorum_timeout", 1, "timeout", "the quorum would end while a replica waits in a failing collective"),
        )
        for outer, factor, inner, reason in ladder:
            inner_value, outer_value = getattr(self, inner), getattr(self, outer)
            if factor * inner_value > outer_value:
                raise ConfigurationError(
                    f"expected {outer} of at least {'twice ' if factor == 2 else ''}{inner}, got "
                    f"{outer_value.total_seconds():g} s and {inner_value.total_seconds():g} s: otherwise {reason}"
                )


def _number_from(environment: Mapping[str, str], variable: str) -> int:
    try:
        return int(environment[variable])
    except ValueError:
        raise ConfigurationError(f"expected a whole number in {variable}, got {environment[variable]!r}") from None


def _with_scheme(address: str) -> str:
    """Return the address with ``http://`` in front, which torchft requires.

    Raises:
        ConfigurationError: The address is neither ``host:port`` nor ``http://host:port``.
    """
    completed = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(completed)
        is_complete = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port is not None
    except ValueError:
        is_complete = False
    if not is_complete:
        raise ConfigurationError(
            f"expected http://host:port as the address of the Lighthouse (lighthouse_addr or {LIGHTHOUSE_ENV}), got "
            f"{address!r}"
        )
    return completed
