"""`/metrics`: devices, queue, jobs and wear in the format of Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from farm.serve.pages.progress import device_rows
from farm.store.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WINDOW_S = 86_400
"""Runs that started within this time are counted by verdict, cause and device."""


class StoreCollector(Collector):
    """Collector of the metrics of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. Raises StoreError."""
        now_ms = time.time_ns() // 1_000_000
        yield from _devices(self._store, now_ms)
        if self._store.is_shared:
            yield from _shards(self._store)
        yield from _attempts(self._store, now_ms - WINDOW_S * 1000)


def _devices(store: Store, now_ms: int) -> Iterator[Metric]:
    rows = device_rows(store)
    labels = ("soc", "kind", "state", "health", "leased")
    states: Counter[tuple[str, ...]] = Counter(
        (row.soc, row.kind, row.state, row.health, "yes" if row.holder else "no") for row in rows
    )
    yield _gauge("farm_devices", "Devices by state.", labels, states)
    soc_of = {row.id: row.soc for row in rows}
    since: dict[tuple[str, ...], list[int]] = {}
    for one in store.leases.waiting():
        for soc in {soc_of.get(device, "") for device in one.devices}:
            since.setdefault((soc,), []).append(one.since_ms)
    waits = {soc: max(0.0, (now_ms - min(begins)) / 1000) for soc, begins in since.items()}
    waiting = {soc: len(begins) for soc, begins in since.items()}
    yield _gauge("farm_queue_commands", "Commands that wait for a device.", ("soc",), waiting)
    yield _gauge("farm_queue_oldest_seconds", "Longest wait for a device.", ("soc",), waits)


def _shards(store: Store) -> Iterator[Metric]:
    view = store.cluster.queue()
    shards: Counter[tuple[str, ...]] = Counter()
    seconds: dict[tuple[str, ...], float] = {}
    for one in view.sums:
        shards[one.soc, "waiting"] += one.waiting
        shards[one.soc, "held"] += one.held
        seconds[one.soc,] = seconds.get((one.soc,), 0.0) + one.waiting_s
    yield _gauge("farm_queue_shards", "Shards of submitted runs.", ("soc", "state"), shards)
    yield _gauge("farm_queue_work_seconds", "Expected device time of waiting shards.", ("soc",), seconds)
    alive = sum(one.alive for one in view.agents)
    agents: dict[tuple[str, ...], float] = {("alive",): alive, ("silent",): len(view.agents) - alive}
    yield _gauge("farm_agents", "Agents that send heartbeats, and silent ones.", ("state",), agents)


def _attempts(store: Store, since_ms: int) -> Iterator[Metric]:
    jobs: Counter[tuple[str, ...]] = Counter()
    infra: Counter[tuple[str, ...]] = Counter()
    busy: dict[tuple[str, ...], float] = {}
    for one in store.browse.attempt_counts(since_ms):
        kind = one.kind or ""
        if one.decides:
            jobs[one.soc, kind, one.verdict] += one.attempts
        if one.verdict == "infra":
            infra[one.soc, one.cause] += one.attempts
        if one.serial:
            device = (one.device_soc or "", kind, one.serial)
            busy[device] = busy.get(device, 0.0) + one.seconds / WINDOW_S
    window, of_device = "runs of the last 24 hours", ("soc", "kind", "device")
    yield _gauge("farm_jobs", f"Jobs of {window} by verdict.", ("soc", "kind", "verdict"), jobs)
    yield _gauge("farm_infra_attempts", f"Infra attempts of {window} by cause.", ("soc", "cause"), infra)
    yield _gauge("farm_device_utilization", f"Share of 24 hours in attempts of {window}.", of_device, busy)
    wear = CounterMetricFamily("farm_device_attempts", "Attempts of all time.", labels=of_device)
    for worn in store.browse.wear():
        wear.add_metric([worn.soc, worn.kind, worn.serial], worn.attempts)
    yield wear


def _gauge(name: str, about: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=labels)
    for label, value in sorted(values.items()):
        family.add_metric(label, value)
    return family
