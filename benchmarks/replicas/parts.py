"""How long the parts of a replica's healing take, from public methods that note when they begin and end."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

ASK: Final = "the newcomer asks for quorums"
MANIFEST: Final = "manifest, with the source's snapshot"
TRANSFER: Final = "transfer"
LOAD: Final = "load"
COMPARE: Final = "compare"
MEET: Final = "process group is set up"
SERVE: Final = "source serves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that took a while, on the monotonic clock, which all processes of a machine share."""

    name: str
    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


class PartRecorder:
    """Notes the parts of one process. From any thread."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.parts.append(Part(name=name, began_s=began_s, ended_s=time.monotonic()))

    def wrap(self, owner: object, method: str, name: str) -> None:
        """Notes every call of ``owner.method``; a method that is not there is not noted."""
        function: Callable[..., Any] | None = getattr(owner, method, None)
        if function is None:
            return

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:
            with self.part(name):
                return function(*arguments, **keywords)

        setattr(owner, method, timed)


def record_ours(recorder: PartRecorder) -> None:
    """Notes what healing with our manager consists of. Before anything of it is made."""
    import ft_transport
    import manager
    from manager.quorum.membership import Membership

    recorder.wrap(Membership, "decide", ASK)
    recorder.wrap(manager.GlooProcessGroup, "configure", MEET)
    recorder.wrap(ft_transport.Received, "differences", COMPARE)
    _split_fetch(recorder)


def record_torchft(recorder: PartRecorder) -> None:
    """The same for torchft's."""
    from torchft.checkpointing.http_transport import HTTPTransport
    from torchft.process_group import ProcessGroupGloo

    recorder.wrap(ProcessGroupGloo, "configure", MEET)
    recorder.wrap(HTTPTransport, "send_checkpoint", SERVE)
    recorder.wrap(HTTPTransport, "recv_checkpoint", TRANSFER)


def _split_fetch(recorder: PartRecorder) -> None:
    """A fetch calls ``check`` when the manifest is there: it waits before the call, and bytes move after it."""
    from ft_transport import HTTPTransport

    fetch = HTTPTransport.fetch

    @functools.wraps(fetch)
    def timed(*arguments: Any, **keywords: Any) -> Any:
        began_s = manifest_s = time.monotonic()
        check = keywords.get("check")

        def noting(*checked: Any, **check_keywords: Any) -> None:
            nonlocal manifest_s
            manifest_s = time.monotonic()
            if check is not None:
                check(*checked, **check_keywords)

        try:
            return fetch(*arguments, **{**keywords, "check": noting})
        finally:
            recorder.parts.append(Part(name=MANIFEST, began_s=began_s, ended_s=manifest_s))
            recorder.parts.append(Part(name=TRANSFER, began_s=manifest_s, ended_s=time.monotonic()))

    HTTPTransport.fetch = timed  # type: ignore[method-assign]
