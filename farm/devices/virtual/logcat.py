"""`logcat` of a virtual device: `python -IS logcat.py FILE [-d] [-c] [-s] [-t COUNT|TIME] [-v threadtime] [TAG:P ...]`.

As far as Android's goes with one buffer, whose lines are a file in the form `threadtime`. Only the standard library.
"""

from __future__ import annotations

import getopt
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

_BANNER = "--------- beginning of main\n"
_PRIORITIES = "VDIWEFS"
_LINE = re.compile(r"(?P<time>\d\d-\d\d [\d:.]{12}) +\d+ +\d+ (?P<priority>[VDIWEF]) (?P<tag>.*?) *: .*\n")
_FOLLOW_SECONDS = 0.1


def _filters(specs: Sequence[str], *, silent: bool) -> dict[str, int]:
    """Return the least priority by tag of `TAG:PRIORITY` words, `*` for all other tags. Raises ValueError."""
    least = {"*": len(_PRIORITIES) - 1} if silent else {}
    for spec in specs:
        tag, _, priority = spec.partition(":")
        letter = priority.upper() or ("D" if tag == "*" else "V")
        if letter not in _PRIORITIES:
            raise ValueError(f"Invalid filter expression '{spec}'")
        least[tag] = _PRIORITIES.index(letter)
    return least


def _shown(lines: Iterable[str], least: Mapping[str, int], since: str) -> list[str]:
    """Return the selected lines."""
    shown = []
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is not None and found["time"] >= since:
            wanted = least.get(found["tag"], least.get("*", 0))
            shown += [line] if _PRIORITIES.index(found["priority"]) >= wanted else []
    return shown


def main(path: str, words: Sequence[str]) -> int:
    """Show the log in the file `path` as the `words` want it. Return the exit code."""
    try:
        options, specs = getopt.gnu_getopt(list(words), "dcsv:t:")
        chosen = dict(options)
        if (form := chosen.get("-v", "threadtime")) != "threadtime":
            raise ValueError(f'Invalid parameter "{form}" to -v')
        least, last = _filters(specs, silent="-s" in chosen), chosen.get("-t", "")
        since = "" if last.isdigit() else last
        with open(path, "w" if "-c" in chosen else "r", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            if "-c" in chosen:
                return 0
            lines = _shown(iter(file.readline, ""), least, since)
            lines = lines[-int(last) :] if last.isdigit() else lines
            sys.stdout.write("".join([_BANNER, *lines] if lines else []))
            while not {"-d", "-t"} & chosen.keys():
                sys.stdout.flush()
                time.sleep(_FOLLOW_SECONDS)
                sys.stdout.write("".join(_shown(iter(file.readline, ""), least, since)))
    except (getopt.GetoptError, ValueError, OSError) as error:
        sys.stderr.write(f"logcat: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
