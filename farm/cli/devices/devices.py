"""`farm devices`."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from farm.base.text import one_line
from farm.cli.devices.compact import ATTENTION, compact_lines, holder_of, waiting_lines
from farm.cli.options import json_option
from farm.cli.output import echo, echo_coloured, has_reader, print_json, reading
from farm.cli.output import width as terminal_width
from farm.report.model.format import short_age
from farm.report.terminal.layout import LEAST_WIDTH, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from farm.dispatch.pool.inventory import DeviceRow
    from farm.policy.situation import Waiting

_WATCH_SECONDS = 2.0
_MOST_DETAILED = 8
_NOW_SECONDS = 10.0
_STYLES = {"ready": "green", "absent": "dim", "out": "yellow", "quarantined": "bold red"}
_INDENT = "    "
_HEALTH_STYLES = {"suspect": "yellow", "quarantined": "bold red"}


@click.command("list")
@click.argument("names", nargs=-1, metavar="[DEVICE|SOC]...")
@click.option("--watch", is_flag=True, help="Look again every two seconds, until Ctrl-C.")
@click.option("--details/--compact", "details", default=None,
              help="Print all facts of each device, or one line; by default one line for more than "
              f"{_MOST_DETAILED} devices.")  # fmt: skip
@json_option("Print JSON; with --watch, one line each time.")
def command(
    *, names: tuple[str, ...], watch: bool, details: bool | None, as_json: bool, config_file: Path | None
) -> None:
    """Show the attached devices: their SoC, state, health and users.

    The device itself reports its SoC. Devices that were attached before are
    shown as absent. In a long list, devices that need attention come first.
    Processes that wait for devices are shown below.
    """
    from farm.dispatch.pool.inventory import find_rows
    from farm.report.terminal.run import rendered

    with reading(config_file, readonly=False) as reader:

        def look() -> _DeviceList:
            everything, waiting = reader.devices()
            found = find_rows(everything, names)
            ids = {row.id for row in found}
            return _DeviceList(found, [one for one in waiting if not names or ids & {*one.devices}])

        if watch:
            _watch(look, names, details, as_json=as_json)
        elif as_json:
            print_json(look()._asdict())
        else:
            screen = _screen(look(), names, details, _width())
            echo_coloured(rendered([screen], _width(), color=sys.stdout.isatty()))


class _DeviceList(NamedTuple):
    devices: list[DeviceRow]
    waiting: list[Waiting]


def _screen(seen: _DeviceList, names: Sequence[str], details: bool | None, width: int, height: int = 0) -> Text:
    """Return the devices and the waiting processes; with a `height` at most that many lines."""
    from rich.text import Text

    from farm.dispatch.pool.inventory import wanted_of

    known = {row.id: row for row in seen.devices}
    waiting = waiting_lines(seen.waiting, [wanted_of(one, known) for one in seen.waiting], width)
    room = max(1, height - len(waiting)) if height else 0
    if details if details is not None else len(seen.devices) <= _MOST_DETAILED or names:
        shown = _listing(seen.devices, names, width, room)
    else:
        lines = compact_lines(seen.devices, width)
        if room and len(lines) > room:
            lines = [*lines[: room - 1], f"and {len(lines) - room + 1} more lines: 'farm devices' shows them"[:width]]
        shown = Text("\n".join(lines))
        shown.highlight_regex(rf"(?m)^{ATTENTION}.*", "bold red")
    return Text("\n").join([shown, *map(Text, waiting)])


def _watch(look: Callable[[], _DeviceList], names: Sequence[str], details: bool | None, *, as_json: bool) -> None:
    """Show the list until Ctrl-C ends the command."""
    import contextlib

    import msgspec
    from rich.live import Live

    from farm.base.text import plain_json

    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not sys.stdout.isatty():
            while has_reader():
                found = look()
                if as_json:
                    echo(plain_json(msgspec.json.encode({"schema": 1, **found._asdict()})).decode())
                else:
                    echo(f"{time.strftime('%H:%M:%S')}\n{_screen(found, names, details, _width())}\n")
                time.sleep(_WATCH_SECONDS)
            return
        # The list is fitted to the height beforehand, so that no line is cut without a note.
        with Live(console=_console(), auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                found = look()
                height = shutil.get_terminal_size().lines - 1
                live.update(_screen(found, names, details, _width(), height), refresh=True)
                time.sleep(_WATCH_SECONDS)


def _width() -> int:
    return max(LEAST_WIDTH, terminal_width())


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _listing(found: Sequence[DeviceRow], names: Sequence[str], width: int, height: int = 0) -> Text:
    """Return two lines for each device, and a third for its problem, all within `width` columns.

    With a `height` at most that many lines: only the first of each device, or a part of the devices.
    """
    from rich.text import Text

    if not found:
        what = f"no {' or '.join(names)} is attached" if names else "no device is attached"
        hint = "connect one by USB, name one in farm.toml, or try 'farm virtual up --soc SM8650'"
        return Text("\n".join(wrapped(f"{what}: {hint}", width, "", whole_words=False)))
    heads = _heads(found, width)
    blocks = [[*head, *_body(row, width)] for head, row in zip(heads, found, strict=True)]
    if height and sum(map(len, blocks)) > height:
        blocks, left_out = list(heads), 0
        while sum(map(len, blocks)) + bool(left_out) > height and blocks:
            blocks.pop()
            left_out += 1
        if left_out:
            blocks.append([Text(f"and {left_out} more: 'farm devices' without --watch shows them"[:width], "dim")])
    return Text("\n").join(line for block in blocks for line in block)


def _heads(found: Sequence[DeviceRow], width: int) -> list[list[Text]]:
    """Return facts and state of each device: in columns, or in several lines if the columns are too wide."""
    from rich.text import Text

    rows = [_cells(row) for row in found]
    widths = [max(len(cell) for cell, _ in column) for column in zip(*rows, strict=True)]
    fits = sum(widths) + 2 * (len(widths) - 1) <= width
    heads = []
    for cells in rows:
        lines = [Text()]
        for (cell, style), wide in zip(cells, widths, strict=True):
            if not cell and not fits:
                continue
            if not fits and lines[-1].cell_len + len(cell) > width:
                lines.append(Text(_INDENT))
            # Text that exceeds a line of its own is cut: `--json` has all of it.
            shown = cell[: width - lines[-1].cell_len]
            lines[-1].append(shown, style)
            lines[-1].append(" " * (2 + (wide - len(shown) if fits else 0)))
        for line in lines:
            line.rstrip()
        heads.append([line for line in lines if line.cell_len])
    return heads


def _cells(row: DeviceRow) -> list[tuple[str, str]]:
    """Return the columns of a device with their styles."""
    # The health of a device that was never asked is unknown.
    health = row.health if row.soc else ""
    cells = [
        (row.name or row.serial, "bold"),
        (row.soc or "?", ""),
        (row.kind, ""),
        (row.state, _STYLES.get(row.state, "red")),
        (health, _HEALTH_STYLES.get(health, "")),
        (holder_of(row) or ("free" if row.state == "ready" else ""), ""),
    ]
    return [(one_line(cell), style) for cell, style in cells]


def _body(row: DeviceRow, width: int) -> list[Text]:
    from rich.text import Text

    parts = ((", ".join(_details(row)), "dim"), (row.reason or row.health_reason, "yellow"))
    return [
        Text(line, style) for text, style in parts for line in wrapped(f"{_INDENT}{text}", width, "", whole_words=False)
    ]


def _details(row: DeviceRow) -> list[str]:
    details = [row.serial] if row.name and row.name != row.serial else []
    details += [row.product] if row.product else []
    details += [f"on {row.host}"] if row.host else []
    details += [f"also at {', '.join(row.also_at)}"] if row.also_at else []
    details += [f"agent {row.agent}"] if row.agent else []
    details += ["/".join(row.backends)] if row.backends else []
    if row.root is not None:
        details.append("root" if row.root else "not root")
    if row.battery_percent is not None:
        details.append(f"battery {row.battery_percent} %")
    if row.temperature_c is not None:
        details.append(f"{row.temperature_c:.1f} C")
    if row.free_bytes is not None:
        details.append(f"{row.free_bytes / 1e9:.1f} GB free")
    if row.last_seen_ms:
        is_now = time.time() - row.last_seen_ms / 1000 < _NOW_SECONDS
        details.append("seen now" if is_now else f"seen {short_age(row.last_seen_ms)} ago")
    details += [f"#{label}" for label in row.labels]
    return details or ["no details"]
