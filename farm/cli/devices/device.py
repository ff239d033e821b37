"""`farm devices`: names, labels and service state of a device, and its health."""

from __future__ import annotations

import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from farm.base.exit_codes import ExitCode
from farm.base.text import one_line
from farm.cli.options import OUTPUT_FILE, duration, json_option, limit_option, yes_option
from farm.cli.output import acted, opened, require_consent, show, width
from farm.report.terminal.layout import columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from farm.devices.health import HealthEvent
    from farm.replay.check import CheckedDevice
    from farm.store.leases.registry import Registered
    from farm.store.store import Store


_TEXT_COLUMN = 25


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
    from farm.devices.health import Event, Health, HealthEvent, HealthMark, next_health

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
        from farm.replay.transcript import transcript

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
    if len(line) <= width():
        return [line]
    head, text = line[:_TEXT_COLUMN], line[_TEXT_COLUMN:]
    first, *others = wrapped(text, max(20, width() - _TEXT_COLUMN), "", whole_words=False)
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
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(known.forgotten_ms / 1000))
        yield f"  removed on {when}: in no list until it is attached again"
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
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(event.time_ms / 1000))
        health_check = f"{statistics.median(event.latency_ns) / 1e6:.3f} ms" if event.latency_ns else ""
        rows.append((when, event.event, event.state, health_check, one_line(event.reason)))
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
