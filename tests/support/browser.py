"""Headless Chromium, as Debian packages it, with its driver; tests are skipped where it is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
DRIVER = shutil.which("chromedriver") or "/usr/bin/chromedriver"
needs_chromium = pytest.mark.skipif(
    not (Path(CHROMIUM).exists() and Path(DRIVER).exists()), reason="needs Debian's chromium and chromium-driver"
)


@contextmanager
def browser(profile: Path, *, width: int = 1280, dark: bool = False) -> Iterator[Any]:
    """A browser with a new profile; it asks no network but the pages that it is sent to."""
    from selenium import webdriver

    profile.mkdir()
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        resize(driver, width)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def complaints(driver: Any) -> list[str]:
    """What the page did wrong: errors of its script, and what its policy has refused."""
    return [entry["message"] for entry in driver.get_log("browser")]


def states(driver: Any) -> dict[str, str]:
    """The state of each replica on the page, by name."""
    script = (
        "return [...document.querySelectorAll('#replicas tr.row')].map((row) => [row.dataset.name, row.dataset.state])"
    )
    return dict(driver.execute_script(script))


def texts(driver: Any, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText)"
    return list(driver.execute_script(script, selector))
