"""The page for who watches: one file, which loads nothing and runs no script but its own."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from typing import Final

_NAME: Final = "page.html"
_STYLE: Final = re.compile(rb"<style>(.*?)</style>", re.DOTALL)
_SCRIPT: Final = re.compile(rb"<script>(.*?)</script>", re.DOTALL)

WATCH_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of all answers to who watches."""


@dataclass(frozen=True, slots=True)
class Page:
    """The page as it is sent.

    Attributes:
        body: HTML.
        headers: What a browser may do with it.
    """

    body: bytes
    headers: dict[str, str]


@functools.cache
def load_page() -> Page:
    """Reads the page, once in a process."""
    body = resources.files(__package__).joinpath(_NAME).read_bytes()
    policy = "; ".join(
        [
            "default-src 'none'",
            f"style-src {_hashes(_STYLE, body)}",
            f"script-src {_hashes(_SCRIPT, body)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )
    return Page(
        body,
        {
            **WATCH_HEADERS,
            "Content-Security-Policy": policy,
            "Content-Type": "text/html; charset=utf-8",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
            "X-Frame-Options": "DENY",
        },
    )


def _hashes(element: re.Pattern[bytes], body: bytes) -> str:
    """The contents of these elements, as a policy names them (Content Security Policy 3, section 2.3.1)."""
    digests = (hashlib.sha256(content).digest() for content in element.findall(body))
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
