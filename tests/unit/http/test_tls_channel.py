"""TLS apart from sockets: what is a refusal, and what was changed on its way."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from certificates import HOST, issue

from ft_transport.credentials import Certificates
from ft_transport.http.tls_channel import TLSBrokenError, TLSChannel, TLSRefusedError

REQUEST: Final = b"GET /status HTTP/1.1\r\n\r\n"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(issue(Path(tmp_path_factory.mktemp("certificates")) / "peer").files)


class Ends:
    """Both ends of a connection, and a wire that changes one byte of what one of them sends."""

    def __init__(self, certificates: Certificates, changed: tuple[str, int] | None = None) -> None:
        self.client = TLSChannel(certificates.for_client(), server_hostname=HOST)
        self.server = TLSChannel(certificates.for_server(), server_hostname=None)
        self.changed = changed
        self.num_sent = {"client": 0, "server": 0}
        self.errors: dict[str, Exception] = {}
        self.received = bytearray()

    def run(self) -> Ends:
        """Shakes hands and sends a request, as far as that goes."""
        is_done = {"client": False, "server": False}
        for _ in range(6):
            for name, own, other in (
                ("client", self.client, self.server),
                ("server", self.server, self.client),
            ):
                if name not in self.errors:
                    try:
                        if not is_done[name]:
                            is_done[name] = own.shake_hands()
                            if is_done[name] and own is self.client:
                                own.write(REQUEST)
                        if is_done[name]:
                            self._read(own)
                    except (TLSBrokenError, TLSRefusedError) as error:
                        self.errors[name] = error
                self._move(name, own, other)
        return self

    def _read(self, channel: TLSChannel) -> None:
        view = memoryview(bytearray(1000))
        while got := channel.read_into(view):
            self.received += view[:got]

    def _move(self, name: str, sender: TLSChannel, receiver: TLSChannel) -> None:
        data = bytearray(sender.take())
        if self.changed is not None and self.changed[0] == name:
            at = self.changed[1] - self.num_sent[name]
            if 0 <= at < len(data):
                data[at] ^= 0xFF
        self.num_sent[name] += len(data)
        receiver.feed(data)


def test_both_ends_understand_each_other(certificates: Certificates) -> None:
    ends = Ends(certificates).run()
    assert (ends.errors, bytes(ends.received)) == ({}, REQUEST)


@pytest.mark.parametrize("sender", ["client", "server"])
def test_a_byte_changed_in_the_handshake_is_no_refusal(certificates: Certificates, sender: str) -> None:
    """A refusal ends a recovery; damage is tried again."""
    num_bytes = Ends(certificates).run().num_sent[sender]
    num_noticed = 0
    for at in [*range(50), *range(50, num_bytes, 29)]:
        ends = Ends(certificates, (sender, at)).run()
        # Nothing but the version that stands before a record goes unseen, or else the request does not arrive.
        assert bytes(ends.received) in (b"", REQUEST)
        num_noticed += bool(ends.errors)
        assert not isinstance(ends.errors.get("client"), TLSRefusedError), (at, ends.errors)
    assert num_noticed > 50


@pytest.mark.parametrize("text", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"HEAD / HTTP/1.1"])
def test_http_in_the_clear_is_a_refusal(certificates: Certificates, text: bytes) -> None:
    for channel in (
        TLSChannel(certificates.for_client(), server_hostname=HOST),
        TLSChannel(certificates.for_server(), server_hostname=None),
    ):
        channel.feed(text[:2])
        assert not channel.shake_hands()
        channel.feed(text[2:])
        with pytest.raises(TLSRefusedError, match="speaks plain HTTP"):
            channel.shake_hands()


@pytest.mark.parametrize("host", ["", ".example", "a" * 300])
def test_a_host_that_no_certificate_can_name_is_a_refusal(certificates: Certificates, host: str) -> None:
    with pytest.raises(TLSRefusedError, match="host"):
        TLSChannel(certificates.for_client(), server_hostname=host)
