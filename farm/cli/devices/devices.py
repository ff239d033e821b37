"""`farm devices`: the list of devices, and names, labels, service, health and checks of one."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from farm.base.errors import ExitCode
from farm.base.text import one_line
from farm.cli.options import OUTPUT_FILE, duration, is_json, json_option, limit_option, yes_option
from farm.cli.output import (
    acted,
    echo_coloured,
    opened,
    print_json,
    reading,
    require_consent,
    show,
)
from farm.cli.output import width as terminal_width
from farm.devices.discovery import ABSENT, OUT
from farm.report.model.format import short_age
from farm.report.terminal.layout import LEAST_WIDTH, columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from rich.text import Text

    from farm.devices.device import HealthEvent
    from farm.dispatch.pool.inventory import DeviceRow
    from farm.policy.situation import Waiting
    from farm.replay.check import CheckedDevice
    from farm.store.leases.registry import Registered
    from farm.store.store import Store


# `farm devices`.


_ATTENTION = "NEEDS ATTENTION"
_GROUPS = (_ATTENTION, "IN USE", "FREE", "OUT OF SERVICE", "ABSENT")
# Limit of names, which leaves a third of 80 columns for the reason.
_NAME_CHARACTERS = 24
_MOST_DETAILED = 8
_NOW_SECONDS = 10.0
_STYLES = {"ready": "green", "absent": "dim", "out": "yellow", "quarantined": "bold red"}
_INDENT = "    "
_HEALTH_STYLES = {"suspect": "yellow", "quarantined": "bold red"}


@click.command("list")
@click.argument("names", nargs=-1, metavar="[DEVICE|SOC]...")
@json_option()
def list_command(*, names: tuple[str, ...]) -> None:
    """Show the attached devices: their SoC, state, health and users.

    The device itself reports its SoC. Devices that were attached before are
    shown as absent. More than eight devices get one line each, and devices
    that need attention come first; the facts of named devices are always shown.
    Processes that wait for devices are shown below.
    """
    from farm.dispatch.pool.inventory import find_rows

    with reading(readonly=False) as reader:
        everything, waiting = reader.devices()
    found = find_rows(everything, names)
    ids = {row.id for row in found}
    waiting = [one for one in waiting if not names or ids & {*one.devices}]
    if is_json():
        print_json({"devices": found, "waiting": waiting})
    else:
        echo_coloured(_rendered(_screen(found, waiting, names, _width())))


def _rendered(screen: Text) -> str:
    from rich.console import Console

    console = Console(width=_width(), force_terminal=True, color_system="standard", highlight=False)
    with console.capture() as capture:
        console.print(screen, soft_wrap=True)
    return capture.get().rstrip("\n")


def _screen(devices: Sequence[DeviceRow], waiting: Sequence[Waiting], names: Sequence[str], width: int) -> Text:
    """Return the devices and the waiting processes."""
    from rich.text import Text

    from farm.dispatch.pool.inventory import wanted_of

    known = {row.id: row for row in devices}
    lines = waiting_lines(waiting, [wanted_of(one, known) for one in waiting], width)
    if len(devices) <= _MOST_DETAILED or names:
        shown = _listing(devices, names, width)
    else:
        shown = Text("\n".join(compact_lines(devices, width)))
        shown.highlight_regex(rf"(?m)^{_ATTENTION}.*", "bold red")
    return Text("\n").join([shown, *map(Text, lines)])


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
    cells = [
        [*map(one_line, (one.user, what, f"since {_clock(one.since_ms)}", one.why, one.purpose))]
        for one, what in zip(waiting, wanted, strict=True)
    ]
    lines = [f"WAITING: {len(waiting)}"] if waiting else []
    return lines + [line[:width].rstrip() for line in columns(cells, indent="  ")]


def _clock(time_ms: int, form: str = "%H:%M") -> str:
    return time.strftime(form, time.localtime(time_ms / 1000))


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
    until = f" until {_clock(row.until_ms)}" if row.until_ms else ""
    return f"{row.holder}{until}"


# `farm devices`: names, labels and service state of a device, and its health.


_TEXT_COLUMN = 25
_DATE = "%Y-%m-%d %H:%M"


@click.command("name")
@click.argument("device")
@click.argument("name")
@yes_option
@json_option()
def name_command(*, device: str, name: str, yes: bool) -> None:
    """Give a device a name; an empty name removes it. A name in farm.toml has priority."""
    with _device(device) as (store, known):
        if known.name and not name:
            require_consent(f"the name {known.name} of device {known.id}", yes=yes)
        store.devices.set_name(known.id, name, None)
        line = f"{known.id} is called {name!r}" if name else f"{known.id} has no name"
        _show_changed(store, known.id, [line])


@click.command("label")
@click.argument("device")
@click.argument("labels", nargs=-1)
@yes_option
@json_option()
def label_command(*, device: str, labels: tuple[str, ...], yes: bool) -> None:
    """Replace the labels of a device; without LABELS they are removed."""
    with _device(device) as (store, known):
        if known.labels and not labels:
            require_consent(f"the labels {', '.join(known.labels)} of device {known.called}", yes=yes)
        store.devices.set_name(known.id, None, labels)
        line = f"{known.id} has the labels {', '.join(labels)}" if labels else f"{known.id} has no labels"
        _show_changed(store, known.id, [line])


@click.command("disable", short_help="Take a device out of service.")
@click.argument("device")
@click.option("--note", default="", help="Reason, which the lists of devices show.")
@json_option()
def disable_command(*, device: str, note: str) -> None:
    """Take a device out of service: it gets no new lease, and a present lease may finish."""
    _set_service(device, note, in_service=False)


@click.command("enable")
@click.argument("device")
@json_option()
def enable_command(*, device: str) -> None:
    """Put a device into service again."""
    _set_service(device, "", in_service=True)


@click.command("unquarantine", short_help="Give a device in quarantine another chance.")
@click.argument("device")
@json_option()
def unquarantine_command(*, device: str) -> None:
    """Give a quarantined device another chance: the next health check decides."""
    from farm.devices.device import Event, Health, HealthEvent, HealthMark, next_health

    # A removed device keeps its quarantine.
    with _device(device, forgotten=True) as (store, known):
        line = f"{known.called} is not in quarantine: it is {known.health}"
        if known.health == Health.QUARANTINED:
            state, reason = next_health(Health(known.health), (), HealthMark(Event.RELEASED))
            store.devices.record_health(HealthEvent(known.id, str(Event.RELEASED), str(state), reason))
            line = f"{known.called} is {state}: {reason}"
        _show_changed(store, known.id, [line])


@click.command("check", short_help="Check the properties of devices, with a health check.")
@click.argument("names", nargs=-1, metavar="[DEVICE]...")
@click.option("--wait", "wait_s", metavar="TIME", callback=duration,
              help="Longest wait for a device that another command uses.")  # fmt: skip
@click.option("--save", type=OUTPUT_FILE, metavar="FILE.zip",
              help="Write a transcript for a bug report, without serials, accounts and paths.")  # fmt: skip
@json_option()
def check_command(*, names: tuple[str, ...], wait_s: float | None, save: Path | None) -> int:
    """Check devices now, all attached ones without a name: one line per property.

    ok, a warning with the next step, or an error: identity, SoC profile, free
    space, root, temperature, page size, SELinux, DSP, health check (a small
    program), push speed, spread of its latencies. Each device is leased
    meanwhile, and the health check decides its health from then on. The exit
    code is 4 if a device is not fit, if a named device could not be checked, or
    if no device could.
    """
    if len(names) == 1 and acted("check", device=names[0], taken=("names",)):
        return 0
    from farm.cli.output import notice, written
    from farm.dispatch.notify.quarantine import announcing
    from farm.replay.check import CheckOutcome, check_devices

    with opened() as (config, store), announcing(config, store):
        # Leases of other users may begin and end during the check.
        leases = [*store.leases.all(), *store.leases.upcoming()]
        found = check_devices(config, store, names, wait_s or 0.0)
        leases += [*store.leases.all(), *store.leases.upcoming()]
    lines = [line for report in found for line in _check_lines(report.checked)]
    if save is not None:
        from farm.replay.check import transcript

        with written(save) as file:
            file.write(transcript(config, found, lines, leases))
        notice(f"wrote {save}: look through it before you publish it")
    shown = (short for line in lines for short in _folded(line))
    show({"devices": [one.checked for one in found]}, shown)
    outcomes = {one.checked.outcome for one in found}
    if not outcomes:
        notice("no device is attached: 'farm devices' shows the devices, and why others cannot be used")
    good = {CheckOutcome.FIT} if names else {CheckOutcome.FIT, CheckOutcome.NOT_CHECKED}
    return 0 if CheckOutcome.FIT in outcomes and outcomes <= good else ExitCode.INFRA


def _check_lines(checked: CheckedDevice) -> Iterator[str]:
    reason = f": {one_line(checked.reason)}" if checked.outcome == "not checked" else ""
    yield f"{one_line(checked.name)}: {checked.soc or 'SoC unknown'} {checked.kind}, {checked.outcome}{reason}"
    for one in checked.properties:
        yield f"  {one.level:<8} {one.name:<13} {one_line(one.line)}"


def _folded(line: str) -> list[str]:
    """Return a line of the check in lines of the terminal's width, the text in its column."""
    width = terminal_width()
    if len(line) <= width:
        return [line]
    head, text = line[:_TEXT_COLUMN], line[_TEXT_COLUMN:]
    first, *others = wrapped(text, max(20, width - _TEXT_COLUMN), "", whole_words=False)
    return [head + first, *(" " * _TEXT_COLUMN + one for one in others)]


