"""The page as it is sent: one file that loads nothing, and runs its own script alone."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from served_memory import serving

from ft_transport.http.page import load_page

FOREIGN = re.compile(rb"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:|//)|url\(|@import|innerHTML|outerHTML|eval\(""")


@pytest.mark.parametrize("path", ["/", "/job"])
def test_a_browser_may_do_nothing_but_show_it(path: str) -> None:
    with serving() as served:
        answer = served.ask(path)
        head = served.ask(path, "HEAD")

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


def test_it_loads_nothing_and_makes_no_element_of_text() -> None:
    assert FOREIGN.findall(load_page().body) == []
    assert b" style=" not in load_page().body
    assert not re.search(rb"\son[a-z]+\s*=", load_page().body.partition(b"<script>")[0])
