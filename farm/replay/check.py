"""The health check on attached devices, now: whether each is fit to be measured on. `farm devices check`."""

from __future__ import annotations

import contextlib
import logging
import secrets
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.errors import UnknownNameError
from farm.base.processes import Supervisor
from farm.base.publish import own_folder
from farm.base.socs import find_soc, load_socs, no_profile
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundles_for
from farm.devices.discovery import ABSENT, scan_all
from farm.dispatch.device_run.device_worker import DeviceWorker
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.pool.device_pool import DevicePool
from farm.dispatch.pool.fleet import is_called, narrowed, out_of_use, runtimes_of
from farm.dispatch.pool.lease_keeper import LeaseTerms
from farm.dispatch.request.plan import PlannedJob, RunPlan
from farm.policy.situation import Priority
from farm.replay.stored_result import build_bundle
from farm.store.leases.registry import Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.devices.device import Device
    from farm.devices.discovery import Scan
    from farm.store.leases.registry import Registered
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 16
_LOOK_SECONDS = 0.1
# A free device is given within a moment, but on a machine that is busy.
_GRACE_SECONDS = 15.0


class CheckOutcome(StrEnum):
    """How the check of a device ended; the first needs attention most."""

    UNFIT = "not fit"
    NOT_CHECKED = "not checked"
    FIT = "fit"


class CheckedDevice(msgspec.Struct, frozen=True):
    """Result of a device's health check."""

    id: str
    name: str
    """Name of the device in messages."""
    soc: str
    kind: str
    outcome: CheckOutcome
    reason: str = ""
    """Reason of a failed or omitted check."""
    latency_ms: float | None = None
    """Median of the health check's inferences."""


def check_devices(config: Config, store: Store, names: Sequence[str], wait_s: float) -> list[CheckedDevice]:
    """Run the health check on the devices called `names`, and return the results.

    Without names the device of ANDROID_SERIAL is checked, else all attached devices.

    Each is leased meanwhile; the check waits `wait_s` for busy devices. The result is recorded as the health of the
    device. Raises UnknownNameError, MissingToolError.
    """
    with Supervisor() as supervisor:
        scan = scan_all(config, supervisor)
        if not names and scan.pinned is not None:
            names = sorted(one.id for one in narrowed(scan, names).devices)
        store.devices.see([Seen(device, "device", None) for device in scan.devices])
        known = {one.id: one for one in store.devices.all()}
        # As people call them.
        attached = [
            msgspec.structs.replace(device, name=device.name or known[device.id].name)
            for device in scan.devices
            if not names or any(is_called(device, known.get(device.id), name) for name in names)
        ]
        found = list(_unusable(scan, known, attached, names))
        devices = []
        for device in attached:
            if reason := _refusal(device, known[device.id]):
                found.append(_checked(device, CheckOutcome.NOT_CHECKED, reason))
            else:
                devices.append(device)
        if devices:
            found += _check(config, store, devices, wait_s, supervisor)
    order = list(CheckOutcome)
    return sorted(found, key=lambda one: (order.index(one.outcome), one.soc, one.name))


def _refusal(device: Device, known: Registered) -> str:
    if device.soc not in load_socs():
        return no_profile(device.soc)
    return out_of_use(device, known)


def _unusable(
    scan: Scan, known: Mapping[str, Registered], attached: Iterable[Device], names: Sequence[str]
) -> Iterator[CheckedDevice]:
    """Yield devices that cannot be checked: attached but refused, or named but absent. Raises UnknownNameError."""
    places = {id_: one for one in known.values() for id_ in (one.id, one.serial, one.name) if id_}
    missing = {name for name in names if not any(is_called(one, known.get(one.id), name) for one in attached)}
    for unusable in scan.unusable:
        before = places.get(unusable.serial)
        called = {unusable.serial} | ({before.id, before.serial, before.name} if before is not None else set())
        if names and not called & missing:
            continue
        missing -= called
        if before is not None and not before.in_service:
            continue
        name, soc, kind = (before.called, before.soc, before.kind) if before is not None else (unusable.serial, "", "")
        yield CheckedDevice(unusable.serial, name, soc, kind, CheckOutcome.UNFIT, unusable.reason)
    for name in sorted(missing):
        if (before := places.get(name)) is None:
            every = {one.called for one in known.values()}
            raise UnknownNameError("device", name, every, "('farm devices' shows what is attached)")
        yield CheckedDevice(before.id, before.called, before.soc, before.kind, CheckOutcome.UNFIT, f"it is {ABSENT}")


