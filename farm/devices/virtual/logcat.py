"""`logcat` of a virtual device, a program of its own: `python -IS logcat.py FILE [-d] [-c] [-t N] [-v FORMAT] ...`.

As far as Android's goes with one buffer, `main`, whose lines are a file in the form `threadtime`; the others are empty.
Only the standard library.
"""

from __future__ import annotations

import getopt
import os
import re
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TextIO

_BANNER = b"--------- beginning of main\n"
_LONG = ["pid=", "regex=", "format=", "dump", "clear", "binary", "buffer="]
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
_BUFFERS = {"main", "default", "all"}
_EMPTY_BUFFERS = {"system", "crash", "radio", "events", "security", "kernel", "stats"}
# struct logger_entry of AOSP's liblog: sizes of text and header, pid, tid, seconds, nanoseconds, buffer and user.
_ENTRY = struct.Struct("<HHiIIIII")
_SHELL_USER = 2000
# android_LogPriority of liblog begins with two that no message has.
_FIRST_PRIORITY = 2


class _LogView(NamedTuple):
    """Selection and form of printed log lines."""

    shape: Callable[[dict[str, str]], bytes]
    """Formatter of a line from its fields."""
    least: dict[str, int]
    """Least priority as a number by tag; `*` for all other tags."""
    since: str = ""
    pattern: str = ""
    pid: str = ""

    def shown(self, lines: Iterable[str]) -> list[bytes]:
        """Return the selected `lines`, formatted."""
        shown = []
        for line in lines:
            found = _LINE.fullmatch(line.rstrip("\n"))
            if found is None or (self.since and found["time"] < self.since) or (self.pid not in {"", found["pid"]}):
                continue
            least = self.least.get(found["tag"], self.least.get("*", 0))
            if _PRIORITIES.index(found["priority"]) >= least and re.search(self.pattern, found["text"]):
                shown.append(self.shape(found.groupdict()))
        return shown


def _text(template: str) -> Callable[[dict[str, str]], bytes]:
    return lambda fields: f"{template.format(**fields)}\n".encode()


def _binary(fields: dict[str, str]) -> bytes:
    """Return a line as it is in the buffer. Its year is this one: lines do not have theirs."""
    moment, _, milliseconds = fields["time"].partition(".")
    year = time.localtime().tm_year
    seconds = int(time.mktime(time.strptime(f"{year}-{moment}", "%Y-%m-%d %H:%M:%S")))
    priority = _PRIORITIES.index(fields["priority"]) + _FIRST_PRIORITY
    text = bytes([priority]) + f"{fields['tag']}\0{fields['text']}\0".encode()
    numbers = int(fields["pid"]), int(fields["tid"]), seconds, int(milliseconds) * 1_000_000
    return _ENTRY.pack(len(text), _ENTRY.size, *numbers, 0, _SHELL_USER) + text


def _names_main(names: str) -> bool:
    """Tell whether `main` is among the buffers that are asked for. Raises ValueError."""
    asked = names.split(",")
    for name in asked:
        if name not in _BUFFERS | _EMPTY_BUFFERS:
            raise ValueError(f"Unknown buffer '{name}'")
    return not _BUFFERS.isdisjoint(asked)


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


def _show(lines: list[bytes]) -> None:
    sys.stdout.buffer.write(b"".join(lines))
    sys.stdout.buffer.flush()


def _follow(file: TextIO, wanted: _LogView) -> None:
    """Show new lines until the reader closes the stream."""
    while True:
        _show(wanted.shown(iter(file.readline, "")))
        time.sleep(_FOLLOW_SECONDS)


def main(path: str, words: Sequence[str]) -> int:
    """Show the log in the file `path` as the `words` want it. Return the exit code."""
    try:
        options, specs = getopt.gnu_getopt(list(words), "Bdcsv:t:T:b:e:", _LONG)
        chosen = dict(options)
        form = chosen.get("-v", chosen.get("--format", "threadtime"))
        if form not in _FORMATS:
            raise ValueError(f'Invalid parameter "{form}" to -v')
        is_binary = not {"-B", "--binary"}.isdisjoint(chosen)
        last = chosen.get("-t", chosen.get("-T", ""))
        wanted = _LogView(
            _binary if is_binary else _text(_FORMATS[form]),
            _filters(specs, silent="-s" in chosen),
            "" if last.isdigit() else last,
            chosen.get("-e", chosen.get("--regex", "")),
            chosen.get("--pid", ""),
        )
        buffers = [value for name, value in options if name in {"-b", "--buffer"}] or ["default"]
        has_main = True in [_names_main(names) for names in buffers]
        with open(path if has_main else os.devnull, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            if {"-c", "--clear"} & chosen.keys():
                with open(file.name, "w", encoding="utf-8"):  # noqa: PTH123
                    return 0
            lines = wanted.shown(iter(file.readline, ""))
            lines = lines[-int(last) :] if last.isdigit() else lines
            _show([*([] if is_binary else [_BANNER]), *lines] if lines else [])
            if not {"-d", "--dump", "-t"} & chosen.keys():
                _follow(file, wanted)
    except (getopt.GetoptError, ValueError, re.error, OSError) as error:
        sys.stderr.write(f"logcat: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
