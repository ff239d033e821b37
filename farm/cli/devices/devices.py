"""`farm devices`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from farm.base.text import one_line
from farm.cli.options import is_json, json_option
from farm.cli.output import echo, echo_coloured, has_reader, print_json, reading
from farm.cli.output import width as terminal_width
from farm.devices.discovery import ABSENT, OUT
from farm.report.model.format import short_age
from farm.report.terminal.layout import LEAST_WIDTH, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.text import Text

    from farm.dispatch.pool.inventory import DeviceRow
    from farm.policy.situation import Waiting

_ATTENTION = "NEEDS ATTENTION"
_GROUPS = (_ATTENTION, "IN USE", "FREE", "OUT OF SERVICE", "ABSENT")
# Limit of names, which leaves a third of 80 columns for the reason.
_NAME_CHARACTERS = 24
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
def command(*, names: tuple[str, ...], watch: bool, details: bool | None) -> None:
    """Show the attached devices: their SoC, state, health and users.

    The device itself reports its SoC. Devices that were attached before are
    shown as absent. In a long list, devices that need attention come first.
    Processes that wait for devices are shown below.
    """
    from farm.dispatch.pool.inventory import find_rows

    with reading(readonly=False) as reader:

        def look() -> _DeviceList:
            everything, waiting = reader.devices()
            found = find_rows(everything, names)
            ids = {row.id for row in found}
            return _DeviceList(found, [one for one in waiting if not names or ids & {*one.devices}])

        if watch:
            _watch(look, names, details)
        elif is_json():
            print_json(look()._asdict())
        else:
            screen = _screen(look(), names, details, _width())
            echo_coloured(_rendered(screen))


def _rendered(screen: Text) -> str:
    from rich.console import Console

    console = Console(width=_width(), force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as capture:
        console.print(screen, soft_wrap=True)
    return capture.get().rstrip("\n")


class _DeviceList(NamedTuple):
    devices: list[DeviceRow]
    waiting: list[Waiting]


def _screen(seen: _DeviceList, names: Sequence[str], details: bool | None, width: int) -> Text:
    """Return the devices and the waiting processes."""
    from rich.text import Text

    from farm.dispatch.pool.inventory import wanted_of

    known = {row.id: row for row in seen.devices}
    waiting = waiting_lines(seen.waiting, [wanted_of(one, known) for one in seen.waiting], width)
    if details if details is not None else len(seen.devices) <= _MOST_DETAILED or names:
        shown = _listing(seen.devices, names, width)
    else:
        shown = Text("\n".join(compact_lines(seen.devices, width)))
        shown.highlight_regex(rf"(?m)^{_ATTENTION}.*", "bold red")
    return Text("\n").join([shown, *map(Text, waiting)])


def _watch(look: Callable[[], _DeviceList], names: Sequence[str], details: bool | None) -> None:
    """Show the list until Ctrl-C ends the command."""
    import contextlib

    import msgspec
    from rich.console import Console
    from rich.live import Live

    from farm.base.text import plain_json

    with contextlib.suppress(KeyboardInterrupt):
        if is_json() or not sys.stdout.isatty():
            while has_reader():
                found = look()
                if is_json():
                    echo(plain_json(msgspec.json.encode({"schema": 1, **found._asdict()})).decode())
                else:
                    echo(f"{time.strftime('%H:%M:%S')}\n{_screen(found, names, details, _width())}\n")
                time.sleep(_WATCH_SECONDS)
            return
        with Live(console=Console(highlight=False), auto_refresh=False) as live:
            while True:
                live.update(_screen(look(), names, details, _width()), refresh=True)
                time.sleep(_WATCH_SECONDS)


def _width() -> int:
    return max(LEAST_WIDTH, terminal_width())


def _listing(found: Sequence[DeviceRow], names: Sequence[str], width: int) -> Text:
    """Return two lines for each device, and a third for its problem, all within `width` columns."""
    from rich.text import Text

    if not found:
        what = f"no {' or '.join(names)} is attached" if names else "no device is attached"
        hint = "connect one by USB, name one in farm.toml, or try 'farm virtual up --soc SM8650'"
        return Text("\n".join(wrapped(f"{what}: {hint}", width, "", whole_words=False)))
    blocks = ([*head, *_body(row, width)] for head, row in zip(_heads(found, width), found, strict=True))
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
        (_holder(row) or ("free" if row.state == "ready" else ""), ""),
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


def compact_lines(found: Sequence[DeviceRow], width: int) -> list[str]:
    """Return a line for each device within `width` columns, below a title for each group of them."""
    groups: dict[str, list[DeviceRow]] = {title: [] for title in _GROUPS}
    for row in sorted(found, key=lambda row: (row.soc, row.name or row.serial)):
        groups[_group(row)].append(row)
    names = max((len(_name(row)) for row in found), default=0)
    socs = max((len(row.soc or "?") for row in found), default=0)
    kinds = 7 if any(row.kind == "virtual" for row in found) else 0
    lines = []
    for title, rows in groups.items():
        lines += [f"{title}: {len(rows)}"] if rows else []
        for row in rows:
            kind = f"  {'virtual' if row.kind == 'virtual' else '':{kinds}}" if kinds else ""
            cells = f"  {_name(row):{names}}  {one_line(row.soc or '?'):{socs}}{kind}  {_text(title, row)}"
            lines.append(cells[:width].rstrip())
    return lines


def waiting_lines(waiting: Sequence[Waiting], wanted: Iterable[str], width: int) -> list[str]:
    """Return the waiting processes: wanted device, start, reason and purpose, within `width` columns."""
    if not waiting:
        return []
    cells = [
        (one_line(one.user), one_line(what), _since(one), one_line(one.why))
        for one, what in zip(waiting, wanted, strict=True)
    ]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  " + "  ".join((*(f"{cell:{size}}" for cell, size in zip(row, wide, strict=True)), one_line(one.purpose)))
        for row, one in zip(cells, waiting, strict=True)
    ]
    return [f"WAITING: {len(waiting)}", *(line[:width].rstrip() for line in lines)]


def _since(one: Waiting) -> str:
    return f"since {time.strftime('%H:%M', time.localtime(one.since_ms / 1000))}"


def _group(row: DeviceRow) -> str:
    if row.state == OUT:
        return "OUT OF SERVICE"
    if row.state == ABSENT:
        # A device of farm.toml has a reason for its absence, and needs attention.
        return _ATTENTION if row.reason and row.in_service else "ABSENT"
    if row.state != "ready" or row.health != "healthy":
        return _ATTENTION
    return "IN USE" if row.holder else "FREE"


def _name(row: DeviceRow) -> str:
    return one_line(row.name or row.serial, _NAME_CHARACTERS)


def _text(title: str, row: DeviceRow) -> str:
    """Return the details of a device that matter in its group."""
    holder = _holder(row)
    if title == _ATTENTION:
        word = row.health if row.state == "ready" else row.state
        parts = [word, row.reason or row.health_reason, holder and f"with {holder}"]
        return one_line(": ".join(part for part in parts if part))
    if title == "ABSENT":
        return f"seen {short_age(row.last_seen_ms)} ago" if row.last_seen_ms else "never seen"
    if title == "IN USE":
        return one_line("  ".join(part for part in (holder, row.purpose if not row.until_ms else "") if part))
    if title == "OUT OF SERVICE":
        return one_line(row.reason)
    status = [f"{row.battery_percent} %"] if row.battery_percent is not None else []
    status += [f"{row.temperature_c:.1f} C"] if row.temperature_c is not None else []
    return ", ".join(status)


def _holder(row: DeviceRow) -> str:
    """Return the user of a device, with the end of a reservation; "" for a free device."""
    if not row.holder:
        return ""
    until = time.strftime(" until %H:%M", time.localtime(row.until_ms / 1000)) if row.until_ms else ""
    return f"{row.holder}{until}"
