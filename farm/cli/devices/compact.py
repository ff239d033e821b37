"""Many devices, one line each, and the processes that wait for them: devices that need attention come first. Pure."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from farm.base.text import one_line
from farm.devices.discovery import ABSENT, OUT
from farm.dispatch.pool.inventory import DeviceRow
from farm.report.model.format import short_age

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from farm.policy.situation import Waiting

ATTENTION = "NEEDS ATTENTION"
_GROUPS = (ATTENTION, "IN USE", "FREE", "OUT OF SERVICE", "ABSENT")
# Limit of names, which leaves a third of 80 columns for the reason.
_NAME_CHARACTERS = 24


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
        return ATTENTION if row.reason and row.in_service else "ABSENT"
    if row.state != "ready" or row.health != "healthy":
        return ATTENTION
    return "IN USE" if row.holder else "FREE"


def _name(row: DeviceRow) -> str:
    return one_line(row.name or row.serial, _NAME_CHARACTERS)


def _text(title: str, row: DeviceRow) -> str:
    """Return the details of a device that matter in its group."""
    holder = holder_of(row)
    if title == ATTENTION:
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


def holder_of(row: DeviceRow) -> str:
    """Return the user of a device, with the end of a reservation; "" for a free device."""
    if not row.holder:
        return ""
    until = time.strftime(" until %H:%M", time.localtime(row.until_ms / 1000)) if row.until_ms else ""
    return f"{row.holder}{until}"
