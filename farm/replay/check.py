"""Examination of attached devices, now: whether each is fit to be measured on. `farm devices check`."""

from __future__ import annotations

import logging
import secrets
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.errors import ConfigError, MissingToolError, UnknownNameError
from farm.base.processes import Supervisor
from farm.base.publish import own_folder
from farm.base.socs import find_soc, load_socs, no_profile
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundles_for
from farm.devices.device import Device
from farm.devices.discovery import ABSENT, Scan, scan_all
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.pool.device_pool import DevicePool
from farm.dispatch.pool.fleet import is_called, narrowed, out_of_use, runtimes_of
from farm.dispatch.pool.lease_keeper import LeaseTerms
from farm.dispatch.request.plan import RunPlan
from farm.policy.situation import Priority
from farm.replay.examination import Examined, examine
from farm.replay.properties import CheckedProperty, Level, Property, error, identity, profile
from farm.replay.stored_result import build_bundle
from farm.store.cluster.records import PlannedJob
from farm.store.leases.registry import Registered, Seen

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.runtime.runtime import Runtime
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
    properties: tuple[CheckedProperty, ...] = ()
    """Checked properties in order; for a device without an examination only its identity and profile."""


class CheckReport(msgspec.Struct, frozen=True):
    """Checked device with the answers behind it, for a transcript."""

    checked: CheckedDevice
    device: Device | None = None
    facts: dict[str, Any] = {}
    logs: dict[str, str] = {}
    """Log lines about the DSP, by kind."""


def check_devices(config: Config, store: Store, names: Sequence[str], wait_s: float) -> list[CheckReport]:
    """Examine the devices called `names`, and return the results.

    Without names the device of ANDROID_SERIAL is checked, else all attached devices.

    Each is leased meanwhile; the check waits `wait_s` for busy devices. The result of the health check is recorded as
    the health of the device. Raises UnknownNameError, MissingToolError.
    """
    with Supervisor() as supervisor:
        scan = scan_all(config, supervisor)
        if not names and scan.pinned is not None:
            names = sorted(one.id for one in narrowed(scan, names).devices)
        before = {one.id: one.soc for one in store.devices.all()}
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
                lines = identity(device, before.get(device.id, "")), profile(device)
                found.append(CheckReport(_checked(device, CheckOutcome.NOT_CHECKED, reason, lines), device))
            else:
                devices.append(device)
        if devices:
            found += _check(config, store, devices, before, wait_s, supervisor)
    order = list(CheckOutcome)
    return sorted(found, key=lambda one: (order.index(one.checked.outcome), one.checked.soc, one.checked.name))


def _refusal(device: Device, known: Registered) -> str:
    if device.soc not in load_socs():
        return no_profile(device.soc)
    return out_of_use(device, known)


def _unusable(
    scan: Scan, known: Mapping[str, Registered], attached: Iterable[Device], names: Sequence[str]
) -> Iterator[CheckReport]:
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
        lines = (error(Property.IDENTITY, unusable.state, unusable.reason),)
        yield CheckReport(
            CheckedDevice(unusable.serial, name, soc, kind, CheckOutcome.UNFIT, unusable.reason, properties=lines)
        )
    for name in sorted(missing):
        if (before := places.get(name)) is None:
            every = {one.called for one in known.values()}
            raise UnknownNameError("device", name, every, "('farm devices' shows what is attached)")
        lines = (error(Property.IDENTITY, ABSENT, "attach it; 'farm devices' shows the attached devices"),)
        reason = f"it is {ABSENT}"
        yield CheckReport(
            CheckedDevice(
                before.id, before.called, before.soc, before.kind, CheckOutcome.UNFIT, reason, properties=lines
            )
        )


def _check(
    config: Config,
    store: Store,
    devices: Sequence[Device],
    before: Mapping[str, str],
    wait_s: float,
    supervisor: Supervisor,
) -> list[CheckReport]:
    """Return the reports of usable devices; `before` has the SoCs of earlier times, by device."""
    token = f"check-{secrets.token_hex(6)}"
    terms = LeaseTerms(config.leases, Priority.PERSON, "farm devices check", None)
    with own_folder(config.cache_dir / "virtual", token) as folder:
        runtimes, missing = _runtimes(config, devices)
        usable = [one for one in devices if one.id in runtimes]
        plan = _plan(config, usable, runtimes, token, folder, supervisor) if usable else None
        pool = DevicePool(devices, store, terms)

        def examined(number: int) -> CheckReport:
            device = devices[number]
            program = (plan, plan.devices.index(device)) if plan is not None and device.id in runtimes else None
            answer = examine(
                device,
                before.get(device.id, ""),
                config.health,
                program,
                missing.get(device.id, ""),
                store.devices.record_health,
                folder / f"device-{number}",
            )
            return CheckReport(_judged(device, answer), device, answer.facts, answer.logs)

        try:
            pool.acquire(0.0)
            held = _wait(pool, devices, wait_s)
            with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as threads:
                found = list(threads.map(examined, held))
            busy = pool.leases.missed()
            for number, device in enumerate(devices):
                if number not in held:
                    why = busy.get(device.id, "others wait for it, and were first").removeprefix(f"{device.called} is ")
                    lines = identity(device, before.get(device.id, "")), profile(device)
                    found.append(CheckReport(_checked(device, CheckOutcome.NOT_CHECKED, why, lines), device))
            return found
        finally:
            pool.close()


def _runtimes(config: Config, devices: Sequence[Device]) -> tuple[dict[str, Runtime], dict[str, str]]:
    """Return the runtimes of devices, and the reasons for absent ones, by id."""
    found: dict[str, Runtime] = {}
    missing: dict[str, str] = {}
    for device in devices:
        try:
            made = runtimes_of(config, [find_soc(device.soc)], DEFAULT_BACKEND, [device])
            found[device.id] = made[device.serial]
        except (MissingToolError, ConfigError) as problem:
            missing[device.id] = str(problem)
    return found, missing


def _plan(
    config: Config,
    devices: Sequence[Device],
    runtimes: Mapping[str, Runtime],
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
        runtimes={device.serial: runtimes[device.id] for device in devices},
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


def _judged(device: Device, answer: Examined) -> CheckedDevice:
    """Return the result of an examination: a failed health check or an error makes a device unfit."""
    errors = [f"{one.name}: {one.line}" for one in answer.properties if one.level is Level.ERROR]
    reason = answer.problem or next(iter(errors), "")
    outcome = CheckOutcome.UNFIT if reason else CheckOutcome.FIT
    samples = answer.latency_ns
    latency_ms = statistics.median(samples) / 1e6 if samples and not reason else None
    return _checked(device, outcome, reason, answer.properties, latency_ms)


def _checked(
    device: Device,
    outcome: CheckOutcome,
    reason: str,
    properties: tuple[CheckedProperty, ...],
    latency_ms: float | None = None,
) -> CheckedDevice:
    return CheckedDevice(device.id, device.called, device.soc, device.kind, outcome, reason, latency_ms, properties)
