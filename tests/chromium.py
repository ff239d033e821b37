"""Debian's Chromium, headless, for tests that look at pages as a reader does.

Pages are kept as screenshots, for people to look at: in $FARM_TEST_SCREENSHOTS, or beside pytest's temporary folders.
"""

from __future__ import annotations

import base64
import os
import re
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
# Now: a test has no variable of farm's.
SCREENSHOTS = os.environ.get("FARM_TEST_SCREENSHOTS", "")


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


def keep_screenshot(browser: WebDriver, folder: Path, name: str) -> None:
    """Write the whole page, up to 5,000 pixels of it, as a PNG file."""
    width, height = browser.execute_script("return [innerWidth, document.documentElement.scrollHeight]")
    # What is beyond the window may not be drawn yet.
    metrics = {"width": width, "height": min(height, 5000), "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    folder = Path(SCREENSHOTS) if SCREENSHOTS else folder / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    (folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.png").write_bytes(base64.b64decode(shot))


def flaws(browser: WebDriver) -> list[str]:
    """Return what is wrong with how the page is laid out.

    That is a table whose head or cells are not above and below each other, text on other text, and what is wider than
    the page.
    """
    found: list[str] = browser.execute_script(_FLAWS)
    return found


_FLAWS = r"""
// Where a bar that stays is above what follows it.
scrollTo(0, 0);
const found = [], name = (e) => `${e.tagName.toLowerCase()}${e.id ? "#" + e.id : ""}${[...e.classList].map(c => "." + c).join("")}`;
const near = (a, b) => Math.abs(a - b) <= 2;
const shown = (e) => e.checkVisibility({checkOpacity: true, checkVisibilityCSS: true});

for (const table of document.querySelectorAll("table")) {
  if (!shown(table) || !table.tHead || !table.tBodies.length) continue;
  const head = table.tHead.rows[table.tHead.rows.length - 1];
  const row = [...table.tBodies].flatMap(b => [...b.rows]).find(r => shown(r) && [...r.cells].every(c => c.colSpan === 1) && r.cells.length === head.cells.length);
  if (!row) continue;
  const [top, below] = [head.getBoundingClientRect(), row.getBoundingClientRect()];
  if (top.bottom > below.top + 2) found.push(`${name(table)}: its head is beside its rows, or on them`);
  if ([...head.cells].every(c => c.colSpan === 1))
    [...head.cells].forEach((cell, n) => {
      const [a, b] = [cell.getBoundingClientRect(), row.cells[n].getBoundingClientRect()];
      if (!near(a.left, b.left) || !near(a.right, b.right)) found.push(`${name(table)}: '${cell.textContent.trim()}' is not above its column`);
    });
}

const page = document.documentElement;
if (page.scrollWidth > innerWidth) found.push(`the page is ${page.scrollWidth} wide, in ${innerWidth}`);

// What of a rectangle is seen: what scrolls or is hidden is cut.
const clipped = (r, e) => {
  let {left, top, right, bottom} = r;
  for (let at = e; at && at !== document.body; at = at.parentElement) {
    const style = getComputedStyle(at);
    if (style.overflowX === "visible" && style.overflowY === "visible") continue;
    const box = at.getBoundingClientRect();
    [left, top, right, bottom] = [Math.max(left, box.left), Math.max(top, box.top), Math.min(right, box.right), Math.min(bottom, box.bottom)];
  }
  return {left, top, right, bottom};
};
const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; (node = walker.nextNode()) && texts.length < 20000;) {
  const e = node.parentElement;
  if (!node.data.trim() || !shown(e) || e.closest("script, style, option, .skip")) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const rect of range.getClientRects()) {
    const r = clipped(rect, e);
    if (r.right - r.left > 3 && r.bottom - r.top > 3) texts.push({...r, node, text: node.data.trim().slice(0, 40)});
  }
}
for (const one of texts)
  if (one.right > innerWidth + 1 || one.left < -1) found.push(`'${one.text}' reaches beyond the page`);
texts.sort((a, b) => a.top - b.top);
texts.forEach((one, n) => {
  for (let m = n + 1; m < texts.length && texts[m].top < one.bottom - 3; m++) {
    const other = texts[m];
    // Lines of one text are as close as its style has them.
    if (other.node === one.node || found.length > 20) continue;
    const across = Math.min(one.right, other.right) - Math.max(one.left, other.left);
    const down = Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top);
    if (across > 3 && down > 5) found.push(`'${one.text}' and '${other.text}' are on each other`);
  }
});
return found;
"""  # noqa: E501
