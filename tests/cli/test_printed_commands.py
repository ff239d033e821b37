"""Every command that the product prints: a table of them, each parsed as it is printed or run where it needs no device.

A new printed command fails the first test until it is in the table.
"""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

import farm
from farm.cli.main import cli
from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Cause, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.suite import Case, InputSpec, Job, Target
from farm.system.user import user_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm_home import FarmHome

PACKAGE = Path(farm.__file__).parent
NAMES = cli.list_commands(click.Context(cli))
COMMAND = re.compile(rf"(?<![\w/.-])farm (?:{'|'.join(NAMES)})\b[^\n]*")
CASE = Case("s", "conv", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),))
JOB = Job(CASE, Target("SM8650", "htp", "8a8w"))
PHONE = Device(serial="phone-1", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")

# Printed words that name a command without a complete call of it, and data that is no hint.
NAMED = {
    "farm lease",
    "farm sdk fetch {} {}",
    "farm virtual fault {}",
    "farm adb",
    "farm adb DEVICE --",
    "farm attach",
    "farm bisect",
    "farm bundle --compiled",
    "farm bundle --suite programs",
    "farm compare {}",
    "farm connect",
    "farm debug",
    "farm device check",
    "farm device unquarantine",
    "farm diff",
    "farm exec",
    "farm export",
    "farm import",
    "farm nightly",
    "farm profile",
    "farm confirm",
    "farm pytest",
    "farm repro",
    "farm run",
    "farm run --compile-only",
    "farm run --profile detailed",
    "farm run {}",
    "farm runtime build",
    "farm shell",
    "farm show",
    "farm suites published",
}
# A complete call as printed, `{}` for what it fills in -> an example of what it fills in.
PARSED: dict[str, tuple[str, ...]] = {
    "farm device show {}": ("phone-1",),
    "farm release": (),
    "farm adb {} -- COMMAND": ("phone-1",),
    "farm agent": (),
    "farm agent list": (),
    "farm attach {}": ("1",),
    "farm bisect --commits GOOD..BAD JOB": (),
    "farm bisect --resume {}": ("s-conv",),
    "farm cancel {}": ("1",),
    "farm confirm --run {}": ("1",),
    "farm connect {}": ("phone-1",),
    "farm device in DEVICE": (),
    "farm device in {}": ("phone-1",),
    "farm device out DEVICE": (),
    "farm device unquarantine {}": ("phone-1",),
    "farm devices": (),
    "farm nightly {} --check": ("nightly.toml",),
    "farm queue": (),
    "farm quota": (),
    "farm release {}": ("phone-1",),
    "farm run --resume {}": ("1",),
    "farm run --soc SM8650 --suite {}": ("test_suites/smoke/",),
    "farm run --soc {}": ("SM8650",),
    "farm runtime build --target android-arm64": (),
    "farm runtime build --target {}": ("oe-linux-aarch64",),
    "farm sdk fetch {}": ("2.37",),
    "farm serve": (),
    "farm shell {}": ("phone-1",),
    "farm shell {} -- COMMAND": ("phone-1",),
    "farm show JOB": (),
    "farm sign": (),
    "farm sign --lpai v{}": ("5",),
    "farm toolchain make {}": ("1.5.1",),
    "farm toolchain remove VERSION": (),
    "farm virtual clear {}": ("virtual-SM8650-0",),
    "farm virtual up --soc SM8650": (),
    "farm runtime check --soc SOC": (),
    "farm runtime check --direct --soc SOC": (),
    "farm suites tune {}/{}": ("smoke", "conv2d"),
}
# A complete call that needs no device -> what it fills in, its exit code and a part of its output.
RUN = {
    "farm baseline show {}": (("s/conv",), 0, "s/conv"),
    "farm cache prune --older 30d --yes": ((), 0, ""),
    "farm cache prune --all --yes": ((), 0, ""),
    "farm export --format jsonl": ((), 0, ""),
    "farm history {}": (("s/conv",), 0, "s/conv"),
    "farm report {}": (("RUN_ID",), 0, ""),
    "farm run list": ((), 0, ""),
    "farm runtime --help": ((), 0, "Usage"),
    "farm sdk list": ((), 0, ""),
    "farm show {}": (("s/conv[SM8650-htp-8a8w]",), 0, "too far"),
    "farm socs": ((), 0, "SM8650"),
    "farm status": ((), 0, ""),
    "farm suites": ((), 0, "smoke"),
    "farm toolchain list": ((), 0, ""),
    "farm triage": ((), 0, ""),
    "farm virtual faults": ((), 0, "reboot"),
}


def literals(tree: ast.Module) -> Iterator[str]:
    """Yield the string literals of a module without docstrings; `{}` stands for each value of an f-string."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(value) for value in node.values}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(value.value) if isinstance(value, ast.Constant) else "{}" for value in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def call_in(text: str, quote: str) -> str:
    """Return the call that `text` begins with: up to its closing quote, else as far as the command line takes words."""
    if quote in ("'", "`") and quote in text:
        return text.partition(quote)[0].strip()
    taken, words = ["farm"], text.split()[1:]
    command: click.Command = cli
    while words:
        word = words.pop(0).rstrip(",;:.)'`")
        below = command.get_command(click.Context(cli), word) if isinstance(command, click.Group) else None
        if below is not None:
            command = below
        elif word.startswith("--") and len(taken) > 1:
            options = [one for one in command.params if isinstance(one, click.Option) and word in one.opts]
            if options and not options[0].is_flag and words:
                taken.append(word)
                word = words.pop(0).rstrip(",;:.)'`")
        elif not re.fullmatch(r"\{\}(/\{\})?|[A-Z]{3,}", word):
            break
        taken.append(word)
    return " ".join(taken)


@cache
def printed() -> dict[str, str]:
    """Return the first place of each command that a string literal of the product has."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if "migrations" in path.parts:
            continue
        for text in literals(ast.parse(path.read_text(encoding="utf-8"))):
            start = 0
            while match := COMMAND.search(text, start):
                call = call_in(match[0], text[match.start() - 1 : match.start()])
                found.setdefault(call, str(path.relative_to(PACKAGE)))
                start = match.start() + len("farm ")
    return found


def test_every_printed_command_is_in_the_table() -> None:
    known = NAMED | PARSED.keys() | RUN.keys()
    new = {call: place for call, place in printed().items() if call not in known}
    assert new == {}, "a printed command without a test: add it to RUN, or to PARSED where it needs a device"
    assert known - printed().keys() == set(), "in the table, and not printed"


def words_of(call: str, values: tuple[str, ...]) -> list[str]:
    return shlex.split(call.format(*map(shlex.quote, values)))[1:]


@pytest.mark.parametrize("call", sorted(PARSED | {call: values for call, (values, _, _) in RUN.items()}))
def test_a_printed_command_is_parsed_by_the_command_line(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PACKAGE.parent)
    values = RUN[call][0] if call in RUN else PARSED[call]
    command: click.Command = cli
    context, words = click.Context(cli, info_name="farm"), words_of(call, values)
    while isinstance(command, click.Group) and words:
        below = command.get_command(context, words[0])
        if below is None:
            break
        command, words = below, words[1:]
        context = click.Context(command, parent=context, info_name=command.name)
    assert command is not cli
    if words != ["--help"]:
        command.make_context(command.name, words, parent=context.parent)


@pytest.mark.parametrize("call", sorted(RUN))
def test_a_printed_command_runs_in_its_situation(call: str, home: FarmHome) -> None:
    values, code, text = RUN[call]
    home.state.mkdir()
    with open_store(home.state / "farm.db") as store:
        run = store.begin_run(RunRecord("farm run --suite s", user_name(), "bench", {"executorch": "1.5.1"}, 1))
        store.plan_jobs(run, [JOB])
        store.record_device(run, PHONE)
        failed = Attempt(JOB.id, Verdict.FAILED, Stage.NUMERICS, "too far", "phone-1", 1, 0.5, cause=Cause.NUMERICS)
        store.record_attempt(run, failed)
        store.finish_run(run, 1)
    # A cache of its own: some of these commands empty it.
    done = home.farm(
        *words_of(call, tuple(value.replace("RUN_ID", run) for value in values)),
        env={"FARM_CACHE_DIR": str(home.state / "cache")},
    )
    assert done.returncode == code, done.stderr
    assert text in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