def _check(
    config: Config,
    store: Store,
    devices: Sequence[Device],
    wait_s: float,
    supervisor: Supervisor,
) -> list[CheckedDevice]:
    token = f"check-{secrets.token_hex(6)}"
    terms = LeaseTerms(config.leases, Priority.PERSON, "farm devices check", None)
    with own_folder(config.cache_dir / "virtual", token) as folder:
        plan = _plan(config, devices, token, folder, supervisor)
        pool = DevicePool(devices, store, terms)
        try:
            pool.acquire(0.0)
            held = _wait(pool, devices, wait_s)
            with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as threads:
                answers = threads.map(lambda number: _probe(plan, number, store), held)
                found = [
                    _checked(devices[number], CheckOutcome.UNFIT if problem else CheckOutcome.FIT, problem, latency_ms)
                    for number, (problem, latency_ms) in zip(held, answers, strict=True)
                ]
            busy = pool.leases.missed()
            for number, device in enumerate(devices):
                if number not in held:
                    why = busy.get(device.id, "others wait for it, and were first").removeprefix(f"{device.called} is ")
                    found.append(_checked(device, CheckOutcome.NOT_CHECKED, why))
            return found
        finally:
            pool.close()


def _plan(
    config: Config,
    devices: Sequence[Device],
    token: str,
    folder: Path,
    supervisor: Supervisor,
) -> RunPlan:
    """Return a plan with the compiled health check of each SoC."""
    from farm.builds.toolchains.prepare import prepare

    socs = [find_soc(name) for name in dict.fromkeys(device.soc for device in devices)]
    tools, cache = prepare(config), BundleCache(config.cache_dir)
    jobs = {job.id: job for job in (health_check_job(soc.name, DEFAULT_BACKEND) for soc in socs)}
    health_checks = []
    for job_id, bundle in find_bundles_for(jobs.values(), tools, cache).items():
        if not bundle.cached:
            logger.info("compiling the health check of %s", jobs[job_id].target.soc)
            build_bundle(config, jobs[job_id], bundle.key, tools, supervisor)
        health_checks.append(PlannedJob(jobs[job_id], bundle.key, cached=True))
    return RunPlan(
        run_id=token,
        folder=folder,
        cache_root=config.cache_dir,
        jobs=(),
        devices=tuple(devices),
        runtimes=runtimes_of(config, socs, DEFAULT_BACKEND, devices),
        iterations=1,
        warm_up=0,
        timeout_s=config.build_timeout_s,
        artifact_root=config.state_dir / "artifacts",
        health_checks=tuple(health_checks),
        leased=True,
        health=config.health,
    )


def _wait(pool: DevicePool, devices: Sequence[Device], wait_s: float) -> list[int]:
    """Return the numbers of the leased devices: free ones at once, others within `wait_s`."""
    begin_s = time.monotonic()
    while True:
        ours = {device.id for device in pool.held()}
        lacking = {device.id for device in devices} - ours
        limit_s = wait_s if lacking <= pool.leases.missed().keys() else max(wait_s, _GRACE_SECONDS)
        if not lacking or time.monotonic() - begin_s >= limit_s:
            return [number for number, device in enumerate(devices) if device.id in ours]
        time.sleep(_LOOK_SECONDS)


def _probe(plan: RunPlan, number: int, store: Store) -> tuple[str, float | None]:
    """Return the problem of a device, empty for none, and the median latency of its health check in ms."""
    worker = DeviceWorker(plan, number, store.devices.record_health, lambda: False)
    try:
        worker.await_health_check()
        problem = worker.check()
        samples = worker.run.health_check_latency_ns
        return problem, statistics.median(samples) / 1e6 if samples and not problem else None
    finally:
        with contextlib.suppress(OSError):
            worker.close()
        worker.shut()


def _checked(device: Device, outcome: CheckOutcome, reason: str = "", latency_ms: float | None = None) -> CheckedDevice:
    return CheckedDevice(device.id, device.called, device.soc, device.kind, outcome, reason, latency_ms)
