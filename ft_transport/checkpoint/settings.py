"""The settings of a checkpoint store: defaults, validation, and the comparison between ranks."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from ft_transport.checkpoint.directory import MAX_NUMBER
from ft_transport.checkpoint.manifest import Trust
from ft_transport.coordination.agreement import Agreement
from ft_transport.errors import ConfigurationError
from ft_transport.keys import Keys
from ft_transport.settings import NotNegative, check_fields, check_number

BusyPolicy: TypeAlias = Literal["wait", "skip", "error"]
Existing: TypeAlias = Literal["keep", "clear", "refuse"]
CheckpointSelector: TypeAlias = int | Literal["latest"]

_COMMON_SETTINGS: Final = ("max_failed_saves", "busy", "read", "private", "accept_unsigned", "job")
"""Fields of `StoreSettings` that have to be the same on all ranks."""
_RETRY_S: Final = 10.0
"""How long a read is retried if it fails for a reason that does not concern the checkpoint."""

_settings_decoder: Final = msgspec.msgpack.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings that few users change.

    Attributes:
        timeout: How long a rank may go without a heartbeat before the others give it up, and how long its writer
            process may take for anything but writing.
        max_failed_saves: Number of saves in a row that may fail, each with a warning; one more failure stops the
            trainer.
        busy: Effect on a save while the one before is not finished: it waits, is skipped, or is refused.
        read: ``once``: one rank reads data that several ranks need, and passes it on. ``each``: each rank reads all
            that it needs, which is faster where reading is cheaper than the network between ranks.
        private: Whether only the owner may read files and directories (0600, 0700); else the umask decides.
        token: The job token, or two of them, as for a transport; by default the environment's. With a token,
            checkpoints are signed, and only signed ones are loaded.
        accept_unsigned: Whether checkpoints without a signature are loaded nevertheless.
        job: Name of the run, which the signature covers: a checkpoint that was signed for another name is not loaded.
    """

    timeout: timedelta = timedelta(minutes=10)
    max_failed_saves: NotNegative = 3
    busy: BusyPolicy = "wait"
    read: Literal["once", "each"] = "once"
    private: bool = False
    token: str | None = field(default=None, repr=False)
    accept_unsigned: bool = False
    job: str = ""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def retry_s(self) -> float:
        """How long a read is retried, in seconds; less than the other ranks wait."""
        return min(_RETRY_S, self.timeout.total_seconds() / 2)

    def trust(self) -> Trust:
        """Return the rule that decides which checkpoints are trusted.

        Raises:
            ConfigurationError: The token is invalid, or its file cannot be read.
        """
        keys = Keys.of(self.token) if self.token is not None else Keys.from_environment()
        return Trust(keys, self.job, self.accept_unsigned)


def compare_settings(agreement: Agreement, phase: str, settings: Callable[[], Mapping[str, object]]) -> None:
    """Compare settings or arguments between ranks. Called on all ranks.

    Args:
        agreement: The group's agreement.
        phase: Name of the compared settings, for errors.
        settings: Returns this rank's settings, or raises the error in them; they are compared as text.

    Raises:
        ConfigurationError: The settings differ; the same on all ranks.
        TransportError: The error of a rank's ``settings``; the same on all ranks.
    """
    stated = agreement.values_of_all(
        phase, lambda: {name: repr(value) for name, value in settings().items()}, _settings_decoder
    )
    for name, first in stated[0].items():
        for rank, each in enumerate(stated):
            if each.get(name) != first:
                raise ConfigurationError(
                    f"expected the same {name} on all ranks, got {first} on rank 0 and {each.get(name)} on rank {rank}"
                )


def checked_root(root: object) -> Path:
    """Return the absolute path of a root.

    Raises:
        ConfigurationError: The argument is no path.
    """
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        raise ConfigurationError(f"expected the path of a directory as root, got {root!r}")
    return Path(root).absolute()


def checked_selector(step: object) -> CheckpointSelector:
    """Return the argument if it is a step or ``latest``.

    Raises:
        ConfigurationError: Names the expected and the actual value.
    """
    if step == "latest":
        return "latest"
    if isinstance(step, str):
        raise ConfigurationError(f"expected a step, or 'latest', got {step!r}")
    return checked_directory_number("step", step)


def checked_directory_number(name: str, number: object) -> int:
    """Return the argument if it is a number that a directory can have.

    Args:
        name: Name of the argument, for the error.
        number: The caller's value.

    Raises:
        ConfigurationError: The value is no such number.
    """
    return check_number(name, number, at_least=0, at_most=MAX_NUMBER)


def checked_store_arguments(
    rank_local: object, existing: object, keep: object, consolidate: object, settings: StoreSettings
) -> dict[str, object]:
    """Return the arguments of a store that have to be the same on all its ranks, by name.

    Raises:
        ConfigurationError: Names the expected and the actual value.
    """
    keys = tuple(rank_local) if isinstance(rank_local, Iterable) and not isinstance(rank_local, str) else None
    if keys is None or not all(isinstance(key, str) for key in keys):
        raise ConfigurationError(f"expected a sequence of keys as rank_local, got {rank_local!r}")
    if keep is not None:
        check_number("keep", keep, at_least=1)
    if existing not in ("keep", "clear", "refuse"):
        raise ConfigurationError(f"expected keep, clear or refuse as existing, got {existing!r}")
    if consolidate is not None:
        if not isinstance(consolidate, str) or not all(consolidate.split(".")):
            raise ConfigurationError(
                f"expected the path of a part of the state, keys joined by dots, as consolidate, got {consolidate!r}"
            )
        if consolidate.split(".")[0] in keys:
            raise ConfigurationError(
                f"expected a part of what all ranks share as consolidate, {consolidate!r} is rank-local"
            )
    return {
        "rank_local": tuple(dict.fromkeys(keys)),
        "existing": existing,
        "keep": keep,
        "consolidate": consolidate,
        **{name: getattr(settings, name) for name in _COMMON_SETTINGS},
    }
