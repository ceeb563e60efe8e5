"""The settings of a transport, their defaults, and the checks of their values."""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from operator import index
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias, Union, get_args, get_origin

from ft_transport.credentials import Certificates, Keys, TLSFiles
from ft_transport.errors import ConfigurationError
from ft_transport.wire.chunks import CHUNK_BYTES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ANYONE_VARIABLE: Final = "FT_TRANSPORT_ALLOW_ANYONE"
"""Environment variable: 1 lets servers without a job token listen on addresses beyond the loopback."""


NotNegative: TypeAlias = Annotated[int, 0]


def default_num_threads() -> int:
    """Return the number of threads that saturate the memory bandwidth of common machines.

    More threads would only take cores from the training.
    """
    return min(8, os.cpu_count() or 1)


def _environment_allows_anyone() -> bool:
    value = os.environ.get(ANYONE_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ConfigurationError(f"expected 0 or 1 in {ANYONE_VARIABLE}, got {value[:100]!r}")
    return value == "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """Progress of a fetch.

    Attributes:
        done_bytes: Bytes received so far. They are verified, unless the source sends the digests after the data. In
            that case a damaged chunk is fetched a second time, and counted twice.
        total_bytes: Number of bytes of the whole fetch.
        elapsed_s: Seconds since the fetch began.
    """

    done_bytes: int
    total_bytes: int
    elapsed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the memory, the bandwidth and the time that peers may use.

    Attributes:
        max_snapshots: Maximum number of snapshots in memory at once. Each snapshot is as large as the state.
        max_clients: Maximum number of receivers to which the server sends data at once; ``None`` for any number. All
            connections from one address with the same replica name count as one receiver. Further receivers have to
            wait, and repeat their request each second.
        max_send_bytes_per_s: Maximum rate of all responses of the server together, which leaves the rest of the network
            to the training; ``None`` for no limit. With a limit, the server lends no memory to receivers on the same
            host (``same_host``). Allow more than ``min_bytes_per_s`` for each receiver; otherwise receivers give up
            their connections.
        stall_timeout: A receiver gives up a connection that delivers nothing for this long. A server cuts off a
            receiver that reads less than 4 MiB in this time, unless less is left to send. An attempt to connect takes
            at most 10 s, or this time if it is shorter.
        min_bytes_per_s: A receiver gives up a connection that delivers fewer bytes per second, so that a slow trickle
            of data cannot defeat the deadlines.
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
    """Settings of a transport that few users change.

    Attributes:
        host: Address on which the server listens. Default ``None``: with a job token all addresses, IPv4 and IPv6 (IPv4
            alone on hosts without IPv6); without a job token the loopback alone.
        port: Port on which the server listens; 0 for any free port.
        advertise: Host name, address or network interface that the server advertises to peers. Default: the value of
            the environment variable ``FT_TRANSPORT_ADVERTISE``, or else this host's name.
        replica: Name of this replica in ``/status``.
        token: The job token; two tokens separated by a space while one replaces the other. Peers prove to each other
            that they know the token, and never send it. Default: the environment variable ``FT_TRANSPORT_TOKEN``, or
            the content of the file that ``FT_TRANSPORT_TOKEN_FILE`` names. The process rereads a changed file. Without
            a token, peers are not authenticated.
        allow_anyone: Whether a server without a token listens beyond the loopback, so that every host of the network
            can read the weights. Default: whether the environment variable ``FT_TRANSPORT_ALLOW_ANYONE`` is 1.
        tls: The files with this process's certificate and with the authority for its peers' certificates. With them,
            the server and every fetch use only TLS, and both sides present a certificate. Default: the files that
            ``FT_TRANSPORT_TLS_CERT``, ``FT_TRANSPORT_TLS_KEY`` and ``FT_TRANSPORT_TLS_CA`` name, or no TLS.
        reached_at: Each ``host:port`` at which peers reach this server through address translation, such as a forwarded
            port. A peer rejects a server that it has reached at any other address than these and the server's own.
        verify: Whether a fetch compares received chunks with their digests. If not, nothing detects chunks that were
            changed on the way, even with a job token.
        same_host: Whether processes of the same user on one host lend each other memory instead of sending the data. A
            fetch verifies lent memory in the same way as data from the network.
        limits: Limits on the memory, the bandwidth and the time that peers may use.
        meshes: Device meshes for received DTensors that have no counterpart in the receiver's own state.
        on_progress: Called on a receiving thread after each received chunk.
        records: File to which each fetch, heal, save, load and publish appends one line of JSON. Default: the file that
            ``FT_TRANSPORT_RECORDS`` names, if it is set. `HTTPTransport.recorder` keeps the last 100 records in memory.
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
    """Maximum size of a chunk, in bytes. A chunk is the unit of fetch and of digest.

    A state of less than 256 such chunks is divided into smaller chunks, of at least 1 MiB, so that each of many
    receivers soon has a chunk to relay.
    """
    max_failures: ClassVar[int] = 4
    """Number of consecutive failures of a source after which a fetch stops using that source."""
    lease: ClassVar[timedelta] = timedelta(seconds=5)
    """How long the server keeps a snapshot for a connected receiver after the receiver's last request.

    After a response with data, the server keeps the snapshot for at least ``stall_timeout``, because the receiver may
    not have read all of the data yet.
    """
    contended_bytes_per_s: ClassVar[float] = 4 << 20
    """Minimum rate, in bytes per second, of receivers whose snapshot occupies memory that a newer snapshot needs.

    When the server first has to refuse the newer snapshot, the receivers of the oldest snapshot get ``lease`` plus the
    time that its bytes take at this rate. Then the server cuts them off, and they start again with a newer snapshot.
    """

    def __post_init__(self) -> None:
        check_fields(self)

    def keys(self) -> Keys | None:
        """Return the keys that are derived from the job token; ``None`` without a token.

        Raises:
            ConfigurationError: The token is invalid, or its file cannot be read.
        """
        return Keys.of(self.token) if self.token is not None else Keys.from_environment()

    def certificates(self) -> Certificates | None:
        """Return the certificates of this process; ``None`` without TLS.

        Raises:
            ConfigurationError: A file cannot be read, or the key does not match the certificate.
        """
        files = self.tls if self.tls is not None else TLSFiles.from_environment()
        return Certificates(files) if files is not None else None


def check_fields(settings: Any) -> None:
    """Check each field of a dataclass against its type, and convert integers of numpy and torch to ``int``.

    An ``int`` must be at least 1, and a ``timedelta`` must be positive, unless the type is ``Annotated`` with other
    bounds: a minimum, and perhaps a maximum. Fields whose type is in quotes are not checked. The message does not show
    the value of a field with ``repr=False``.

    Raises:
        ConfigurationError: A value is invalid; the message names the field, the expected value and the actual value.
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
    """Return the value if it is a ``timedelta`` of at least ``at_least``.

    Raises:
        ConfigurationError: The value is invalid; the message calls it ``name``.
    """
    if not isinstance(value, timedelta):
        raise ConfigurationError(f"expected a datetime.timedelta as {name}, got {_shown(value)}")
    if value < at_least:
        kind = "positive" if at_least else "not negative"
        raise ConfigurationError(f"expected a {name} that is {kind}, got {value}")
    return value


def check_number(name: str, value: object, at_least: int = 1, at_most: int | None = None) -> int:
    """Return the value as an ``int`` if it is a whole number within the bounds.

    Raises:
        ConfigurationError: The value is invalid; the message calls it ``name``.
    """
    try:
        # ``index`` also accepts the integers of numpy and torch.
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
    """Return the value if it is a positive number or infinity.

    Raises:
        ConfigurationError: The value is invalid; the message calls it ``name``.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ConfigurationError(f"expected a positive number as {name}, got {_shown(value)}")
    return value


def check_function(name: str, value: object) -> object:
    """Return the value if it can be called.

    Raises:
        ConfigurationError: The value is invalid; the message calls it ``name``.
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
