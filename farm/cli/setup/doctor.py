"""`farm doctor`."""

from __future__ import annotations

import os
import socket
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.backends.registry import BACKENDS, find_backend
from farm.cli.options import config_option
from farm.cli.output import echo, print_json
from farm.config.settings import load_config
from farm.errors import FarmError
from farm.suites.socs import check_backend, find_soc, load_socs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.runtime.doctor import Ability, Answer, Doctor, Gap
    from farm.runtime.native.tools import Tool
    from farm.suites.socs import Soc

_WIDTH = 80
# Longer than a healthy phone takes; one that hangs must not hold up everything else that is to be said.
_SCAN_SECONDS = 3.0
# More SoCs than these are not named when they are all that have the backend.
_MOST_NAMES = 6
_NAMES = {"here": "yes"}


@click.command("doctor")
@config_option
@click.option("--soc", help="Only this SoC.")
@click.option("--backend", help="Only this backend.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(config_file: Path | None, soc: str | None, backend: str | None, *, as_json: bool) -> int:
    """Say what can be compiled, staged and run here, and how to repair the rest.

    Nothing is built or fetched. Exit code 0, unless --soc and --backend ask for
    one that cannot be run: then 2.
    """
    from farm.runtime.doctor import Doctor, backends_of, runnable
    from farm.runtime.native.tools import list_tools

    if backend is not None:
        find_backend(backend)
    chosen = find_soc(soc) if soc else None
    if chosen is not None and backend is not None:
        check_backend(chosen, backend)
    config = load_config(config_file)
    attached, note = _attached()
    doctor = Doctor(config, attached)
    socs = [chosen] if chosen else list(load_socs().values())
    wanted = [(one, name) for one in socs for name in backends_of(one) if backend in (None, name)]
    abilities = [doctor.examine(one, name) for one, name in wanted]
    tools = list_tools(config)
    if as_json:
        _print_json(abilities, tools, note, doctor, wanted)
    else:
        _print_abilities(abilities)
        _print_direct(doctor, wanted)
        _print_tools(tools, note)
    asked = chosen is not None and backend is not None
    return 2 if asked and not runnable(abilities[0]) else 0


def _attached() -> tuple[dict[str, list[str]] | None, str]:
    """Return the serials of usable devices by SoC, None without an adb server, and what adb said."""
    port = os.environ.get("ANDROID_ADB_SERVER_PORT", "5037")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        return None, f"ANDROID_ADB_SERVER_PORT is {port!r}, expected a port number"
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=0.2).close()
    except OSError:
        return None, f"no server on port {port}"
    found: list[tuple[dict[str, list[str]], str]] = []
    # Not waited for at the end either: a device may hang for longer than anybody waits.
    asking = threading.Thread(target=lambda: found.append(_scan(int(port))), daemon=True)
    asking.start()
    asking.join(_SCAN_SECONDS)
    if not found:
        return {}, f"the server on port {port} did not tell in {_SCAN_SECONDS:g} s who is attached"
    return found[0]


def _scan(port: int) -> tuple[dict[str, list[str]], str]:
    from farm.devices.discovery import scan

    try:
        said = scan(port)
    except FarmError as error:
        return {}, str(error)
    by_soc: dict[str, list[str]] = {}
    for device in said.devices:
        if device.kind == "hardware":
            by_soc.setdefault(device.soc, []).append(device.serial)
    names = [f"{device.serial} ({device.soc})" for device in said.devices]
    names += [f"{device.serial} ({device.state})" for device in said.unusable]
    return by_soc, f"attached are {', '.join(names) or 'none'}"


def _print_json(
    abilities: list[Ability], tools: list[Tool], note: str, doctor: Doctor, wanted: Iterable[tuple[Soc, str]]
) -> None:
    direct = [
        {"soc": soc.name, "backend": backend, "runs_jobs": False, "gaps": doctor.direct(soc, backend)}
        for soc, backend in _with_dsp(wanted)
    ]
    print_json({"abilities": abilities, "direct": direct, "tools": tools, "adb": note})


