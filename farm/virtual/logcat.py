"""`logcat` of a virtual device, a program of its own: `python -IS logcat.py FILE [-d] [-c] [-t N] [-v FORMAT] ...`.

As far as Android's goes with one buffer whose lines are a file in the form `threadtime`. Only the standard library.
"""

from __future__ import annotations

import getopt
import re
import sys
import time
from typing import TYPE_CHECKING, NamedTuple, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_BANNER = "--------- beginning of main"
_PRIORITIES = "VDIWEFS"
_LINE = re.compile(
    r"(?P<time>\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) +(?P<pid>\d+) +(?P<tid>\d+) (?P<priority>[VDIWEF]) (?P<tag>.*?) *: "
    r"(?P<text>.*)"
)
_FORMATS = {
    "threadtime": "{time} {pid:>5} {tid:>5} {priority} {tag:<8}: {text}",
    "time": "{time} {priority}/{tag:<8}({pid:>5}): {text}",
    "brief": "{priority}/{tag:<8}({pid:>5}): {text}",
    "tag": "{priority}/{tag:<8}: {text}",
    "process": "{priority}({pid:>5}) {text}  ({tag})",
    "raw": "{text}",
}
_FOLLOW_SECONDS = 0.1


class _LogView(NamedTuple):
    """What is printed of a log."""

    template: str
    least: dict[str, int]
    """By tag, the number of the least priority; `*` for all others."""
    since: str = ""
    pattern: str = ""
    pid: str = ""

    def shown(self, lines: Iterable[str]) -> list[str]:
        """Return `lines` in the form that is wanted, without those that are not."""
        shown = []
        for line in lines:
            found = _LINE.fullmatch(line.rstrip("\n"))
            if found is None or (self.since and found["time"] < self.since) or (self.pid not in {"", found["pid"]}):
                continue
            least = self.least.get(found["tag"], self.least.get("*", 0))
            if _PRIORITIES.index(found["priority"]) >= least and re.search(self.pattern, found["text"]):
                shown.append(self.template.format(**found.groupdict()))
        return shown


def _filters(specs: Sequence[str], *, silent: bool) -> dict[str, int]:
    """Return the least priority by tag of `TAG:PRIORITY` words. Raises ValueError."""
    least = {"*": len(_PRIORITIES) - 1} if silent else {}
    for spec in specs:
        tag, _, priority = spec.partition(":")
        letter = priority.upper() or ("D" if tag == "*" else "V")
        if letter not in _PRIORITIES:
            raise ValueError(f"Invalid filter expression '{spec}'")
        least[tag] = _PRIORITIES.index(letter)
    return least


def _show(lines: list[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _follow(file: TextIO, wanted: _LogView) -> None:
    """Show what comes, until whoever reads it hangs up."""
    while True:
        _show(wanted.shown(iter(file.readline, "")))
        time.sleep(_FOLLOW_SECONDS)


def main(path: str, words: Sequence[str]) -> int:
    """Show the log in the file `path` as the `words` want it. Return the exit code."""
    try:
        options, specs = getopt.gnu_getopt(list(words), "dcsv:t:T:b:e:", ["pid=", "regex=", "format=", "dump", "clear"])
        chosen = dict(options)
        form = chosen.get("-v", chosen.get("--format", "threadtime"))
        if form not in _FORMATS:
            raise ValueError(f'Invalid parameter "{form}" to -v')
        last = chosen.get("-t", chosen.get("-T", ""))
        wanted = _LogView(
            _FORMATS[form],
            _filters(specs, silent="-s" in chosen),
            "" if last.isdigit() else last,
            chosen.get("-e", chosen.get("--regex", "")),
            chosen.get("--pid", ""),
        )
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            if {"-c", "--clear"} & chosen.keys():
                with open(path, "w", encoding="utf-8"):  # noqa: PTH123
                    return 0
            lines = wanted.shown(iter(file.readline, ""))
            lines = lines[-int(last) :] if last.isdigit() else lines
            _show([_BANNER, *lines] if lines else [])
            if not {"-d", "--dump", "-t"} & chosen.keys():
                _follow(file, wanted)
    except (getopt.GetoptError, ValueError, re.error, OSError) as error:
        sys.stderr.write(f"logcat: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
