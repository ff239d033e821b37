"""Answers for programs stay the same, byte for byte: `--json`, exports, and the JSON of `farm serve`, of one store.

`golden/store.sql` is a small store of farm 0.2.0. Its last night has every outcome: passed, failed, infra, skipped, a
known issue, a failed build, a crash, a flaky job, attempts `[failed, infra]` and the other way round. Eight nights
before it are the history. Other runs add one shape each: killed, without an end, skipped jobs, both kinds of device,
`farm debug`, `farm exec`, `farm pytest`, `farm jobs rerun`, a detailed profile. Alerts, remarks, devices and leases are
there in every state. farm migrates the store, and `golden/commands.py` runs every command over it in one process.

Write the answers anew with this command, for an intended change that CHANGELOG.md names:

    WRITE_GOLDEN=1 .venv/bin/python -m pytest tests/test_same_json.py

`golden/answers` has one file per command. `_layout` writes JSON in few rows: an item of a list after the first shows,
behind `...`, only the members that differ from the item before it, and 64 hexadecimal digits show their first and last.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from programs import run_program

from farm.store.store import open_store

_GOLDEN = Path(__file__).with_name("golden")
_ANSWERS = _GOLDEN / "answers"
_WIDTH = 120
# Answers about suites and whole stores have thousands of rows: a hash stands for the end of each.
_MOST_ROWS = {
    "farm jobs coverage": 9,
    "farm suites": 9,
    "farm data export --format jsonl": 80,
    "farm data export --since": 4,
    "farm data export --all": 4,
}
# Indents of `msgspec.json.format`.
_FORMS = {"indented by 2": 2, "indented by 1": 1, "in one line": -1, "in one line with spaces": 0}
_HASH = re.compile(r'"([0-9a-f]{8})[0-9a-f]{52}([0-9a-f]{4})"')


def test_every_command_and_page_answers_as_before(tmp_path: Path) -> None:
    state = tmp_path / "golden" / "state"
    state.mkdir(parents=True)
    connection = sqlite3.connect(state / "farm.db")
    connection.executescript((_GOLDEN / "store.sql").read_text(encoding="utf-8"))
    connection.close()
    # Commands that only read leave an older store alone: the first command that writes migrates it.
    open_store(state / "farm.db").close()
    done = run_program([sys.executable, str(_GOLDEN / "commands.py"), str(state.parent)], timeout_s=120)
    answers = json.loads(done.stdout)
    found = _files(answers)
    if os.environ.get("WRITE_GOLDEN"):
        for old in _ANSWERS.glob("*.txt"):
            old.unlink()
        for name, text in found.items():
            (_ANSWERS / name).write_text(text, encoding="utf-8")
        return
    expected = {file.name: file.read_text(encoding="utf-8") for file in _ANSWERS.glob("*.txt")}
    assert sorted(found) == sorted(expected)
    changes = []
    for name, text in found.items():
        changes += list(
            difflib.unified_diff(expected[name].split("\n"), text.split("\n"), name, name, n=2, lineterm="")
        )
    if changes:
        (tmp_path / "answers.json").write_text(done.stdout, encoding="utf-8")
        notes = [f"{a['asked']}: {a['notes'][-300:]}" for a in answers if a["code"] not in (0, 200)]
        raise AssertionError("\n".join(["other answers than before:", *changes[:200], *notes]))


def _files(answers: list[dict[str, Any]]) -> dict[str, str]:
    """Return the text of each file; an answer that another command gave before is only named."""
    files: dict[str, list[str]] = {}
    commands: dict[str, str] = {}
    earlier: dict[str, list[str]] = {}
    for answer in answers:
        asked, wrote = answer["asked"], answer["wrote"]
        form, rows = _layout(wrote)
        shown = _shortened(
            rows, next((most for words, most in _MOST_ROWS.items() if asked.startswith(words)), len(rows))
        )
        if asked in earlier:
            shown = [row for row in difflib.unified_diff(earlier[asked], rows, n=0, lineterm="") if row[:2] != "@@"]
            shown[:2] = ["the answer of before, but for these rows:" if shown else "the answer of before"]
        elif commands.setdefault(wrote.strip(), asked) != asked and len(rows) > 1:
            shown = [f"the answer of {commands[wrote.strip()]}"]
        earlier[asked] = rows
        file = files.setdefault(re.sub(r"\W+", "_", answer["group"]) + ".txt", [])
        file += [f"$ {asked}  # {answer['code']}, {form}", *shown]
    return {name: "".join(f"{row}\n" for row in rows) for name, rows in files.items()}


def _shortened(rows: list[str], most: int) -> list[str]:
    if len(rows) <= most:
        return rows
    digest = hashlib.sha256("\n".join(rows[most:]).encode()).hexdigest()
    return [*rows[:most], f"{len(rows) - most} rows more with the SHA-256 {digest}"]


def _layout(wrote: str) -> tuple[str, list[str]]:
    """Return the form of an answer, whose bytes follow from the form and the lines, and the lines."""
    end = "\n" * wrote.endswith("\n")
    lines = wrote.removesuffix("\n").split("\n")
    documents = lines if "\n{" in wrote else ["\n".join(lines)]
    ending = "" if end else ", without an end"
    with contextlib.suppress(msgspec.DecodeError):
        values = [msgspec.json.decode(document) for document in documents]
        for form, indent in _FORMS.items():
            if "\n".join(msgspec.json.format(_dumps(value), indent=indent) for value in values) + end == wrote:
                count = f", {len(documents)} documents" if len(documents) > 1 else ""
                return f"JSON {form}{count}{ending}", _rows(values if count else values[0])
    return f"text{ending}", _text_rows([line.replace("\r", "\\r") for line in lines])


def _text_rows(lines: list[str]) -> list[str]:
    """Return the lines of a text; elements of XML that follow an element with the same indent share a row."""
    rows: list[str] = []
    before = -1
    for line in lines:
        element = line.lstrip(" ")
        indent = len(line) - len(element)
        same = indent == before and element.startswith("<") and element.endswith("/>")
        if same and len(rows[-1]) + 1 + len(element) <= _WIDTH:
            rows[-1] += f" {element}"
        else:
            rows.append(line)
        before = indent
    return rows


def _rows(value: Any, lead: str = "", depth: int = 0) -> list[str]:
    """Return the rows of a value: members that fit share a row, longer ones begin rows of their own."""
    margin = " " * depth
    whole = margin + lead + _short(value)
    if len(whole) <= _WIDTH or not isinstance(value, dict | list):
        return [whole]
    rows = [f"{margin}{lead}{'{' if isinstance(value, dict) else '['}"]
    fresh = False
    for name, member in _members(value):
        text = name + _short(member)
        if not fresh and len(rows[-1]) + len(text) + 2 <= _WIDTH:
            rows[-1] += (" " if rows[-1][-1] in "{[" else ", ") + text
        else:
            more = _rows(member, name, depth + 1)
            rows += more
            # A member of many rows shares none with the next.
            fresh = len(more) > 1
    return rows


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and members; of an object that follows a similar one in a list, the members that differ."""
    if isinstance(value, dict):
        yield from ((f"{_dumps(name)}: ", member) for name, member in value.items())
        return
    yield "", value[0]
    for before, item in pairwise(value):
        similar = isinstance(item, dict) and isinstance(before, dict) and list(item) == list(before)
        yield ("... ", _differing(before, item)) if similar else ("", item)


def _differing(before: dict[str, Any], item: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Return the members of `item`, and of its objects, without an equal in `before`."""
    found: dict[str, Any] = {}
    for name, member in item.items():
        old = before[name]
        if isinstance(member, dict) and isinstance(old, dict) and list(member) == list(old):
            found |= _differing(old, member, f"{path}{name}/")
        elif _dumps(member) != _dumps(old):
            found[path + name] = member
    return found


def _dumps(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _short(value: Any) -> str:
    return _HASH.sub(r'"\1...\2"', msgspec.json.format(_dumps(value), indent=0))
