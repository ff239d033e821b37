"""Progress of runs and leases of devices, which open pages poll."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from farm.dispatch.pool.inventory import DeviceRow, remembered
from farm.policy.situation import Lease
from farm.report.model import format as fmt
from farm.report.model.status import progress_text
from farm.serve.page import Facts
from farm.store.queries.browse import Progress
from farm.store.store import Store


class ProgressQuery(msgspec.Struct, frozen=True):
    """Parameters of the progress: none."""


class RunProgress(Progress, frozen=True):
    """Progress of a run, and its text."""

    done: int
    text: str


class DeviceProgress(msgspec.Struct, frozen=True):
    """State of a device that changes while a page is open."""

    id: str
    state: str
    held: str
    """Holder in words."""
    health: str
    reason: str


class ProgressFacts(Facts, frozen=True, kw_only=True):
    """Progress of the last day's runs and holders of all devices."""

    schema: int = 2
    path: ClassVar[str] = "/progress"
    runs: list[RunProgress]
    devices: list[DeviceProgress]


def progress_page(store: Store, query: ProgressQuery) -> ProgressFacts:
    """Return the progress of runs and the leases of devices."""
    del query
    return ProgressFacts(
        title="Progress",
        runs=[
            RunProgress(**msgspec.structs.asdict(one), done=one.done, text=progress_text(one))
            for one in store.browse.progress()
        ],
        devices=[
            DeviceProgress(id=row.id, state=row.state, held=held(row), health=row.health, reason=row.health_reason)
            for row in device_rows(store)
        ],
    )


def device_rows(store: Store) -> list[DeviceRow]:
    """Return every device in the store, sorted by name."""
    leases: dict[str, Lease] = {lease.device: lease for lease in store.leases.all()}
    rows = [remembered(one, leases.get(one.id)) for one in store.devices.all()]
    return sorted(rows, key=lambda row: (row.name or row.serial or row.id, row.id))


def held(row: DeviceRow) -> str:
    """Return holder, end of the reservation and purpose of a device; empty for a free device."""
    if not row.holder:
        return ""
    until = f" until {fmt.clock(row.until_ms)}" if row.until_ms else ""
    return f"{row.holder}{until}{f', {row.purpose}' if row.purpose else ''}"
