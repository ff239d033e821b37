"""Prints the tables of docs/evidence/devices.md with the tests of each kind of device; `--write` updates the page.

    python tools/device_tables.py --write

Each entry is the outcome of a test that ran just now: tests/devices/test_device_commands.py, every script of farm
under the tools of each kind, and tests/devices/test_transport_contract.py, every promise of a transport over each way.
The column of a missing part (Android's adbd, dropbear) is marked as such. A call takes some three minutes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/evidence/devices.md"
_TESTS = {"commands": "test_device_commands.py", "contract": "test_transport_contract.py"}
_COLUMNS = {
    "commands": {"GNU": "GNU", "toybox": "toybox, mksh", "busybox": "busybox"},
    "contract": {
        "adb": "farm's adbd",
        "adbd": "Android's adbd",
        "ssh": "OpenSSH",
        "dropbear": "dropbear 2022.83",
        "newer_dropbear": "dropbear 2026",
        "local": "local",
    },
}
_NAME = re.compile(r"test_(?P<what>\w+)\[(?P<parameters>.+)\]")


def outcomes(file: str) -> dict[tuple[str, str], str]:
    """Return the outcome of each test, by its subject and its kind of device."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        words = ["-q", "-m", "whole or not whole", f"--junitxml={report}", str(ROOT / "tests/devices" / file)]
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False, stdout=sys.stderr)
        cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - pytest has just written it
    found: dict[tuple[str, str], str] = {}
    known = {column for columns in _COLUMNS.values() for column in columns}
    for case in cases:
        match = _NAME.fullmatch(case.get("name", ""))
        if match is None:
            continue
        [column, *_] = [one for one in re.split(r"-(?![a-z]*dropbear)", match["parameters"]) if one in known] or [""]
        kinds = {child.tag for child in case}
        word = "**fails**" if kinds & {"failure", "error"} else "not here" if "skipped" in kinds else "yes"
        key = match["what"].replace("_", " "), column
        # The worst outcome of several parameters counts.
        found[key] = word if found.get(key, "yes") == "yes" else found[key]
    return found


def table(name: str) -> str:
    """Return in Markdown a sentence of the tests that pass on every kind, and a table of the others."""
    columns, found = _COLUMNS[name], outcomes(_TESTS[name])
    rows = list(dict.fromkeys(what for what, column in found if column in columns))
    everywhere = [what for what in rows if all(found.get((what, one)) == "yes" for one in columns)]
    lines = [f"Passed on each of {', '.join(columns.values())}: {'; '.join(everywhere)}."]
    if rest := [what for what in rows if what not in everywhere]:
        lines += ["", f"| | {' | '.join(columns.values())} |", f"|---|{'---|' * len(columns)}"]
        lines += [f"| {what} | {' | '.join(found.get((what, one), '') for one in columns)} |" for what in rest]
    return "\n".join(lines)


def main() -> None:
    """Make both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them into docs/evidence/devices.md")
    arguments = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    for name in _TESTS:
        made = table(name)
        sys.stdout.write(f"{made}\n\n")
        begin, end = f"<!-- {name}: made by tools/device_tables.py -->", f"<!-- end of {name} -->"
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{made}\n\n{end}{rest.split(end)[1]}"
    if arguments.write:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