def _print_abilities(abilities: list[Ability]) -> None:
    repairs: dict[str, list[Gap]] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in sorted(abilities, key=lambda one: list(BACKENDS).index(one.backend)):
        cells = [_cell(answer, repairs) for answer in (one.compile, one.stage, one.run)]
        rows.setdefault((one.backend, *cells), []).append(one.soc)
    head = ("backend", "compile", "stage", "run")
    wide = [max(len(row[i]) for row in [*rows, head]) for i in range(len(head))]
    echo(_row(head, wide))
    for row, socs in rows.items():
        echo(_row(row, wide))
        having = sum(one.backend == row[0] for one in abilities)
        every = len(socs) == having > _MOST_NAMES
        echo(_fill(f"all {having} SoCs" if every else ", ".join(socs), "  "))
    if not repairs:
        return
    echo()
    echo(_fill("In brackets: what is missing, there or for other devices, and what to do about it.", ""))
    for number, (repair, gaps) in enumerate(repairs.items(), 1):
        where = ", ".join(dict.fromkeys(gap.where for gap in gaps if gap.where))
        what = _shortened([gap.what for gap in gaps])
        echo(_fill(f"[{number}] {where + ': ' if where else ''}{what}", "", "    "))
        echo(_repair(repair))


def _row(cells: Iterable[str], wide: list[int]) -> str:
    return "  ".join(cell.ljust(wide[i]) for i, cell in enumerate(cells)).rstrip()


def _cell(answer: Answer, repairs: dict[str, list[Gap]]) -> str:
    for gap in answer.gaps:
        known = repairs.setdefault(gap.repair, [])
        if gap not in known:
            known.append(gap)
    order = list(repairs)
    numbers = sorted({order.index(gap.repair) + 1 for gap in answer.gaps})
    where = " ".join(_NAMES.get(one, one) for one in answer.where) or "no"
    return f"{where} [{','.join(map(str, numbers))}]" if numbers else where


def _shortened(names: list[str]) -> str:
    every = list(dict.fromkeys(name for joined in names for name in joined.split(", ")))
    more = len(every) - 6
    return ", ".join(every[:6]) + (f" and {more} more" if more > 0 else "")


def _repair(repair: str) -> str:
    # A command is there to be copied: not wrapped.
    return f"    {repair}" if repair.startswith(("farm ", "pip ", "apt-get ", "adb ")) else _fill(repair, "    ")


def _with_dsp(wanted: Iterable[tuple[Soc, str]]) -> list[tuple[Soc, str]]:
    return [(soc, name) for soc, name in wanted if BACKENDS[name].direct_library]


def _print_direct(doctor: Doctor, wanted: Iterable[tuple[Soc, str]]) -> None:
    asked = _with_dsp(wanted)
    if not asked:
        return
    ready = [f"{soc.name} {backend}" for soc, backend in asked if not doctor.direct(soc, backend)]
    state = f"complete for {', '.join(ready)}" if ready else "not complete for any of them"
    echo()
    echo(
        _fill(
            f"direct mode: {state}. farm checks and stages its files ('farm runtime check --direct'), and runs no "
            "jobs with it, as its runner takes none in a session.",
            "",
        )
    )


def _print_tools(tools: list[Tool], note: str) -> None:
    echo()
    echo("tools")
    wide = max(len(tool.name) for tool in tools) + 4
    for tool in tools:
        text = f"{tool.version}: {tool.problem}" if tool.problem else tool.version or "none"
        if tool.name == "adb":
            text = f"{text}; {note}"
        line = f"  {tool.name}".ljust(wide) + text
        if tool.path and len(line) + 2 + len(tool.path) <= _WIDTH:
            echo(f"{line}  {tool.path}")
            continue
        echo(_fill(line, "", " " * wide))
        if tool.path:
            # Not wrapped: it is there to be copied.
            echo(f"    {tool.path}")


def _fill(text: str, indent: str, hanging: str | None = None) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
