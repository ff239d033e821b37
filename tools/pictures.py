#!/usr/bin/env python3
"""Pictures of `farm serve` for the documentation, from demo data, by headless Chromium.

python tools/pictures.py [FOLDER]     default: docs; needs chromium, chromedriver and selenium
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import chromium  # noqa: E402 - it is beside the tests


def main() -> None:
    """Write a picture of the grid and of an alert."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    command = [sys.executable, "-m", "farm.cli.main", "serve", "--demo", "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT) as server:
        line = server.stdout.readline() if server.stdout else ""
        url = json.loads(line)["url"].rstrip("/")
        try:
            take(url, folder)
        finally:
            server.terminate()


def take(url: str, folder: Path) -> None:
    """Open the pages of a server and write their pictures."""
    with tempfile.TemporaryDirectory() as profile:
        browser = chromium.start(Path(profile))
        try:
            for name, path in (("grid", "/grid"), ("alert", "/alerts/1")):
                chromium.see(browser, width=1366, height=760)
                browser.get(f"{url}{path}")
                # Charts are drawn after the page is loaded.
                time.sleep(2)
                shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
                (folder / f"serve-{name}.png").write_bytes(base64.b64decode(shot))
        finally:
            browser.quit()


if __name__ == "__main__":
    main()
