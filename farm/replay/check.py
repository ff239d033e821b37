"""Examination of attached devices, now: whether each is fit to be measured on. `farm devices check`."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.config.settings import Config, HealthConfig
from farm.base.errors import ConfigError, DeviceError, FarmError, MissingToolError, UnknownNameError
from farm.base.files import own_folder
from farm.base.processes import Supervisor
from farm.base.socs import load_socs, no_profile
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundles_for
from farm.builds.runtime.parts import ElfHeader, read_elf
from farm.builds.runtime.runtime import Runtime
from farm.devices.connect import open_transport
from farm.devices.device import Device
from farm.devices.discovery import ABSENT, Scan, scan_all
from farm.devices.execution.content_store import SESSION_PREFIX
from farm.devices.execution.liveness import collect_crash_logs
from farm.devices.facts import PlatformFacts, denials, read_platform, read_status
from farm.devices.transport import Transport
from farm.dispatch.device_run.device_worker import DeviceWorker
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms
from farm.dispatch.pool.fleet import is_called, narrowed, out_of_use, runtimes_of
from farm.dispatch.request.request import RunPlan
from farm.policy.situation import Priority
from farm.replay import properties
from farm.replay.properties import (
    MOST_PUSH_SECONDS,
    CheckedProperty,
    HealthCheckResult,
    Level,
    Property,
    error,
    identity,
    not_checked,
    profile,
)
from farm.replay.stored_result import build_bundle
from farm.store.cluster.records import PlannedJob
from farm.store.leases.registry import Registered, Seen
from farm.store.store import Store

logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 16
_LOOK_SECONDS = 0.1
# A free device is given within a moment, but on a machine that is busy.
_GRACE_SECONDS = 15.0
# A first file shows a slow link; the second one is long enough to measure a fast one.
_PROBE_BYTES, _PUSH_BYTES = 128 << 10, 16 << 20
_FAST_BYTES_PER_S = 1 << 20
_REMOVE_SECONDS = 20.0


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


def check_devices(config: Config, store: Store, names: Sequence[str], wait_s: float) -> list[CheckedDevice]:
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
        socs = load_socs()
        reasons = [
            out_of_use(known[one.id], one.called) if one.soc in socs else no_profile(one.soc) for one in attached
        ]
        judged = list(zip(attached, reasons, strict=True))
        found = list(_unusable(scan, known, attached, names))
        found += [_not_checked(device, before.get(device.id, ""), reason) for device, reason in judged if reason]
        if devices := [device for device, reason in judged if not reason]:
            found += _check(config, store, devices, before, wait_s, supervisor)
    order = list(CheckOutcome)
    return sorted(found, key=lambda one: (order.index(one.outcome), one.soc, one.name))


def _not_checked(device: Device, soc_before: str, reason: str) -> CheckedDevice:
    lines = identity(device, soc_before), profile(device)
    outcome = CheckOutcome.NOT_CHECKED
    return CheckedDevice(device.id, device.called, device.soc, device.kind, outcome, reason, properties=lines)


def _unfit(id_: str, known: Registered | None, reason: str, line: CheckedProperty) -> CheckedDevice:
    """Return the report of a device that cannot be asked."""
    name, soc, kind = (known.called, known.soc, known.kind) if known is not None else (id_, "", "")
    return CheckedDevice(id_, name, soc, kind, CheckOutcome.UNFIT, reason, properties=(line,))


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
        line = error(Property.IDENTITY, unusable.state, unusable.reason)
        yield _unfit(unusable.serial, before, unusable.reason, line)
    for name in sorted(missing):
        if (before := places.get(name)) is None:
            every = {one.called for one in known.values()}
            raise UnknownNameError("device", name, every, "('farm devices' lists attached devices)")
        line = error(Property.IDENTITY, ABSENT, "attach it; 'farm devices' shows the attached devices")
        yield _unfit(before.id, before, f"it is {ABSENT}", line)


def _check(
    config: Config,
    store: Store,
    devices: Sequence[Device],
    before: Mapping[str, str],
    wait_s: float,
    supervisor: Supervisor,
) -> list[CheckedDevice]:
    """Return the reports of usable devices; `before` has the SoCs of earlier times, by device."""
    token = f"check-{secrets.token_hex(6)}"
    terms = LeaseTerms(config.leases, Priority.PERSON, "farm devices check", None)
    with own_folder(config.cache_dir / "virtual", token) as folder:
        runtimes, missing = _runtimes(config, devices)
        usable = [one for one in devices if one.id in runtimes]
        plan = _plan(config, usable, runtimes, token, folder, supervisor) if usable else None
        pool = DevicePool(devices, store, terms)

        def examined(number: int) -> CheckedDevice:
            device = devices[number]
            worker = None
            if plan is not None and device.id in runtimes:
                worker = DeviceWorker(plan, plan.devices.index(device), store.devices.record_health, lambda: False)
            transport = worker.run.transport if worker is not None else open_transport(device)
            soc_before, why_not = before.get(device.id, ""), missing.get(device.id, "")
            place = folder / f"device-{number}"
            try:
                return _Examination(device, soc_before, config.health, transport, worker, why_not, place).report()
            finally:
                if worker is not None:
                    with contextlib.suppress(OSError):
                        worker.end_session()
                    worker.close()
                transport.close()

        try:
            pool.acquire(0.0)
            held = _wait(pool, devices, wait_s)
            with ThreadPoolExecutor(max_workers=_MOST_AT_ONCE) as threads:
                found = list(threads.map(examined, held))
            busy = pool.missed()
            for number, device in enumerate(devices):
                if number not in held:
                    why = busy.get(device.id, "others wait for it, and were first").removeprefix(f"{device.called} is ")
                    found.append(_not_checked(device, before.get(device.id, ""), why))
            return found
        finally:
            pool.close()


def _runtimes(config: Config, devices: Sequence[Device]) -> tuple[dict[str, Runtime], dict[str, str]]:
    """Return the runtimes of devices, and the reasons for absent ones, by id."""
    found: dict[str, Runtime] = {}
    missing: dict[str, str] = {}
    for device in devices:
        try:
            made = runtimes_of(config, DEFAULT_BACKEND, [device])
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
    from farm.builds.toolchains.selection import prepare

    tools, cache = prepare(config), BundleCache(config.cache_dir)
    jobs = {job.id: job for job in (health_check_job(device.soc, DEFAULT_BACKEND) for device in devices)}
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
        limit_s = wait_s if lacking <= pool.missed().keys() else max(wait_s, _GRACE_SECONDS)
        if not lacking or time.monotonic() - begin_s >= limit_s:
            return [number for number, device in enumerate(devices) if device.id in ours]
        time.sleep(_LOOK_SECONDS)


@dataclass
class _Examination:
    """Examination of a device that this process has leased; local files are in `folder`.

    `worker` runs the health check; None for an absent runtime, where `missing` is the reason.
    """

    device: Device
    soc_before: str
    limits: HealthConfig
    transport: Transport
    worker: DeviceWorker | None
    missing: str
    folder: Path

    def __post_init__(self) -> None:
        runtime = self.worker.run.runtime if self.worker is not None else None
        self._headers = _headers(runtime)
        self._runtime_bytes = sum(path.stat().st_size for path in runtime.files.values()) if runtime else 0
        self._lines: dict[Property, CheckedProperty] = {}

    def report(self) -> CheckedDevice:
        """Return the result: a failed health check or an error makes a device unfit."""
        started = time.time()
        device = self.device
        self._note(identity(device, self.soc_before))
        self._note(profile(device))
        try:
            status = read_status(self.transport, os=device.os)
        except DeviceError as problem:
            for name in (Property.ROOM, Property.TEMPERATURE):
                self._note(not_checked(name, problem.problem))
        else:
            self._note(properties.room(status, self._runtime_bytes))
            self._note(properties.temperature(status, self.limits))
        try:
            is_root = self.transport.user_id() == 0
            self._note(properties.root(is_root=is_root, refusal="" if is_root else self.transport.root_refusal()))
        except DeviceError as problem:
            self._note(not_checked(Property.ROOT, problem.problem))
        try:
            platform = read_platform(self.transport)
        except DeviceError:
            platform = PlatformFacts()
        self._note(properties.page_size(platform, self._headers))
        speed: float | None = None
        try:
            speed = self._push_speed()
            self._note(properties.push_speed(speed, self._runtime_bytes))
        except DeviceError as problem:
            self._note(error(Property.PUSH, problem.problem))
        checked = self._run_health_check(speed)
        denied: tuple[str, ...] = ()
        if speed is not None:
            logs = collect_crash_logs(self.transport, device.os, self.folder / "check-logs", since=started)
            denied = denials(path.read_text(encoding="utf-8") for path in logs.values())
        self._note(properties.selinux(platform, denied))
        self._note(properties.domain(device, platform, checked))
        self._note(properties.skel(device, self._headers, checked, self.missing))
        self._note(properties.health(checked))
        self._note(properties.latencies(checked))
        lines = tuple(self._lines[name] for name in Property)
        reason = checked.problem or next((f"{one.name}: {one.line}" for one in lines if one.level is Level.ERROR), "")
        outcome = CheckOutcome.UNFIT if reason else CheckOutcome.FIT
        latency_ms = statistics.median(checked.latency_ns) / 1e6 if checked.latency_ns and not reason else None
        return CheckedDevice(device.id, device.called, device.soc, device.kind, outcome, reason, latency_ms, lines)

    def _note(self, line: CheckedProperty) -> None:
        self._lines[line.name] = line

    def _push_speed(self) -> float:
        """Push random bytes, and remove them; return bytes per second."""
        place = self.transport.storage / f"{SESSION_PREFIX}check-{os.getpid()}"
        try:
            for nbytes in (_PROBE_BYTES, _PUSH_BYTES):
                data = os.urandom(nbytes)
                begin_s = time.perf_counter()
                self.transport.push({place / "data": data})
                speed = nbytes / (time.perf_counter() - begin_s)
                if speed < _FAST_BYTES_PER_S:
                    break
            return speed
        finally:
            with contextlib.suppress(DeviceError):
                self.transport.run(["rm", "-rf", str(place)], timeout_s=_REMOVE_SECONDS)

    def _run_health_check(self, speed: float | None) -> HealthCheckResult:
        worker = self.worker
        if worker is None:
            return HealthCheckResult(f"the runtime is incomplete ({self.missing})", skipped=True)
        if speed is not None and (seconds := self._runtime_bytes / max(speed, 1.0)) > MOST_PUSH_SECONDS:
            return HealthCheckResult(f"its files would take {seconds / 60:.0f} min to push", skipped=True)
        worker.await_health_check()
        problem = worker.check()
        return HealthCheckResult(
            problem, worker.run.health_check_cause, () if problem else worker.run.health_check_latency_ns
        )


def _headers(runtime: Runtime | None) -> dict[str, ElfHeader]:
    """Return the headers of the ELF files of a runtime; stubs of tests may have scripts."""
    found = {}
    for name, path in (runtime.files if runtime is not None else {}).items():
        with contextlib.suppress(FarmError, OSError):
            found[name] = read_elf(path)
    return found
