"""Waiting runs of a shared farm, their reasons and expected times, from one view of the store. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from farm.base.grouping import grouped
from farm.policy.situation import OpenOrder, Priority, Situation, usable
from farm.policy.waits import Work, expect, why_waiting

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from farm.store.cluster.records import Order, QueueView

# Expected time of a build without any history.
_BUILD_SECONDS = 4.0


class QueuedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Submitted run that is not over."""

    run_id: str
    user: str
    priority: str
    """`person` or `nightly`."""
    command: str
    cancelled: bool
    submitted_ms: int
    """Time of submission on the database's clock; epoch, milliseconds."""
    socs: tuple[str, ...]
    waiting: int
    """Waiting shards: about a minute of work each."""
    running: int
    """Devices that work for the run."""
    ended: int
    """Finished shards."""
    lacking: int
    """Bundles still to be compiled."""
    why: tuple[str, ...]
    """Reasons for waiting, one line for each SoC; empty without waiting shards."""
    starts_s: float | None
    """Expected seconds until its next shard begins; 0 while one runs, None without a living device that can run it."""
    ends_s: float | None
    """Expected seconds until it ends; None for unknown."""


def queued(view: QueueView) -> list[QueuedRun]:
    """Return the runs that are not over, by priority and time of submission."""
    expected = expect(_works(view), {soc: len(one.devices) for soc, one in view.situations.items()}, view.quotas)
    several = len(view.situations) > 1
    reasons = grouped(
        (run_id, f"{soc}: {why}" if several else why)
        for soc, situation in sorted(view.situations.items())
        for run_id, why in why_waiting(situation).items()
    )
    socs = grouped((one.run_id, one.soc) for one in view.sums)
    rows = []
    for order in view.orders:
        about = expected.get(order.run_id)
        rows.append(
            QueuedRun(
                run_id=order.run_id,
                user=order.user,
                priority=Priority(order.priority).name.lower(),
                command=order.purpose,
                cancelled=bool(order.cancelled_by),
                submitted_ms=order.submitted_ms,
                socs=tuple(sorted(socs.get(order.run_id, ()))),
                waiting=order.waiting,
                running=order.held,
                ended=order.ended,
                lacking=order.lacking,
                why=tuple(reasons.get(order.run_id, ())),
                starts_s=None if about is None else _finite(about.starts_s),
                ends_s=None if about is None else _finite(about.ends_s),
            )
        )
    return rows


def why_it_waits(view: QueueView, run_id: str) -> str:
    """Return a line with the reasons why a run waits; empty while a shard runs, and without waiting shards."""
    run = next((one for one in queued(view) if one.run_id == run_id), None)
    return "" if run is None or run.running or not run.why else "; ".join(run.why)


def _works(view: QueueView) -> Iterable[Work]:
    orders = {order.run_id: order for order in view.orders}
    builds_s = _builds_s(view)
    could_begin = {
        (soc, order.run_id)
        for soc, situation in view.situations.items()
        for order in situation.orders
        if order.ready or order.retries
    }
    for one in view.sums:
        order = orders.get(one.run_id)
        if order is None:
            continue
        situation = view.situations.get(one.soc)
        may, free_s = _unreserved(order, situation)
        yield Work(
            run_id=one.run_id,
            soc=one.soc,
            user=order.user,
            priority=order.priority,
            since_ms=order.submitted_ms,
            waiting_s=one.waiting_s,
            waiting=one.waiting,
            held_s=one.held_s,
            held=one.held,
            devices=min(may, order.most_devices or may),
            first_build_s=0.0 if (one.soc, one.run_id) in could_begin else builds_s[one.run_id][0],
            builds_s=builds_s[one.run_id][1],
            free_s=free_s,
        )


def _unreserved(order: Order, situation: Situation | None) -> tuple[int, float]:
    """Return how many devices a run may use, and the seconds until the first of them is free of reservations.

    Devices that are reserved for others count only if all devices are.
    """
    if situation is None:
        return 0, 0.0
    devices = usable(_open(order), situation.devices)
    ends_ms = {
        lease.device: lease.reserved_until_ms
        for lease in situation.leases
        if lease.reserved_by(situation.now_ms) not in ("", order.user)
    }
    ours = [device for device in devices if device not in ends_ms]
    if ours or not devices:
        return len(ours), 0.0
    return len(devices), (min(ends_ms[device] for device in devices) - situation.now_ms) / 1000


def _open(order: Order) -> OpenOrder:
    return OpenOrder(
        order.run_id, order.user, order.priority, order.submitted_ms, order.waiting,
        devices=order.devices, labels=order.labels, kinds=order.classes,
    )  # fmt: skip


def _builds_s(view: QueueView) -> Mapping[str, tuple[float, float]]:
    """Return the expected seconds until each run's first shard is compiled, and until all are; runs one by one."""
    hosts = max(1, sum(agent.alive and bool(agent.facts.toolchains) for agent in view.agents))
    before_s, found = 0.0, {}
    for order in view.orders:
        own_s = order.lacking * _BUILD_SECONDS / hosts
        first_s = before_s + own_s / max(1, order.waiting)
        found[order.run_id] = (first_s, before_s + own_s) if order.lacking else (0.0, 0.0)
        before_s += own_s
    return found


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
