"""The settings of a manager in a quorum, their defaults and their checks before anything starts."""

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
TIMEOUT_ENV: Final = "TORCHFT_TIMEOUT_SEC"
QUORUM_TIMEOUT_ENV: Final = "TORCHFT_QUORUM_TIMEOUT_SEC"
CONNECT_TIMEOUT_ENV: Final = "TORCHFT_CONNECT_TIMEOUT_SEC"
QUORUM_RETRIES_ENV: Final = "TORCHFT_QUORUM_RETRIES"

_DEFAULT_TIMEOUT: Final = timedelta(seconds=60)
_DEFAULT_QUORUM_TIMEOUT: Final = timedelta(seconds=90)
_QUORUM_SHARE: Final = 1.5
_CONNECT_SHARE: Final = 1 / 3
"""Where one follows from the other, ``quorum_timeout`` is so many times as long as ``timeout``, and ``connect_timeout``
at most the share that is left."""
_DEFAULT_CONNECT_TIMEOUT: Final = timedelta(seconds=10)


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
"""The arguments of torchft's ``Manager`` that follow ``state_dict``."""


class TorchftKeywords(TypedDict, total=False):
    """The arguments of torchft's ``Manager`` that make up a `ManagerConfig`, under torchft's names.

    ``port`` is accepted and not used: there is no server of the replica's own behind it.
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
    """Name the positional arguments of a manager, in torchft's order, and refuse unknown keywords.

    Args:
        positional: The arguments after ``state_dict``.
        keywords: The given keywords, without the names in ``others`` that were not given.
        others: Further keywords that the manager takes.

    Raises:
        ConfigurationError: A keyword is unknown or given twice, or there are too many arguments.
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
    """The settings of a replica in a quorum. Names as in torchft, whose environment variables override it.

    Attributes:
        min_replica_size: Fewer replicas than this do not commit a step.
        use_async_quorum: Whether the quorum is formed while ``forward`` runs. A replica that may be behind waits for
            it in any case.
        timeout: For a collective, a commit, a transfer and the lock. ``TORCHFT_TIMEOUT_SEC``.
        quorum_timeout: For a quorum. It has to cover the others' slowest step, and a wait of theirs for a state that
            does not come, which takes ``timeout``. ``TORCHFT_QUORUM_TIMEOUT_SEC``.
        connect_timeout: For finding a Lighthouse, a store or the members of a process group.
            ``TORCHFT_CONNECT_TIMEOUT_SEC``.
        rank: Rank within the replica. Default: ``RANK``, or 0.
        world_size: Ranks of the replica. Default: ``WORLD_SIZE``, or 1.
        world_size_mode: How many replicas contribute.
        store_addr: Host of the replica's store. Default: ``MASTER_ADDR``; without one a replica of one rank has a store
            of its own.
        store_port: Its port. Default: ``MASTER_PORT``.
        lighthouse_addr: ``http://host:port``. Default: ``TORCHFT_LIGHTHOUSE``; without one this process runs a
            Lighthouse of its own.
        replica_id: Name of the replica. A number at its end is its index, as in torchft.
        hostname: How others reach a store of this replica's own. Default: as the transport's address says.
        heartbeat_interval: Between two heartbeats to the Lighthouse.
        heartbeat_timeout: After which the Lighthouse takes a replica for dead: what it was started with
            (``--heartbeat_timeout_ms``). A Lighthouse of our own is started with it.
        init_sync: Whether at step 0 all take the state of one replica.
        max_retries: How many steps in a row may fail to commit; ``None`` for any number.
        quorum_retries: How often a quorum that timed out is asked for again. One that failed because the Lighthouse
            could not be reached is asked for again until ``quorum_timeout`` in any case. ``TORCHFT_QUORUM_RETRIES``.
        compare_every: Replicas compare digests of what their optimizers change at every step that this divides. One
            that differs from most heals; without a majority all of them stop. Each comparison reads that memory once,
            in the background (about 0.1 s for each GB on one core), and the optimizer waits for it. ``None`` for never.
        warm_join: Whether a newcomer gets what a healthy replica has before it asks for its first quorum, while the
            others train; in the quorum it then gets what has changed since (`WarmJoin`).
        verify_heal: Whether the state after healing is compared with the source's, every bit of it.
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
    heartbeat_timeout: timedelta = timedelta(seconds=5)
    init_sync: bool = True
    max_retries: NotNegative | None = None
    quorum_retries: NotNegative = 0
    verify_heal: bool = True
    warm_join: bool = True
    compare_every: int | None = None

    def __post_init__(self) -> None:
        # torchft's own enumeration is as good.
        mode = WorldSizeMode.__members__.get(getattr(self.world_size_mode, "name", ""), self.world_size_mode)
        object.__setattr__(self, "world_size_mode", mode)
        check_fields(self)
        self._check_ladder()

    @classmethod
    def from_keywords(cls, keywords: TorchftKeywords, *, timeout: timedelta | None) -> "ManagerConfig":
        """Make one from torchft's keywords; timeouts that were not given are fitted to those that were.

        Raises:
            ConfigurationError: They cannot work.
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

    def with_environment(self, environment: Mapping[str, str] = os.environ) -> "ManagerConfig":
        """Return this config completed from the environment, whose timeouts and retries take precedence.

        Raises:
            ConfigurationError: A variable is no number, or the result cannot work.
        """
        changes: dict[str, Any] = {}
        for name, variable in (
            ("timeout", TIMEOUT_ENV),
            ("quorum_timeout", QUORUM_TIMEOUT_ENV),
            ("connect_timeout", CONNECT_TIMEOUT_ENV),
        ):
            if variable in environment:
                changes[name] = timedelta(seconds=_number_from(environment, variable))
        changes.update(self._fitted_to(changes))
        if QUORUM_RETRIES_ENV in environment:
            changes["quorum_retries"] = _number_from(environment, QUORUM_RETRIES_ENV)
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
                "expected a quorum_timeout of more than timeout and connect_timeout together, got %s, %s and %s: a "
                "replica that waits for another's state for as long as timeout may let the others' quorum time out",
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
                f"expected the store of this replica's {filled.world_size} ranks in store_addr and store_port, or in "
                "MASTER_ADDR and MASTER_PORT (torchrun sets them)"
            )
        return filled

    def _fitted_to(self, environment: Mapping[str, timedelta]) -> dict[str, timedelta]:
        """Return the timeouts that have to change because of others, which the environment sets."""
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
            logger.info("%s is set to %s, to fit the timeouts that the environment sets", name, value)
        return changed

    def _check_ladder(self) -> None:
        """Each wait has to end before the one that contains it, or else the outer one hides the inner one's reason."""
        ladder = (
            ("heartbeat_interval", "heartbeat_timeout", "the Lighthouse would take a live replica for dead"),
            ("connect_timeout", "quorum_timeout", "a Lighthouse that cannot be reached would look like a slow quorum"),
            (
                "timeout",
                "quorum_timeout",
                "a replica that waits in a failing collective would be given up by the others",
            ),
        )
        for inner, outer, reason in ladder:
            inner_value, outer_value = getattr(self, inner), getattr(self, outer)
            if inner_value > outer_value or (inner == "heartbeat_interval" and 2 * inner_value > outer_value):
                least = "twice " if inner == "heartbeat_interval" else ""
                raise ConfigurationError(
                    f"expected {outer} of at least {least}{inner}, got {outer_value.total_seconds():g} s and "
                    f"{inner_value.total_seconds():g} s: otherwise {reason}"
                )


def _number_from(environment: Mapping[str, str], variable: str) -> int:
    try:
        return int(environment[variable])
    except ValueError:
        raise ConfigurationError(f"expected a whole number in {variable}, got {environment[variable]!r}") from None


def _with_scheme(address: str) -> str:
    """Complete ``host:port`` to the address that torchft expects.

    Raises:
        ConfigurationError: It is neither that nor ``http://host:port``.
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
