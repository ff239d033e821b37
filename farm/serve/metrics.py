"""`/metrics`: devices, queue, jobs and wear in the format of Prometheus."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from farm.serve.pages.progress import device_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from farm.store.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WINDOW_S = 86_400
"""Runs that started within this time are counted by verdict, cause and device."""
# Several Prometheus servers of a lab read the store once: counting all attempts of a million takes a tenth of a second.
_KEPT_S = 10.0


class Metrics:
    """Text of the last reading, kept for some seconds. Any thread may call it."""

    def __init__(self, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._text, self._read_s = b"", float("-inf")

    def read(self, store: Store) -> bytes:
        """Return all metrics. Raises StoreError."""
        with self._lock:
            if time.monotonic() >= self._read_s + _KEPT_S:
                registry = CollectorRegistry(auto_describe=False)
                registry.register(_Families(families(store, is_shared=self._is_shared)))
                self._text, self._read_s = generate_latest(registry), time.monotonic()
            return self._text


class _Families:
    """Collector of metrics that were read already."""

    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = list(found)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics."""
        return iter(self._found)


def families(store: Store, *, is_shared: bool) -> Iterator[Metric]:
    """Yield all metrics of a store."""
    rows, waiting, now_ms = device_rows(store), store.leases.waiting(), time.time_ns() // 1_000_000
    devices = GaugeMetricFamily(
        "farm_devices", "Devices by state.", labels=["soc", "kind", "state", "health", "leased"]
    )
    labels = Counter((row.soc, row.kind, row.state, row.health, "yes" if row.holder else "no") for row in rows)
    for label, count in sorted(labels.items()):
        devices.add_metric(label, count)
    yield devices

    soc_of = {row.id: row.soc for row in rows}
    commands: dict[str, list[int]] = {}
    for one in waiting:
        for soc in {soc_of.get(device, "") for device in one.devices}:
            commands.setdefault(soc, []).append(one.since_ms)
    queue = GaugeMetricFamily("farm_queue_commands", "Commands that wait for a device.", labels=["soc"])
    oldest = GaugeMetricFamily("farm_queue_oldest_seconds", "Longest wait for a device.", labels=["soc"])
    for soc, since in sorted(commands.items()):
        queue.add_metric([soc], len(since))
        oldest.add_metric([soc], max(0.0, (now_ms - min(since)) / 1000))
    yield from (queue, oldest)
    if is_shared:
        yield from _shards(store)
    yield from _attempts(store, now_ms - WINDOW_S * 1000)


def _shards(store: Store) -> Iterator[Metric]:
    view = store.cluster.queue()
    shards = GaugeMetricFamily("farm_queue_shards", "Shards of submitted runs.", labels=["soc", "state"])
    seconds = GaugeMetricFamily("farm_queue_work_seconds", "Expected device time of waiting shards.", labels=["soc"])
    totals: dict[str, tuple[int, int, float]] = {}
    for one in view.sums:
        waiting, held, work_s = totals.get(one.soc, (0, 0, 0.0))
        totals[one.soc] = waiting + one.waiting, held + one.held, work_s + one.waiting_s
    for soc, (waiting, held, work_s) in sorted(totals.items()):
        shards.add_metric([soc, "waiting"], waiting)
        shards.add_metric([soc, "held"], held)
        seconds.add_metric([soc], work_s)
    agents = GaugeMetricFamily("farm_agents", "Agents that send heartbeats, and silent ones.", labels=["state"])
    alive = Counter("alive" if one.alive else "silent" for one in view.agents)
    for state in ("alive", "silent"):
        agents.add_metric([state], alive[state])
    yield from (shards, seconds, agents)


def _attempts(store: Store, since_ms: int) -> Iterator[Metric]:
    jobs: Counter[tuple[str, str, str]] = Counter()
    infra: Counter[tuple[str, str]] = Counter()
    busy: Counter[tuple[str, str, str]] = Counter()
    for one in store.metrics.attempts(since_ms):
        kind = one.kind or ""
        if one.decides:
            jobs[one.soc, kind, one.verdict] += one.attempts
        if one.verdict == "infra":
            infra[one.soc, one.cause] += one.attempts
        if one.serial:
            busy[one.device_soc or "", kind, one.serial] += one.seconds  # type: ignore[assignment]
    window = "runs of the last 24 hours"
    verdicts = GaugeMetricFamily("farm_jobs", f"Jobs of {window} by verdict.", labels=["soc", "kind", "verdict"])
    causes = GaugeMetricFamily("farm_infra_attempts", f"Infra attempts of {window} by cause.", labels=["soc", "cause"])
    utilization = GaugeMetricFamily(
        "farm_device_utilization", f"Share of 24 hours in attempts of {window}.", labels=["soc", "kind", "device"]
    )
    for family, found, scale in ((verdicts, jobs, 1), (causes, infra, 1), (utilization, busy, WINDOW_S)):
        for label, value in sorted(found.items()):
            family.add_metric(label, value / scale)
    wear = CounterMetricFamily("farm_device_attempts", "Attempts of all time.", labels=["soc", "kind", "device"])
    for device in store.metrics.wear():
        wear.add_metric([device.soc, device.kind, device.serial], device.attempts)
    yield from (verdicts, causes, utilization, wear)
