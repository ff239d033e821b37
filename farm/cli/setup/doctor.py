"""`farm doctor`."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.errors import FarmError, UsageError
from farm.base.exit_codes import ExitCode
from farm.base.socs import check_backend, find_soc, load_socs
from farm.cli.options import configured, json_option, soc_option, toolchain_option
from farm.cli.output import show
from farm.report.terminal.layout import WIDTH, columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.builds.runtime.doctor import Ability, Availability, MissingItem, Tool
    from farm.devices.adb.host import AdbHost

# A healthy phone answers sooner; a hanging device must not delay all other checks.
_SCAN_SECONDS = 3.0
# With more SoCs than these in a line, they are counted if they are all that have the backend.
_MOST_NAMES = 6
_NAMES = {"here": "yes"}


@click.command("doctor")
@soc_option("Only this SoC.")
@click.option("--backend", metavar="BACKEND", help="Only this backend.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    metavar="FILE.zip",
    help="Write versions, configuration without secrets and recent logs, for a report of a problem.",
)
@toolchain_option("Toolchain to check")
@json_option()
def command(soc: str | None, backend: str | None, bundle: Path | None, toolchain: str) -> int:
    """Show what can be compiled, staged and run here, and how to repair the rest.

    Nothing is built or fetched.

    \b
    Exit codes: 0; 2 usage or configuration; 6 --soc and --backend name a
    combination that cannot be run here.
    """
    from farm.builds.runtime.doctor import Doctor, backends_of, compiler_versions, list_tools, runnable
    from farm.builds.toolchains.select import look_into, use_toolchain

    if bundle is not None and (soc or backend):
        raise UsageError("--bundle is about this machine: leave out --soc and --backend")
    if backend is not None:
        find_backend(backend)
    chosen = find_soc(soc) if soc else None
    if chosen is not None and backend is not None:
        check_backend(chosen, backend)
    config = use_toolchain(configured(), toolchain)
    if bundle is not None:
        from farm.cli.setup.doctor_bundle import write_bundle

        names = write_bundle(bundle, config, list_tools(config))
        about = f"versions, configuration without secrets, {len(names) - 2} logs: look through it before you send it"
        show({"bundle": str(bundle), "files": names}, [f"{bundle}: {about}"])
        return 0
    attached, note = _attached()
    compiler = compiler_versions() if config.toolchain.python is None else look_into(config, config.toolchain).versions
    doctor = Doctor(config, attached, compiler)
    socs = [chosen] if chosen else list(load_socs().values())
    wanted = [(one, name) for one in socs for name in backends_of(one) if backend in (None, name)]
    abilities = [doctor.examine(one, name) for one, name in wanted]
    tools = list_tools(config, compiler)
    direct = [
        {"soc": one.name, "backend": name, "runs_jobs": not gaps, "gaps": gaps}
        for one, name in wanted
        if BACKENDS[name].direct_library
        for gaps in [doctor.direct(one, name)]
    ]
    answer = {"abilities": abilities, "direct": direct, "tools": tools, "adb": note}
    show(answer, [*_abilities(abilities), *_direct(direct), *_tools(tools, note)])
    asked = chosen is not None and backend is not None
    return ExitCode.MISSING_TOOL if asked and not runnable(abilities[0]) else 0


def _attached() -> tuple[dict[str, list[str]] | None, str]:
    """Return the serials of usable devices by SoC, None without an adb server, and a note on adb."""
    from farm.devices.adb.host import AdbHost
    from farm.devices.adb.server import server_place

    try:
        place = server_place(os.environ)
    except UsageError as error:
        return None, str(error)
    server = AdbHost(place.port, place.host)
    try:
        socket.create_connection((place.host, place.port), timeout=0.2).close()
    except OSError:
        return None, f"no server on {server.place}"
    found: list[tuple[dict[str, list[str]], str]] = []
    # A daemon thread, so that a hanging device does not delay the exit.
    asking = threading.Thread(target=lambda: found.append(_scan(server)), daemon=True)
    asking.start()
    asking.join(_SCAN_SECONDS)
    if not found:
        return {}, f"the server on {server.place} did not list its devices within {_SCAN_SECONDS:g} s"
    return found[0]


def _scan(server: AdbHost) -> tuple[dict[str, list[str]], str]:
    from farm.devices.discovery import scan

    try:
        found = scan(server.port, server.host)
    except FarmError as error:
        return {}, str(error)
    by_soc: dict[str, list[str]] = {}
    for device in found.devices:
        if device.kind == "hardware":
            by_soc.setdefault(device.soc, []).append(device.serial)
    names = [f"{device.serial} ({device.soc})" for device in found.devices]
    names += [f"{device.serial} ({device.state})" for device in found.unusable]
    return by_soc, f"attached: {', '.join(names) or 'no device'}"


def _abilities(abilities: list[Ability]) -> Iterator[str]:
    repairs: dict[str, list[MissingItem]] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in sorted(abilities, key=lambda one: list(BACKENDS).index(one.backend)):
        cells = [_cell(answer, repairs) for answer in (one.compile, one.stage, one.run)]
        rows.setdefault((one.backend, *cells), []).append(one.soc)
    head, *lines = columns([("backend", "compile", "stage", "run"), *rows])
    yield head
    for line, (row, socs) in zip(lines, rows.items(), strict=True):
        yield line
        having = sum(one.backend == row[0] for one in abilities)
        every = len(socs) == having > _MOST_NAMES
        yield from wrapped(f"  {f'all {having} SoCs' if every else ', '.join(socs)}", hanging="")
    if repairs:
        yield ""
        yield from wrapped("In brackets: the missing parts, there or for other devices, and their repair.", 80, "")
    for number, (repair, gaps) in enumerate(repairs.items(), 1):
        where = ", ".join(dict.fromkeys(gap.where for gap in gaps if gap.where))
        what = _shortened([gap.what for gap in gaps])
        yield from wrapped(f"[{number}] {where and f'{where}: '}{what}", hanging="    ")
        # Commands are not wrapped, so that they can be copied.
        is_command = repair.startswith(("farm ", "pip ", "apt-get ", "adb "))
        yield from [f"    {repair}"] if is_command else wrapped(f"    {repair}", hanging="")


def _cell(answer: Availability, repairs: dict[str, list[MissingItem]]) -> str:
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


def _direct(asked: Sequence[dict[str, object]]) -> list[str]:
    if not asked:
        return []
    ready = [f"{one['soc']} {one['backend']}" for one in asked if not one["gaps"]]
    state = f"complete for {', '.join(ready)}" if ready else "not complete for any of them"
    return ["", *wrapped(
        f"direct mode: {state}; 'farm setup runtime check --direct --soc SOC' lists its files. Jobs run in it with "
        f"--option {DIRECT_MODE}=true.",
        hanging="",
    )]  # fmt: skip


def _tools(tools: list[Tool], note: str) -> Iterator[str]:
    yield from ("", "tools")
    name_width = max(len(tool.name) for tool in tools) + 4
    for tool in tools:
        text = f"{tool.version}: {tool.problem}" if tool.problem else tool.version or "none"
        if tool.name == "adb":
            text = f"{text}; {note}"
        line = f"  {tool.name}".ljust(name_width) + text
        if tool.path and len(line) + 2 + len(tool.path) <= WIDTH:
            yield f"{line}  {tool.path}"
            continue
        first, *more = wrapped(text, WIDTH - name_width, "")
        yield f"  {tool.name}".ljust(name_width) + first
        yield from (" " * name_width + one for one in more)
        if tool.path:
            # Paths are not wrapped, so that they can be copied.
            yield f"    {tool.path}"
