"""Debian's Chromium, headless, for tests that look at pages as a reader does.

$FARM_TEST_SCREENSHOTS names a folder for a picture of every page. A page with flaws gets its picture in any case,
beside pytest's temporary folders.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from functools import cache
from importlib.resources import files
from pathlib import Path

import pytest
from parts import do_without
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
    """Return a new browser, which the caller ends with `quit`. Skips the test without Chromium."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        reason = "chromium and chromedriver are not on PATH (Debian: apt-get install chromium chromium-driver)"
        do_without(reason, "FARM_REQUIRE_CHROMIUM")
    options = Options()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def see(browser: WebDriver, *, scheme: str = "light", width: int = 1280, height: int = 1000) -> None:
    """Set the colour scheme and the window of the system; the page in it stays and follows."""
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def look(browser: WebDriver, page: Path, fragment: str = "", *, scheme: str = "light", width: int = 1280) -> None:
    """Open a page with this color scheme and width of the window."""
    see(browser, scheme=scheme, width=width)
    assert page.is_file(), f"{page} is gone: something removes temporary folders that are in use"
    if fragment:
        # A fragment of the page that is open already would load nothing.
        browser.get("about:blank")
    browser.get(f"{page.as_uri()}{fragment}")


def requested(browser: WebDriver) -> list[str]:
    """Return the addresses of all requests since the last call, except `chrome:`, the scheme of Chromium itself."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    return [url for url in urls if not url.startswith("chrome:")]


def keep_screenshot(browser: WebDriver, folder: Path, name: str, *, flawed: bool = False) -> None:
    """Write the page, up to 5,000 pixels of it, as a PNG file.

    Without FARM_TEST_SCREENSHOTS, only a `flawed` page gets a picture.
    """
    if not SCREENSHOTS and not flawed:
        return
    width, height = browser.execute_script("return [innerWidth, document.documentElement.scrollHeight]")
    # Parts beyond the window may not be drawn yet.
    see_height = {"width": width, "height": min(height, 5000), "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", see_height)
    folder = Path(SCREENSHOTS) if SCREENSHOTS else folder / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    (folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.png").write_bytes(base64.b64decode(shot))


@cache
def _axe() -> str:
    package = pytest.importorskip("selenium_axe_python", reason="pip install -e .[dev]")
    return files(package).joinpath("axe-core", "axe.min.js").read_text(encoding="utf-8")


def violations(browser: WebDriver) -> list[str]:
    """Return the serious and critical findings of axe in the page as it is."""
    if not browser.execute_script("return 'axe' in window"):
        browser.execute_script(_axe())
    found: list[str] = browser.execute_async_script(_VIOLATIONS)
    return [one for one in found if one.startswith(("serious", "critical"))]


_VIOLATIONS = r"""
const done = arguments[arguments.length - 1], where = (node) => `${node.target} ${node.failureSummary}`;
axe.run(document, {resultTypes: ["violations"]}).then(
  (found) => done(found.violations.map((v) => `${v.impact} ${v.id}: ${v.nodes.slice(0, 3).map(where).join(" | ")}`)),
  (error) => done([`critical axe: ${error}`]));
"""


def flaws(browser: WebDriver) -> list[str]:
    """Return the layout errors of the page.

    Errors are a table whose head and cells are not aligned, text on other text, and elements wider than the page.
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
// A narrow window shows a wider page at a smaller scale, with a greater innerWidth.
if (page.scrollWidth > page.clientWidth) found.push(`the page is ${page.scrollWidth} wide, in ${page.clientWidth}`);

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
const named = e => [e.parentElement, e].map(one => one.tagName.toLowerCase() + (one.className && "." + one.className)).join(" ");
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
  if (one.right > page.clientWidth + 1 || one.left < -1) found.push(`'${one.text}' in ${named(one.node.parentElement)} reaches beyond the page`);
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
