"""Paths, parameters and headers of the HTTP protocol, spelled once for both sides.

GET, HEAD /checkpoint/{step}/full       the safetensors file; one byte range may be requested
GET       /checkpoint/{step}/metadata   its JSON header alone
POST      /checkpoint/{step}/slices     the parts of tensors that the body lists, see ``wire.slices``
GET       /checkpoint/{step}/digests    the digests, in the same form, if the header says "later" instead of them
GET       /checkpoint/{step}/memory     a ticket for the snapshot's memory, for receivers on this host
GET       /checkpoint/{step}/delta      the delta from this step to a later one, if it is cached: see ``wire.delta``
GET       /relay/{content}              chunks that a receiver has, or will have, as they land (``wire.relayed``)
GET       /status                       JSON: the served snapshots, and their numbers of readers
GET       /state                        JSON: the state of this process, see ``telemetry.told``
GET       /metrics                      the metrics of this process, as Prometheus reads them
GET       /                             a page for people, which shows ``/state`` as it changes
GET       /challenge                    begins a session of peers that know the job token: see ``wire.authentication``

``step`` is a number or ``latest``. ``?snapshot=ID`` binds a request to one snapshot (409 once it was replaced), and
``?wait=SECONDS`` bounds how long the request may wait for the step. The answer to a request for ``latest`` that ended
without a snapshot (503) has a number in ``FT-After``, which the next request repeats in ``?after=``: any snapshot begun
since the first request is then new enough, however long it takes. ``FT-Exchange-Digest``, in every answer, identifies
the request as the server read it: see ``wire.exchange_digest``.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias
from urllib.parse import urlencode

from ft_transport.wire.manifest import ContentId, SnapshotId

LATEST: Final = "latest"
StepSelector: TypeAlias = int | Literal["latest"]

FULL_ROUTE: Final = "/checkpoint/{step}/full"
METADATA_ROUTE: Final = "/checkpoint/{step}/metadata"
DIGESTS_ROUTE: Final = "/checkpoint/{step}/digests"
MEMORY_ROUTE: Final = "/checkpoint/{step}/memory"
SLICES_ROUTE: Final = "/checkpoint/{step}/slices"
DELTA_ROUTE: Final = "/checkpoint/{step}/delta"
RELAY_ROUTE: Final = "/relay/{content}"
STATUS_ROUTE: Final = "/status"
CHALLENGE_ROUTE: Final = "/challenge"
STATE_ROUTE: Final = "/state"
METRICS_ROUTE: Final = "/metrics"
PAGE_ROUTE: Final = "/"
WATCH_ROUTES: Final = frozenset({STATE_ROUTE, METRICS_ROUTE, PAGE_ROUTE})
"""The routes for people and their tools, which a watch token opens: see ``http.watch_access``."""

SNAPSHOT_PARAMETER: Final = "snapshot"
WAIT_PARAMETER: Final = "wait"
AFTER_PARAMETER: Final = "after"
RANGES_PARAMETER: Final = "ranges"
FOLLOW_PARAMETER: Final = "follow"
"""Longest pause, in seconds, of a relay that sends the chunks it has, and the rest as it lands. A longer pause closes
the connection."""
AFTER_HEADER: Final = "FT-After"
MANIFEST_DIGEST_HEADER: Final = "FT-Manifest-Digest"
REPLICA_HEADER: Final = "FT-Replica"
"""The receiver's replica name, used for the audit alone."""
SAME_HOST_HEADER: Final = "FT-Same-Host"
"""Names the socket where a receiver on the same host gets the snapshot's memory: see ``wire.same_host``."""
SERVED_STEPS_HEADER: Final = "FT-Served-Steps"

_MAX_STEP_DIGITS: Final = 18


def parse_step(text: str) -> StepSelector | None:
    """Return the step of a path, or ``None`` without one."""
    if text == LATEST:
        return "latest"
    if text.isascii() and text.isdigit() and len(text) <= _MAX_STEP_DIGITS:
        return int(text)
    return None


def metadata_path(step: StepSelector, *, wait_s: float, after: int | None = None) -> str:
    """Return path and query of a request for the manifest, which may wait ``wait_s`` seconds for the step."""
    query = {WAIT_PARAMETER: f"{wait_s:.3f}"}
    if after is not None:
        query[AFTER_PARAMETER] = str(after)
    return f"{METADATA_ROUTE.format(step=step)}?{urlencode(query)}"


def relay_path(content: ContentId, ranges: str, *, wait_s: float, follow_s: float) -> str:
    """Return path and query of a request for chunks, and the longest waits for the first and each other one."""
    query = {RANGES_PARAMETER: ranges, WAIT_PARAMETER: f"{wait_s:.3f}", FOLLOW_PARAMETER: f"{follow_s:.3f}"}
    return f"{RELAY_ROUTE.format(content=content)}?{urlencode(query, safe=',')}"


def parse_after(text: str | None) -> int | None:
    """Return the number in an ``FT-After`` header or an ``after`` parameter; ``None`` without one."""
    number = parse_step(text) if text is not None else None
    return number if isinstance(number, int) else None


def bound_path(route: str, step: int, snapshot_id: SnapshotId) -> str:
    """Return path and query of a route, bound to one snapshot."""
    return f"{route.format(step=step)}?{urlencode({SNAPSHOT_PARAMETER: snapshot_id})}"


def parse_served_steps(text: str | None) -> tuple[int, ...]:
    """Return the steps of a ``FT-Served-Steps`` header; anything but numbers is left out."""
    if not text:
        return ()
    steps = (parse_step(item.strip()) for item in text[:4096].split(","))
    return tuple(step for step in steps if isinstance(step, int))
