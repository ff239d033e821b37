"""Examination of one leased device: the properties of `farm devices check`, and the answers behind them."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from farm.base.errors import DeviceError, FarmError
from farm.builds.runtime.native.elf import ElfHeader, read_elf
from farm.devices.connect import open_transport
from farm.devices.execution.content_store import SESSION_PREFIX
from farm.devices.execution.crash_logs import collect_crash_logs
from farm.devices.platform_facts import PlatformFacts, denials, read_platform
from farm.devices.status import DeviceStatus, read_status
from farm.dispatch.device_run.device_worker import DeviceWorker
from farm.replay import properties
from farm.replay.properties import MOST_PUSH_SECONDS, CheckedProperty, HealthCheckResult, Property, error, not_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from farm.base.config.settings import HealthConfig
    from farm.builds.runtime.runtime import Runtime
    from farm.devices.device import Device
    from farm.devices.health import HealthEvent
    from farm.devices.transport import Transport
    from farm.dispatch.request.plan import RunPlan

# A first file shows a slow link; the second one is long enough to measure a fast one.
_PROBE_BYTES, _PUSH_BYTES = 128 << 10, 16 << 20
_FAST_BYTES_PER_S = 1 << 20
_REMOVE_SECONDS = 20.0


class Examined(NamedTuple):
    """Result of an examination."""

    properties: tuple[CheckedProperty, ...]
    problem: str
    """Problem of the health check; empty for a passed one."""
    latency_ns: tuple[float, ...]
    facts: dict[str, Any]
    """Answers of the device and files of the runtime, for a report."""
    logs: dict[str, str]
    """Log lines about the DSP, by kind."""


def examine(
    device: Device,
    soc_before: str,
    limits: HealthConfig,
    program: tuple[RunPlan, int] | None,
    missing: str,
    record: Callable[[HealthEvent], None],
    folder: Path,
) -> Examined:
    """Examine a device that this process has leased; local files are in `folder`.

    `program` is the plan with its runtime and health check, and its number there; None for an absent runtime, where
    `missing` is the reason. `record` records the health.
    """
    worker = DeviceWorker(*program, record, lambda: False) if program is not None else None
    transport = worker.run.transport if worker is not None else open_transport(device)
    runtime = worker.run.runtime if worker is not None else None
    try:
        return _Examination(device, soc_before, limits, transport, runtime, worker, missing, folder).result()
    finally:
        if worker is not None:
            with contextlib.suppress(OSError):
                worker.end_session()
            worker.close()
        transport.close()


class _Examination:
    def __init__(
        self,
        device: Device,
        soc_before: str,
        limits: HealthConfig,
        transport: Transport,
        runtime: Runtime | None,
        worker: DeviceWorker | None,
        missing: str,
        folder: Path,
    ) -> None:
        self._device, self._soc_before, self._limits = device, soc_before, limits
        self._transport, self._runtime, self._worker, self._missing = transport, runtime, worker, missing
        self._folder = folder
        self._headers = _headers(runtime)
        self._runtime_bytes = sum(path.stat().st_size for path in runtime.files.values()) if runtime else 0
        self._lines: dict[Property, CheckedProperty] = {}
        self._facts: dict[str, Any] = {}

    def result(self) -> Examined:
        started = time.time()
        device = self._device
        self._note(properties.identity(device, self._soc_before))
        self._note(properties.profile(device))
        status = self._ask("status", lambda: read_status(self._transport, os=device.os))
        self._note_status(status)
        self._ask_line(Property.ROOT, self._root)
        platform = self._ask("platform", lambda: read_platform(self._transport)) or PlatformFacts()
        self._note(properties.page_size(platform, self._headers))
        speed = self._ask("push_bytes_per_s", self._push_speed)
        checked = self._run_health_check(speed)
        self._note_speed(speed)
        logs = self._logs(started) if speed is not None else {}
        denied = denials(logs.values())
        self._note(properties.selinux(platform, denied))
        self._note(properties.domain(device, platform, checked))
        self._note(properties.skel(device, self._headers, checked, self._missing))
        self._note(properties.health(checked))
        self._note(properties.latencies(checked))
        self._facts["runtime"] = _described(self._runtime, self._headers)
        kept = {"dsp": logs.get("dsp", ""), "denials": "\n".join(denied)}
        return Examined(
            tuple(self._lines[name] for name in Property),
            checked.problem,
            checked.latency_ns,
            self._facts,
            {name: text for name, text in kept.items() if text},
        )

    def _note(self, line: CheckedProperty) -> None:
        self._lines[line.name] = line

    def _ask(self, name: str, question: Callable[[], Any]) -> Any:
        """Return the answer to a question, which the report gets; None for a failure, noted as such."""
        try:
            answer = question()
        except DeviceError as problem:
            self._facts[name] = {"problem": problem.problem}
            return None
        self._facts[name] = msgspec.to_builtins(answer)
        return answer

    def _ask_line(self, name: Property, question: Callable[[], CheckedProperty]) -> None:
        try:
            self._note(question())
        except DeviceError as problem:
            self._note(not_checked(name, problem.problem))

    def _note_status(self, status: DeviceStatus | None) -> None:
        if status is None:
            for name in (Property.ROOM, Property.TEMPERATURE):
                self._note(not_checked(name, self._facts["status"]["problem"]))
            return
        self._note(properties.room(status, self._runtime_bytes))
        self._note(properties.temperature(status, self._limits))

    def _root(self) -> CheckedProperty:
        is_root = self._transport.user_id() == 0
        return properties.root(is_root=is_root, refusal="" if is_root else self._transport.root_refusal())

    def _push_speed(self) -> float:
        """Push random bytes, and remove them; return bytes per second."""
        place = self._transport.storage / f"{SESSION_PREFIX}check-{os.getpid()}"
        try:
            for nbytes in (_PROBE_BYTES, _PUSH_BYTES):
                data = os.urandom(nbytes)
                begin_s = time.perf_counter()
                self._transport.push({place / "data": data})
                speed = nbytes / (time.perf_counter() - begin_s)
                if speed < _FAST_BYTES_PER_S:
                    break
            return speed
        finally:
            with contextlib.suppress(DeviceError):
                self._transport.run(["rm", "-rf", str(place)], timeout_s=_REMOVE_SECONDS)

    def _note_speed(self, speed: float | None) -> None:
        if speed is None:
            self._note(error(Property.PUSH, self._facts["push_bytes_per_s"]["problem"]))
        else:
            self._note(properties.push_speed(speed, self._runtime_bytes))

    def _run_health_check(self, speed: float | None) -> HealthCheckResult:
        worker = self._worker
        if worker is None:
            return HealthCheckResult(f"the runtime is incomplete ({self._missing})", skipped=True)
        if speed is not None and self._runtime_bytes / max(speed, 1.0) > MOST_PUSH_SECONDS:
            minutes = self._runtime_bytes / max(speed, 1.0) / 60
            return HealthCheckResult(f"its files would take {minutes:.0f} min to push", skipped=True)
        worker.await_health_check()
        problem = worker.check()
        return HealthCheckResult(
            problem, worker.run.health_check_cause, () if problem else worker.run.health_check_latency_ns
        )

    def _logs(self, started: float) -> dict[str, str]:
        found = collect_crash_logs(self._transport, self._device.os, self._folder / "check-logs", since=started)
        return {kind: path.read_text(encoding="utf-8") for kind, path in found.items()}


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
