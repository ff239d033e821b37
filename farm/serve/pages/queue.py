"""Queue: who waits for devices, who has them, and submitted runs of a shared farm."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from farm.base.errors import UsageError
from farm.dispatch.pool.inventory import DeviceRow, wanted_of
from farm.policy.situation import Waiting
from farm.report.model import format as fmt
from farm.serve.page import Facts
from farm.serve.pages.progress import device_rows
from farm.store.cluster.records import ShardSum

if TYPE_CHECKING:
    from farm.store.store import Store


class QueueQuery(msgspec.Struct, frozen=True):
    """Parameters of the queue: none."""


class SubmittedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Submitted run that has not ended."""

    run_id: str
    user: str
    priority: str
    purpose: str
    state: str
    submitted_ms: int
    waiting: int
    """Shards without a device."""
    held: int
    """Shards that a device runs."""
    ended: int
    lacking: int
    """Bundles that are not built yet."""


class QueueFacts(Facts, frozen=True, kw_only=True):
    """Requests for devices and their holders."""

    template: ClassVar[str] = "queue.html.j2"
    waiting: list[Waiting]
    wanted: list[str]
    """Target of each waiting command in words."""
    held: list[DeviceRow]
    """Devices with a lease or a reservation."""
    free: dict[str, int]
    """Free devices by SoC."""
    runs: list[SubmittedRun]
    shards: list[ShardSum]
    """Sums over the shards of submitted runs, by run and SoC."""
    quotas: dict[str, int]


def queue_page(store: Store, query: QueueQuery) -> QueueFacts:
    """Return the queue."""
    del query
    rows = device_rows(store)
    waiting, known = store.leases.waiting(), {row.id: row for row in rows}
    free: dict[str, int] = {}
    for row in rows:
        free[row.soc] = free.get(row.soc, 0) + (row.state == "idle")
    runs: list[SubmittedRun] = []
    shards: tuple[ShardSum, ...] = ()
    quotas: dict[str, int] = store.quotas.all()
    try:
        view = store.cluster.queue()
    except UsageError:
        # A store in a file has no submitted runs.
        view = None
    if view is not None:
        shards = view.sums
        names = ("run_id", "user", "purpose", "submitted_ms", "waiting", "held", "ended", "lacking")
        runs = [
            SubmittedRun(
                **{name: getattr(one, name) for name in names},
                priority=one.priority.name.lower(),
                state=str(one.state),
            )
            for one in view.orders
        ]
    held = [row for row in rows if row.holder]
    title = f"Queue: {fmt.plural(len(waiting) + len(runs), 'request')}, {len(held)} of {len(rows)} devices in use"
    return QueueFacts(
        title=title,
        waiting=waiting,
        wanted=[wanted_of(one, known) for one in waiting],
        held=held,
        free=free,
        runs=runs,
        shards=list(shards),
        quotas=quotas,
    )
