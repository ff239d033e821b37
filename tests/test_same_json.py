"""What programs read stays the same, byte for byte: `--json`, exports, and the JSON of `farm serve`, of one store.

`golden/store.sql` is a store of schema 0008, with runs of the simulator and others that were made up: passed, failed,
known issues, infra, attempts `[failed, infra]` and the other way round, stale and unfinished runs, `farm debug`, `farm
exec`, `farm pytest`, profiles, alerts in every state, remarks, devices, leases. farm migrates it here, and then
`golden/commands.py` asks it all there is to ask. Only what depends on this machine is left out (`kept` there); the
clock stands still. `WRITE_GOLDEN=1` writes the answers anew: for a change that is wanted, and named in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
from golden.commands import PLACES

from farm.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

_GOLDEN = Path(__file__).with_name("golden")
_ANSWERS = _GOLDEN / "answers"
_COMMANDS = _GOLDEN / "commands.py"
# What is longer is kept as its hash.
_MOST_BYTES = 24_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the store in it."""
    state = tmp_path / "golden" / "state"
    state.mkdir(parents=True)
    connection = sqlite3.connect(state / "farm.db")
    connection.executescript((_GOLDEN / "store.sql").read_text(encoding="utf-8"))
    connection.close()
    # What only reads leaves an older store alone: the first command that writes brings it up to date.
    open_store(state / "farm.db").close()
    return state.parent


def test_every_command_answers_as_before(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(_COMMANDS), str(folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    answers = {
        name: f"farm {answer['command']}\nexit code {answer['code']}\n{answer['wrote']}"
        for name, answer in json.loads(done.stdout).items()
    }
    assert len(answers) > 100
    notes = {name: answer["notes"] for name, answer in json.loads(done.stdout).items()}
    _compare(answers, tmp_path, "", notes)


def test_every_page_answers_as_before(folder: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(_COMMANDS), str(folder), "serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        started = process.stdout.readline()
        assert started, process.stderr.read() if process.stderr else ""
        url = json.loads(started)["url"].rstrip("/")
        answers = {name: _get(url, path).replace(os.uname().nodename, "HOST") for name, path in PLACES.items()}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    _compare(answers, tmp_path, "page: ")


def _get(url: str, path: str) -> str:
    request = urllib.request.Request(f"{url}{path}", headers={"Accept": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            status, body = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        # What was wrong is said in words, and those may change.
        status, body = error.code, b""
    return f"GET {path}\nstatus {status}\n{body.decode()}"


def _compare(
    answers: dict[str, str], tmp_path: Path, group: str, notes: Mapping[str, str] = MappingProxyType({})
) -> None:
    found = {f"{_file_name(group + name)}.txt": _short(text) for name, text in answers.items()}
    if os.environ.get("WRITE_GOLDEN"):
        _ANSWERS.mkdir(exist_ok=True)
        for name, text in found.items():
            (_ANSWERS / name).write_text(text, encoding="utf-8")
        return
    assert len(found) == len(answers)
    others = []
    for (name, text), (command, whole) in zip(found.items(), answers.items(), strict=True):
        if text != (_ANSWERS / name).read_text(encoding="utf-8"):
            (tmp_path / name).write_text(whole, encoding="utf-8")
            others.append(f"diff {_ANSWERS / name} {tmp_path / name}")
            others += [f"    {line}" for line in notes.get(command, "").splitlines()[-3:]]
    assert not others, "these answers are others than before:\n" + "\n".join(others)


def _short(text: str) -> str:
    if len(text) <= _MOST_BYTES:
        return text
    head, lines = "\n".join(text.splitlines()[:2]), text.count("\n")
    return f"{head}\n{lines} lines with the SHA-256 {hashlib.sha256(text.encode()).hexdigest()}\n"


def _file_name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_")