@click.command("remove", short_help="Remove an absent device from every list.")
@click.argument("device")
@yes_option
@json_option()
def remove_command(*, device: str, yes: bool) -> None:
    """Remove an absent device from every list; its results stay.

    The name, labels, note and health are removed. A device that is attached
    again is listed again like a new one. A quarantine stays:
    farm devices unquarantine alone ends it.
    """
    with _device(device) as (store, known):
        require_consent(f"device {known.called} with its name, labels, note and health", yes=yes)
        store.devices.forget(known.id)
        lines = [f"{known.called} is removed; 'farm devices show {known.id}' still shows its history"]
        if known.health == "quarantined":
            end = f"'farm devices unquarantine {known.id}' ends that"
            lines.append(f"its quarantine stays, for when it is attached again: {end}")
        _show_changed(store, known.id, lines)


@click.command("show")
@click.argument("device")
@limit_option("Newest events.")
@json_option("Print JSON.")
def show_command(*, device: str, limit: int) -> None:
    """Show the facts of a device, and its health, event by event.

    The health check is always the same small program, so that its times show
    the drift of the device.
    """
    with _device(device, forgotten=True) as (store, known):
        events = store.devices.health_events(known.id, limit)
    show({"device": known, "events": events}, _lines(known, events))


def _lines(known: Registered, events: Sequence[HealthEvent]) -> Iterator[str]:
    yield f"{known.id}: {known.soc} {known.kind}, {known.health}"
    names = [f"called {known.name}"] if known.name else []
    names += [f"labels {', '.join(known.labels)}"] if known.labels else []
    if names:
        yield f"  {', '.join(names)}"
    if known.status is not None and known.status.addresses:
        first, *others = map(one_line, known.status.addresses)
        yield f"  at {first}, also at {', '.join(others)}, as 'farm devices' saw it last"
    if known.forgotten_ms:
        yield f"  removed on {_clock(known.forgotten_ms, _DATE)}: in no list until it is attached again"
    if known.health_reason:
        yield f"  {one_line(known.health_reason)}"
    if not known.in_service:
        by = f" by {known.service_user}" if known.service_user else ""
        yield f"  out of service{by}{f': {known.service_note}' if known.service_note else ''}"
    if not events:
        yield "  no event yet: the health check runs when a run begins on the device"
        return
    rows = [("when", "event", "then", "health check p50", "why")]
    for event in reversed(events):
        health_check = f"{statistics.median(event.latency_ns) / 1e6:.3f} ms" if event.latency_ns else ""
        rows.append((_clock(event.time_ms, _DATE), event.event, event.state, health_check, one_line(event.reason)))
    yield from ("", *columns(rows))


def _set_service(device: str, note: str, *, in_service: bool) -> None:
    if acted("enable" if in_service else "disable", device=device, note=note):
        return
    with _device(device) as (store, known):
        store.devices.set_service(known.id, in_service, note, store.user)
        line = f"{known.called} is {'in' if in_service else 'out of'} service"
        _show_changed(store, known.id, [line])


def _show_changed(store: Store, id_: str, lines: Sequence[str]) -> None:
    """Print a device after a change."""
    known = next(one for one in store.devices.all(forgotten=True) if one.id == id_)
    show({"device": known}, lines)


@contextmanager
def _device(name: str, *, forgotten: bool = False) -> Iterator[tuple[Store, Registered]]:
    from farm.dispatch.pool.inventory import resolve_device

    with opened() as (_, store):
        yield store, resolve_device(store, name, forgotten=forgotten)
