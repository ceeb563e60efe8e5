"""The page as it is sent: one file that loads nothing, and runs its own script alone."""

from __future__ import annotations

import base64
import hashlib
import re
from contextlib import closing

import pytest
from served_memory import serving

from ft_transport.http.server.watch_routes import load_page
from ft_transport.wire.routes import WATCH_ROUTES

FOREIGN = re.compile(rb"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:|//)|url\(|@import|innerHTML|outerHTML|eval\(""")


def test_a_browser_may_do_nothing_but_show_it() -> None:
    with serving() as served:
        answer = served.ask("/")
        head = served.ask("/", "HEAD")

    assert answer.status == 200
    assert head.headers["Content-Length"] == str(len(answer.body))
    headers = answer.headers
    policy = dict(each.strip().partition(" ")[::2] for each in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    for element in ("style", "script"):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>".encode(), answer.body, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert policy[f"{element}-src"] == f"'sha256-{digest}'"
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_of_another_site_may_lead_here_and_no_more(site: str) -> None:
    with serving() as served, closing(served.connect()) as http:
        for path in WATCH_ROUTES:
            for mode, destination, status in (
                ("no-cors", "image", 403),
                ("cors", "empty", 403),
                ("navigate", "iframe", 403),
                ("navigate", "document", 200),
            ):
                headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": destination}
                http.request("GET", path, headers=headers)
                response = http.getresponse()
                response.read()
                assert response.status == status
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert response.headers["X-Content-Type-Options"] == "nosniff"


def test_its_own_page_is_answered() -> None:
    with serving() as served:
        headers = {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}
        assert served.ask("/state", **headers).status == 200
        assert served.ask("/", Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate").status == 200


def test_it_loads_nothing_and_makes_no_element_of_text() -> None:
    body, _ = load_page()
    assert FOREIGN.findall(body) == []
    assert not re.search(rb"<a\s", body)
    assert b" style=" not in body
    assert not re.search(rb"\son[a-z]+\s*=", body.partition(b"<script>")[0])
