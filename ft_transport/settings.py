"""The settings of a transport, their defaults and their checks before anything starts."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from operator import index
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias, Union, get_args, get_origin

from ft_transport.errors import ConfigurationError
from ft_transport.keys import Keys
from ft_transport.tls import Certificates, TLSFiles
from ft_transport.wire.chunks import CHUNK_BYTES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ANYONE_VARIABLE: Final = "FT_TRANSPORT_ALLOW_ANYONE"
"""Environment variable: 1 lets servers without a token listen beyond the loopback."""


NotNegative: TypeAlias = Annotated[int, 0]
NotNegativeTime: TypeAlias = Annotated[timedelta, timedelta(0)]


def default_num_threads() -> int:
    """Threads that saturate the memory of common machines; more only take cores from the training."""
    return min(8, os.cpu_count() or 1)


def _environment_allows_anyone() -> bool:
    value = os.environ.get(ANYONE_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ConfigurationError(f"expected 0 or 1 in {ANYONE_VARIABLE}, got {value[:100]!r}")
    return value == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """Progress of a fetch: bytes received so far, bytes in all, seconds since it began.

    They are verified, unless their digests come after the data; damaged data is then fetched and counted again.
    """

    done_bytes: int
    total_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the memory, the bandwidth and the time that peers may take.

    Attributes:
        max_snapshots: Snapshots alive at once, each as large as the state.
        max_clients: Receivers that the server sends data to at once; all connections from one address that say the same
            replica are one. Other receivers wait, and ask again each second. ``None`` for any number.
        max_send_bytes_per_s: How fast the server sends all of its bodies together, so that its training has the rest of
            the network; the server then lends no memory on the same host (``same_host``). ``None`` for no bound.
            Receivers give up connections with less than ``min_bytes_per_s``.
        stall_timeout: Longest silence of a sender; and the time in which a receiver has to take 4 MiB, or the rest if
            that is less. An attempt to connect takes at most 10 s, or this time if it is shorter.
        min_bytes_per_s: A receiver gives up a connection that delivers less, so that a trickle cannot defeat the
            deadlines.
    """

    max_snapshots: int = 2
    max_clients: int | None = None
    max_send_bytes_per_s: float | None = None
    stall_timeout: timedelta = timedelta(seconds=30)
    min_bytes_per_s: float = 64 * 1024

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """Settings that few users change.

    Attributes:
        host: Address to bind; ``None`` for all addresses of both families (IPv4 alone where IPv6 is off), or without a
            job token for the loopback alone.
        port: Port to bind; 0 for any free one.
        advertise: Host, address or network interface that the server advertises to peers. Default: the environment
            variable ``FT_TRANSPORT_ADVERTISE``, or else this host's name.
        replica: Name of this replica in ``/status``.
        token: The job token. Peers prove to each other that they know it, and never send it. While it is replaced: two
            tokens with a space between them. Default: the environment variable ``FT_TRANSPORT_TOKEN``, or the file that
            ``FT_TRANSPORT_TOKEN_FILE`` names, which the process reads again when it changes. Without a token, peers are
            not authenticated.
        allow_anyone: Whether a server without a token listens beyond the loopback, so that anyone there can read the
            weights. Default: whether the environment variable ``FT_TRANSPORT_ALLOW_ANYONE`` is 1.
        tls: This process's certificate and the authority of its peers' certificates. The server and every fetch then
            speak only TLS, and both sides show a certificate. Default: the files that ``FT_TRANSPORT_TLS_CERT``,
            ``FT_TRANSPORT_TLS_KEY`` and ``FT_TRANSPORT_TLS_CA`` name, or none.
        reached_at: ``host:port`` where peers reach this server through a translated address, such as a forwarded port.
            A peer refuses a server that it reached at another address than one of these or the server's own.
        verify: Whether a fetch compares received chunks with their digests. Without that, nothing detects chunks that
            were changed on the way, even with a job token.
        same_host: Whether processes of one host and user pass each other memory instead of sending it. A fetch trusts
            such memory no earlier, and with no fewer proofs, than data from the network.
        limits: The memory, the bandwidth and the time that peers may take.
        meshes: Device meshes for received DTensors that have no counterpart in the receiver's own state.
        on_progress: Called while receiving, after each chunk, on a receiving thread.
        records: A file to which each fetch, heal, save, load and publish appends a line of JSON. Default: the file that
            ``FT_TRANSPORT_RECORDS`` names, if any. `HTTPTransport.recorder` has the last 100 in memory.
    """

    host: str | None = None
    port: Annotated[int, 0, 65535] = 0
    advertise: str | None = None
    replica: str = field(default_factory=socket.gethostname)
    token: str | None = field(default=None, repr=False)
    allow_anyone: bool = field(default_factory=_environment_allows_anyone)
    tls: TLSFiles | None = None
    reached_at: Sequence[str] = ()
    verify: bool = True
    same_host: bool = True
    limits: Limits = field(default_factory=Limits)
    meshes: "Sequence[DeviceMesh]" = ()
    on_progress: Callable[[FetchProgress], None] | None = None
    records: str | os.PathLike[str] | None = None
    chunk_bytes: ClassVar[int] = CHUNK_BYTES
    """The most bytes of a chunk, the unit of fetch and of digest.

    A state of less than 256 of them has smaller ones, of 1 MiB at least, so that each of many receivers soon has
    something to pass on.
    """
    max_failures: ClassVar[int] = 4
    """Failures in a row after which a fetch gives up a source."""
    lease: ClassVar[timedelta] = timedelta(seconds=5)
    """How long after its last request a snapshot still counts as being fetched while that receiver stays connected.

    Where the server sent data it is at least ``stall_timeout``: the receiver may not have read that data yet.
    """
    contended_bytes_per_s: ClassVar[float] = 4 << 20
    """How fast receivers have to take a snapshot whose memory a newer one wants.

    From the first refusal of the newer one, receivers of the oldest have ``lease``, and as long as its bytes take at
    this rate; then the server cuts them off, and they start again with a newer one.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    def keys(self) -> Keys | None:
        """Return the keys of the job token; ``None`` without a token.

        Raises:
            ConfigurationError: It is no token, or its file cannot be read.
        """
        return Keys.of(self.token) if self.token is not None else Keys.from_environment()

    def certificates(self) -> Certificates | None:
        """Return the certificates of this process; ``None`` without TLS.

        Raises:
            ConfigurationError: The files cannot be read, or do not fit together.
        """
        files = self.tls if self.tls is not None else TLSFiles.from_environment()
        return Certificates(files) if files is not None else None


def check_fields(settings: Any) -> None:
    """Check each field of a dataclass against its type, and converts the integers of numpy and torch.

    An ``int`` is at least 1 and a ``timedelta`` positive, unless the type is ``Annotated`` with the least value and the
    greatest. A type in quotes is not checked, and an error does not show a field without ``repr``.

    Raises:
        ConfigurationError: A value is invalid; the message names the field, the expectation and the value.
    """
    for each in fields(settings):
        if not isinstance(each.type, str):
            value = getattr(settings, each.name)
            object.__setattr__(settings, each.name, _checked(each.name, value, each.type, is_shown=each.repr))


def _checked(name: str, value: object, kind: Any, *, is_shown: bool) -> object:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and NoneType in kinds:
        return value
    first, *bounds = get_args(kinds[0]) if get_origin(kinds[0]) is Annotated else kinds[:1]
    cls, parameters = get_origin(first) or first, get_args(first)
    if cls in _CHECKS:
        return _CHECKS[cls](name, value, *bounds)
    if cls is Literal:
        is_right, expected = value in parameters, f"one of {parameters}"
    elif cls is Sequence:
        is_right = isinstance(value, Sequence) and all(isinstance(item, parameters) for item in value)
        is_right, expected = is_right and not isinstance(value, str), f"a sequence of {parameters[0].__name__}"
    else:
        is_right = isinstance(value, tuple(get_origin(each) or each for each in kinds))
        expected = " or ".join("None" if each is NoneType else each.__name__ for each in kinds)
    if not is_right:
        shown = _shown(value) if is_shown else type(value).__name__
        raise ConfigurationError(f"expected {expected} as {name}, got {shown}")
    return value


def check_duration(name: str, value: object, at_least: timedelta = timedelta.resolution) -> timedelta:
    """Refuse anything but a ``timedelta`` of at least ``at_least``.

    Raises:
        ConfigurationError: The value is invalid; the message names it ``name``.
    """
    if not isinstance(value, timedelta):
        raise ConfigurationError(f"expected a datetime.timedelta as {name}, got {_shown(value)}")
    if value < at_least:
        kind = "positive" if at_least else "not negative"
        raise ConfigurationError(f"expected a {name} that is {kind}, got {value}")
    return value


def check_number(name: str, value: object, at_least: int = 1, at_most: int | None = None) -> int:
    """Refuse anything but a whole number within the bounds, and return it as an ``int``.

    Raises:
        ConfigurationError: The value is invalid; the message names it ``name``.
    """
    try:
        # Integers of numpy and torch are valid, too.
        number = index(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        raise ConfigurationError(f"expected a whole number as {name}, got {_shown(value)}")
    if number < at_least:
        raise ConfigurationError(f"expected {name} of at least {at_least}, got {number}")
    if at_most is not None and number > at_most:
        raise ConfigurationError(f"expected {name} of at most {at_most}, got {number}")
    return number


def check_rate(name: str, value: object) -> float:
    """Refuse anything but a positive number; infinity is one.

    Raises:
        ConfigurationError: The value is invalid; the message names it ``name``.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ConfigurationError(f"expected a positive number as {name}, got {_shown(value)}")
    return value


def check_function(name: str, value: object) -> object:
    """Refuse anything that cannot be called.

    Raises:
        ConfigurationError: The value is invalid; the message names it ``name``.
    """
    if not callable(value):
        raise ConfigurationError(f"expected a function as {name}, got {_shown(value)}")
    return value


_CHECKS: Final[Mapping[Any, Callable[..., object]]] = {
    int: check_number,
    float: check_rate,
    timedelta: check_duration,
    Callable: check_function,
}


def _shown(value: object) -> str:
    return f"{type(value).__name__} {value!r}"[:200]
