"""Debian's Chromium, headless, for tests that look at pages as a reader does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--window-size=1280,1000",
)  # fmt: skip


def start(profile: Path) -> WebDriver:
    """Return a browser of its own; whoever asks ends it with `quit`. Skips the test where there is none."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        reason = "chromium and chromedriver are not on PATH (Debian: apt-get install chromium chromium-driver)"
        if os.environ.get("FARM_REQUIRE_CHROMIUM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    options = Options()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def look(browser: WebDriver, page: Path, fragment: str = "", *, scheme: str = "light", width: int = 1280) -> None:
    """Open a page as one does who has set up the system so."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert page.is_file(), f"{page} is gone: something removes temporary folders that are in use"
    browser.get("about:blank")
    browser.get(f"{page.as_uri()}{fragment}")
