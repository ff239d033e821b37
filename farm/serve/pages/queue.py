"""Queue: who waits for devices, who has them, and submitted runs of a shared farm."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from farm.dispatch.cluster.queue import QueuedRun, queued
from farm.dispatch.pool.inventory import DeviceRow, wanted_of
from farm.policy.situation import Waiting
from farm.report.model import format as fmt
from farm.serve.page import Facts
from farm.serve.pages.progress import device_rows
from farm.store.cluster.records import ShardSum
from farm.store.store import Store


class QueueQuery(msgspec.Struct, frozen=True):
    """Filter of the queue."""

    mine: bool = False
    """Only runs and commands of the user."""


class QueueFacts(Facts, frozen=True, kw_only=True):
    """Requests for devices and their holders."""

    path: ClassVar[str] = "/queue"
    template: ClassVar[str] = "queue.html.j2"
    waiting: list[Waiting]
    wanted: list[str]
    """Target of each waiting command in words."""
    held: list[DeviceRow]
    """Devices with a lease or a reservation."""
    free: dict[str, int]
    """Free devices by SoC."""
    schema: int = 2
    runs: list[QueuedRun]
    """Submitted runs that have not ended."""
    shards: list[ShardSum]
    """Sums over the shards of submitted runs, by run and SoC."""
    quotas: dict[str, int]


def queue_page(store: Store, query: QueueQuery) -> QueueFacts:
    """Return the queue."""
    rows = device_rows(store)
    known = {row.id: row for row in rows}
    waiting = [one for one in store.leases.waiting() if not query.mine or one.user == store.user]
    free: dict[str, int] = {}
    for row in rows:
        free[row.soc] = free.get(row.soc, 0) + (row.state == "idle")
    runs: list[QueuedRun] = []
    shards: tuple[ShardSum, ...] = ()
    # A store in a file has no submitted runs.
    if store.is_shared:
        view = store.cluster.queue()
        shards, runs = view.sums, [one for one in queued(view) if not query.mine or one.user == store.user]
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
        quotas=store.quotas.all(),
    )
