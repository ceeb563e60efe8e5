"""The settings and arguments of a checkpoint store: their defaults, checks, and the comparison between ranks."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from ft_transport.checkpoint.directory import MAX_NUMBER
from ft_transport.checkpoint.files import checked_url, is_url
from ft_transport.checkpoint.manifest import Trust
from ft_transport.coordination.agreement import Agreement
from ft_transport.credentials import Keys
from ft_transport.errors import ConfigurationError
from ft_transport.settings import NotNegative, check_fields, check_number

BusyPolicy: TypeAlias = Literal["wait", "skip", "error"]
Existing: TypeAlias = Literal["keep", "clear", "refuse"]
CheckpointSelector: TypeAlias = int | Literal["latest"]

_COMMON_SETTINGS: Final = ("max_failed_saves", "busy", "read", "private", "accept_unsigned", "job")
"""Fields of `StoreSettings` that must be equal on all ranks."""
_RETRY_S: Final = 10.0
"""How long a failed read is retried if its error does not mean that the file is damaged."""

_settings_decoder: Final = msgspec.msgpack.Decoder(dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings of a `CheckpointStore` that few users change.

    Attributes:
        timeout: Longest time without a heartbeat of a rank, after which the other ranks raise an error. Also how long
            the writer process may take for a request; a write may take longer, depending on the number of bytes.
        max_failed_saves: Number of saves in a row that may fail, each with a warning. If one more fails, the store
            raises an error in the trainer.
        busy: Decides what happens to a new save while an earlier save is running: ``wait`` for the earlier save,
            ``skip`` the new one, or raise an ``error``.
        read: ``once``: if several ranks need the same data, one rank reads it and sends it to the others. ``each``:
            every rank reads all data that it needs, which is faster if storage is faster than the network.
        private: Whether only the owner may read files and directories (modes 0600 and 0700). Otherwise the umask
            decides.
        token: The job token, or two tokens separated by a space; by default the token in the environment. With a token,
            the store signs its checkpoints, and loads only checkpoints with a valid signature.
        accept_unsigned: Whether a store with a token also loads checkpoints without a signature.
        job: Name of the run, which becomes part of the signature: a store loads only checkpoints signed for its name.
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
        """How long a failed read is retried, in seconds: less than ``timeout``, after which other ranks give up."""
        return min(_RETRY_S, self.timeout.total_seconds() / 2)

    def trust(self) -> Trust:
        """Return the keys and rules by which the store signs its checkpoints and verifies signatures.

        Raises:
            ConfigurationError: The token is invalid, or its file cannot be read.
        """
        keys = Keys.of(self.token) if self.token is not None else Keys.from_environment()
        return Trust(keys, self.job, self.accept_unsigned)


def compare_settings(agreement: Agreement, phase: str, settings: Callable[[], Mapping[str, object]]) -> None:
    """Check that settings or arguments are equal on all ranks. Called on all ranks.

    Args:
        agreement: The group's agreement.
        phase: Name of the comparison, for errors.
        settings: Returns this rank's settings by name, or raises an error if one is invalid. Each value is compared as
            its ``repr``.

    Raises:
        ConfigurationError: The settings differ; the same error on all ranks.
        TransportError: ``settings`` raised an error on a rank; the same error on all ranks.
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


def checked_root(root: object) -> Path | str:
    """Return the absolute path of a checkpoint root, or the URL of a bucket and a prefix in it.

    Raises:
        ConfigurationError: The argument is neither.
    """
    return checked_url(root) if isinstance(root, str) and is_url(root) else checked_directory(root)


def checked_directory(root: object) -> Path:
    """Return the absolute path of a directory.

    Raises:
        ConfigurationError: The argument is not a path.
    """
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root) or is_url(str(root)):
        raise ConfigurationError(f"expected the path of a directory as root, got {root!r}")
    return Path(root).absolute()


def checked_selector(step: object) -> CheckpointSelector:
    """Return the argument if it is a step or ``latest``.

    Raises:
        ConfigurationError: The argument is neither.
    """
    if step == "latest":
        return "latest"
    if isinstance(step, str):
        raise ConfigurationError(f"expected a step, or 'latest', got {step!r}")
    return checked_directory_number("step", step)


def checked_directory_number(name: str, number: object) -> int:
    """Return the argument if it is a step or version that can be part of a directory's name.

    Args:
        name: Name of the argument, for the error.
        number: Value of the argument.

    Raises:
        ConfigurationError: The value is not a whole number from 0 to `MAX_NUMBER`.
    """
    return check_number(name, number, at_least=0, at_most=MAX_NUMBER)


def checked_store_arguments(
    rank_local: object, existing: object, keep: object, consolidate: object, settings: StoreSettings
) -> dict[str, object]:
    """Check the arguments of a `CheckpointStore`, and return those that must be equal on all ranks, by name.

    Raises:
        ConfigurationError: An argument is invalid.
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
                f"expected the path of a part of the state (keys joined by dots) as consolidate, got {consolidate!r}"
            )
        if consolidate.split(".")[0] in keys:
            raise ConfigurationError(
                f"expected a part of the state outside rank_local as consolidate, but {consolidate!r} is in rank_local"
            )
    return {
        "rank_local": tuple(dict.fromkeys(keys)),
        "existing": existing,
        "keep": keep,
        "consolidate": consolidate,
        **{name: getattr(settings, name) for name in _COMMON_SETTINGS},
    }


def check_place(root: str, consolidate: object, upload: object, settings: StoreSettings) -> None:
    """Check that a bucket is not asked for what only a directory can do.

    Raises:
        ConfigurationError: The root is a bucket, and an argument is for directories only.
    """
    if is_url(root) and (consolidate is not None or upload is not None or settings.private):
        raise ConfigurationError(
            f"expected neither consolidate nor upload nor private=True for {root}: no files of a bucket are written by "
            "several ranks or uploaded, and its policy decides who may read"
        )
