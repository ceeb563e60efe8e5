"""A real Prometheus, Debian's package, on the loopback."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

_LONG_S = 60.0

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")


@dataclass
class Prometheus:
    """Where it answers."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What its API answers (https://prometheus.io/docs/prometheus/latest/querying/api/)."""
        with urlopen(f"{self.url}/api/v1/query?{urlencode({'query': expression})}", timeout=_LONG_S) as answer:
            decoded = json.load(answer)
        assert decoded["status"] == "success", decoded
        return list(decoded["data"]["result"])

    def values(self, expression: str, label: str) -> dict[str, float]:
        """The numbers of an expression, by one of their labels."""
        return {each["metric"].get(label, ""): float(each["value"][1]) for each in self.query(expression)}

    def targets(self) -> list[dict[str, Any]]:
        """Whom it scrapes, and how that went last."""
        with urlopen(f"{self.url}/api/v1/targets?state=active", timeout=_LONG_S) as answer:
            return list(json.load(answer)["data"]["activeTargets"])


@contextmanager
def prometheus(directory: Path, scrape_configs: Sequence[dict[str, Any]]) -> Iterator[Prometheus]:
    """Scrapes every second until the end.

    Args:
        directory: For its files.
        scrape_configs: Of its configuration, where it looks a target up.
    """
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    configuration = directory / "prometheus.yml"
    configuration.write_text(
        yaml.safe_dump(
            {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [*scrape_configs]}
        )
    )
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={configuration}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ],
            cwd=directory,
            stdout=log,
            stderr=log,
        )
        found = Prometheus(f"http://127.0.0.1:{port}")
        try:
            _wait_until_ready(found, process, directory / "prometheus.log")
            yield found
        finally:
            process.terminate()
            process.wait(_LONG_S)


def _wait_until_ready(found: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _LONG_S
    while True:
        try:
            with urlopen(f"{found.url}/-/ready", timeout=_LONG_S):
                return
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
