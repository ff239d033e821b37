"""Examination of attached devices, now, and its transcript for a bug report. `farm devices check`."""

from __future__ import annotations

import contextlib
import getpass
import ipaddress
import logging
import os
import platform
import re
import secrets
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from farm import __version__
from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.config.settings import Config, HealthConfig
from farm.base.errors import ConfigError, DeviceError, FarmError, MissingToolError, UnknownNameError
from farm.base.files import own_folder, zipped
from farm.base.processes import Supervisor
from farm.base.socs import load_socs, no_profile
from farm.base.text import json_document, visible, with_texts
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundles_for
from farm.builds.runtime.packages import package_version
from farm.builds.runtime.parts import ElfHeader, read_elf
from farm.builds.runtime.runtime import Runtime
from farm.devices.connect import open_transport
from farm.devices.device import AdbAddress, Device, SshAddress
from farm.devices.discovery import ABSENT, Scan, scan_all
from farm.devices.execution.content_store import SESSION_PREFIX
from farm.devices.execution.liveness import collect_crash_logs
from farm.devices.facts import PlatformFacts, denials, read_platform, read_status
from farm.devices.hosts import host_configs
from farm.devices.ssh.config import ssh_address
from farm.devices.transport import Transport
from farm.dispatch.device_run.device_worker import DeviceWorker
from farm.dispatch.device_run.health_check import health_check_job
from farm.dispatch.pool.device_pool import DevicePool, LeaseTerms
from farm.dispatch.pool.fleet import is_called, narrowed, out_of_use, runtimes_of
from farm.dispatch.request.request import RunPlan
from farm.policy.situation import Lease, Priority
from farm.replay import properties
from farm.replay.properties import (
    MOST_PUSH_SECONDS,
    CheckLine,
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

# Examination of attached devices, now: whether each is fit to be measured on. `farm devices check`.


logger = logging.getLogger(__name__)

_MOST_AT_ONCE = 16
_ORDER: tuple[str, ...] = tuple(Property)
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
    properties: tuple[CheckLine, ...] = ()
    """Checked properties in order; for a device without an examination only its identity and profile."""


class CheckReport(msgspec.Struct, frozen=True):
    """Checked device with the answers behind it, for a transcript."""

    checked: CheckedDevice
    device: Device | None = None
    facts: dict[str, Any] = {}
    """Answers of the device and files of the runtime."""
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
    return sorted(found, key=lambda one: (order.index(one.checked.outcome), one.checked.soc, one.checked.name))


def _not_checked(device: Device, soc_before: str, reason: str) -> CheckReport:
    lines = identity(device, soc_before), profile(device)
    outcome = CheckOutcome.NOT_CHECKED
    checked = CheckedDevice(device.id, device.called, device.soc, device.kind, outcome, reason, properties=lines)
    return CheckReport(checked, device)


def _unfit(id_: str, known: Registered | None, reason: str, line: CheckLine) -> CheckReport:
    """Return the report of a device that cannot be asked."""
    name, soc, kind = (known.called, known.soc, known.kind) if known is not None else (id_, "", "")
    return CheckReport(CheckedDevice(id_, name, soc, kind, CheckOutcome.UNFIT, reason, properties=(line,)))


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

        with contextlib.closing(pool):
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
        self._runtime = runtime = self.worker.run.runtime if self.worker is not None else None
        self._headers = _headers(runtime)
        self._runtime_bytes = sum(path.stat().st_size for path in runtime.files.values()) if runtime else 0
        self._facts: dict[str, Any] = {}

    def report(self) -> CheckReport:
        """Return the report: a failed health check or an error makes a device unfit."""
        started = time.time()
        device = self.device
        found = [identity(device, self.soc_before), profile(device)]
        if status := self._ask("status", lambda: read_status(self.transport, os=device.os)):
            found += [properties.room(status, self._runtime_bytes), properties.temperature(status, self.limits)]
        else:
            problem = self._facts["status"]["problem"]
            found += [not_checked(name, problem) for name in (Property.ROOM, Property.TEMPERATURE)]
        try:
            is_root = self.transport.user_id() == 0
            refusal = "" if is_root else self.transport.root_refusal()
            found.append(properties.root(is_root=is_root, refusal=refusal))
        except DeviceError as error_of_root:
            found.append(not_checked(Property.ROOT, error_of_root.problem))
        platform = self._ask("platform", lambda: read_platform(self.transport)) or PlatformFacts()
        speed = self._ask("push_bytes_per_s", self._push_speed)
        checked = self._run_health_check(speed)
        logs: dict[str, str] = {}
        if speed is None:
            found.append(error(Property.PUSH, self._facts["push_bytes_per_s"]["problem"]))
        else:
            found.append(properties.push_speed(speed, self._runtime_bytes))
            files = collect_crash_logs(self.transport, device.os, self.folder / "check-logs", since=started)
            logs = {kind: path.read_text(encoding="utf-8") for kind, path in files.items()}
        denied = denials(logs.values())
        found += [
            properties.page_size(platform, self._headers),
            properties.selinux(platform, denied),
            properties.domain(device, platform, checked),
            properties.skel(device, self._headers, checked, self.missing),
            properties.health(checked),
            properties.latencies(checked),
        ]
        self._facts["runtime"] = _described(self._runtime, self._headers)
        kept = {"dsp": logs.get("dsp", ""), "denials": "\n".join(denied)}
        lines = tuple(sorted(found, key=lambda one: _ORDER.index(one.name)))
        reason = checked.problem or next((f"{one.name}: {one.line}" for one in lines if one.level is Level.ERROR), "")
        outcome = CheckOutcome.UNFIT if reason else CheckOutcome.FIT
        latency_ms = statistics.median(checked.latency_ns) / 1e6 if checked.latency_ns and not reason else None
        return CheckReport(
            CheckedDevice(device.id, device.called, device.soc, device.kind, outcome, reason, latency_ms, lines),
            device,
            self._facts,
            {name: text for name, text in kept.items() if text},
        )

    def _ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return the answer to a question, which the report gets; None for a failure, noted as such."""
        try:
            answer = question()
        except DeviceError as problem:
            self._facts[name] = {"problem": problem.problem}
            return None
        self._facts[name] = msgspec.to_builtins(answer)
        return answer

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


def _described(runtime: Runtime | None, headers: Mapping[str, ElfHeader]) -> dict[str, Any]:
    if runtime is None:
        return {}
    files = {
        name: {
            "sha256": runtime.hashes.get(name, ""),
            "machine": headers[name].machine_name if name in headers else "",
            "page_bytes": headers[name].page_bytes if name in headers else 0,
        }
        for name in sorted(runtime.files)
    }
    return {"versions": runtime.versions, "files": files}


# Transcript of `farm devices check` for a bug report: lines, answers, versions; no names.


# Folders of this machine, and of Linux devices, in which names of accounts and projects are.
_BELOW = r"(?:/[^\s'\":;,)]*)?"
_PATH = re.compile(
    rf"(?<![\w/.-])/(?:home|Users|Volumes|root|tmp|var|opt|work|mnt|media|srv|run){_BELOW}|\b[A-Za-z]:\\Users\\\S*"
)
_ADDRESS = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?::\d{1,5})?(?![\d.])")
_MAC = re.compile(r"(?<![0-9A-Fa-f:-])(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}(?![0-9A-Fa-f:-])")
_MAYBE_IPV6 = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:]*:[0-9A-Fa-f.]*(?:%\w+)?(?![\w:])")
# IMEI, IMSI and ICCID of a phone.
_NUMBER = re.compile(r"(?<!\d)\d{15,20}(?!\d)")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_PATTERNS = (
    (_EMAIL, "<account>"), (_PATH, "<path>"), (_ADDRESS, "<address>"), (_MAC, "<address>"), (_NUMBER, "<number>"),
)  # fmt: skip
# Account of every machine, and a word of the lines.
_COMMON = frozenset({"root", "shell", ""})
_PACKAGES = ("executorch", "torch", "onnxruntime-qnn")


class Anonymizer:
    """Replacement of names in texts: devices, hosts, accounts, paths, addresses."""

    def __init__(self, config: Config, reports: Sequence[CheckReport], leases: Iterable[Lease] = ()) -> None:
        """Collect the names; `leases` name other users of the devices."""
        words: dict[str, str] = {}
        for number, report in enumerate(reports):
            words |= dict.fromkeys(_names(report), f"<device {number}>")
            words |= dict(_places(report.device)) if report.device is not None else {}
        for lease in leases:
            # Commands of other users name their folders and jobs.
            words[lease.host] = "<host>"
            words |= {repr(lease.purpose): "<command>"} if lease.purpose else {}
            words |= dict.fromkeys((lease.user, lease.reserved_for), "<account>")
        hosts = list(host_configs(config))
        for host in hosts:
            words |= dict.fromkeys((host.name, host.adb.host), "<host>")
        named = (*(host.ssh for host in hosts), *(device.ssh for device in config.devices))
        for login in (one for one in named if one is not None):
            words |= {login.host: "<host>", login.user: "<account>"}
            # Without a usable configuration of ssh no machine on the way is known.
            with contextlib.suppress(FarmError):
                words |= dict(_ssh_places(ssh_address(login)))
        words[socket.gethostname()] = "<host>"
        accounts = (getpass.getuser(), os.environ.get("USER", ""), os.environ.get("LOGNAME", ""))
        words |= dict.fromkeys(accounts, "<account>")
        folders = (config.state_dir, config.cache_dir, config.sdk_root, config.file, Path.cwd(), Path.home())
        paths = {str(folder) for folder in (*folders, sys.prefix) if folder is not None} - {"/"}
        self._words = {word.casefold(): place for word, place in words.items() if word.casefold() not in _COMMON}
        # Names as whole words, and paths with all that is below them.
        alternatives = (
            rf"{re.escape(one)}{_BELOW}" if one in paths else rf"(?<![A-Za-z0-9]){re.escape(one)}(?![A-Za-z0-9])"
            for one in sorted((*paths, *self._words), key=len, reverse=True)
        )
        self._pattern = re.compile("|".join(alternatives) or r"(?!)", re.IGNORECASE)

    def text(self, text: str) -> str:
        """Return `text` without names."""
        text = self._pattern.sub(lambda found: self._words.get(found[0].casefold(), "<path>"), visible(text))
        for pattern, place in _PATTERNS:
            text = pattern.sub(place, text)
        return _MAYBE_IPV6.sub(lambda found: "<address>" if _is_ipv6(found[0]) else found[0], text)


def transcript(
    config: Config, reports: Sequence[CheckReport], lines: Iterable[str], leases: Iterable[Lease] = ()
) -> bytes:
    """Return the zip file with `lines` as the command prints them, and the answers behind them, without names.

    `leases` name other users of the devices.
    """

    hide = Anonymizer(config, reports, leases)
    versions = {name: package_version(name) for name in _PACKAGES}
    about = {"farm": __version__, "python": platform.python_version(), "system": platform.system(), **versions}
    files = {"check.txt": "\n".join(hide.text(line) for line in lines).encode() + b"\n"}
    devices = []
    for number, report in enumerate(reports):
        checked = msgspec.to_builtins(report.checked)
        build = report.device.build if report.device is not None else ""
        devices.append({"checked": checked, "facts": _without_boot(report.facts), "build": build})
        files |= {f"device-{number}/{kind}.txt": hide.text(text).encode() for kind, text in report.logs.items()}
    files["check.json"] = json_document({"schema": 1, "versions": about, "devices": with_texts(devices, hide.text)})
    return zipped(files)


def _without_boot(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts without the boot id and other names of the device."""
    left_out = ("boot_id", "addresses")
    return {
        name: {key: one for key, one in value.items() if key not in left_out} if isinstance(value, dict) else value
        for name, value in facts.items()
    }


def _names(report: CheckReport) -> Iterator[str]:
    yield from (report.checked.id, report.checked.name)
    if (device := report.device) is not None:
        yield from (device.serial, device.serialno, device.name, *device.known_as, *device.labels)


def _places(device: Device) -> Iterator[tuple[str, str]]:
    """Yield hosts and accounts on the way to a device, with their replacements."""
    address = device.address
    hosts = (address.host, address.tunnel) if isinstance(address, AdbAddress) else ()
    yield from ((host, "<host>") for host in (device.host, address.place, *hosts))
    if isinstance(address, SshAddress):
        yield from _ssh_places(address)


def _ssh_places(address: SshAddress) -> Iterator[tuple[str, str]]:
    for hop in (address, *address.jumps):
        yield from ((host, "<host>") for host in (hop.host, hop.alias, hop.host_key_alias))
        yield hop.user, "<account>"


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
