"""Lines of `farm devices check`: facts of a device -> a property that is ok, a warning or an error. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from farm.base.config.devices import HealthConfig
from farm.base.socs import load_socs, no_profile
from farm.builds.runtime.parts import HEXAGON, ElfHeader
from farm.devices.device import Device
from farm.devices.facts import DeviceStatus, PlatformFacts, check
from farm.report.model.format import first_of
from farm.results.attempt import Cause

# Room for the bundles and outputs of a suite beside the runtime.
_SPARE_BYTES = 1 << 30
# USB 2 moves about 30 MB/s; below this a suite waits for its cable.
_SLOW_BYTES_PER_S = 5e6
# First to ninth decile of the latencies, relative to the median: a controlled device has a few percent.
_MOST_SPREAD = 0.5
_LEAST_SAMPLES = 5
_MOST_NAMED = 3
MOST_PUSH_SECONDS = 300.0
"""Longest time for the files of the health check, by the measured push speed."""
_SIMULATED = "no DSP: a virtual device runs QNN's simulator"


class Level(StrEnum):
    """Result of a checked property."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


class Property(StrEnum):
    """Checked property of a device, in the order of the lines."""

    IDENTITY = "identity"
    PROFILE = "SoC profile"
    ROOM = "free space"
    ROOT = "root"
    TEMPERATURE = "temperature"
    PAGES = "page size"
    SELINUX = "SELinux"
    DOMAIN = "unsigned PD"
    """Process domain of the DSP for unsigned code."""
    SKEL = "skel"
    HEALTH = "health check"
    PUSH = "push speed"
    LATENCIES = "latencies"


# Cause of a failed health check whose reason is in the line of another property.
_EXPLAINED_ABOVE = {Cause.DEVICE: Property.DOMAIN, Cause.RUNTIME: Property.SKEL}


class CheckLine(msgspec.Struct, frozen=True):
    """Line of a check: of a device, or of the fit of a program."""

    name: str
    """Checked part: a Property of a device, or a part of the fit, as `size`."""
    level: Level
    text: str
    next_step: str = ""
    """Next step of the user after a warning or an error."""

    @property
    def line(self) -> str:
        """Text of the line behind level and name."""
        return f"{self.text}: {self.next_step}" if self.next_step else self.text


class HealthCheckResult(msgspec.Struct, frozen=True):
    """Result of the health check's program."""

    problem: str = ""
    """Problem in one line; empty for a passed check."""
    cause: Cause = Cause.NONE
    latency_ns: tuple[float, ...] = ()
    skipped: bool = False
    """True if the program did not run."""


def ok(name: str, text: str) -> CheckLine:
    """Return a line without a problem."""
    return CheckLine(name, Level.OK, text)


def warning(name: str, text: str, next_step: str = "") -> CheckLine:
    """Return a warning."""
    return CheckLine(name, Level.WARNING, text, next_step)


def error(name: str, text: str, next_step: str = "") -> CheckLine:
    """Return an error."""
    return CheckLine(name, Level.ERROR, text, next_step)


def not_checked(name: str, reason: str) -> CheckLine:
    """Return the line of a property that could not be read."""
    return warning(name, f"not checked: {reason}")


def identity(device: Device, soc_before: str) -> CheckLine:
    """Return the line about names; `soc_before` is the SoC that the store has for the same device."""
    name = Property.IDENTITY
    if soc_before and soc_before != device.soc:
        problem = f"reports the SoC {device.soc}, and reported {soc_before} before"
        return error(name, problem, "two devices have one serial, or the board was changed: give each a serial")
    about = f"{device.product or device.kind}, serial {device.serial}, {device.build or 'no build'}"
    if device.kind == "hardware" and not device.serialno:
        problem = f"{about}: the device reports no serial of its own"
        return warning(name, problem, "its history follows its address: keep the address, or set a serial")
    return ok(name, about)


def profile(device: Device) -> CheckLine:
    """Return the line about the SoC profile."""
    soc = load_socs().get(device.soc)
    if soc is None:
        problem, _, step = no_profile(device.soc).partition(": ")
        return error(Property.PROFILE, problem, step)
    reported = f", reported as {device.soc_reported}" if device.soc_reported else ""
    backends = ", ".join(soc.backends)
    return ok(Property.PROFILE, f"{soc.name}{reported}: HTP V{soc.htp_arch}, {soc.vtcm_mb} MB VTCM, {backends}")


def room(status: DeviceStatus, runtime_bytes: int) -> CheckLine:
    """Return the line about free space; `runtime_bytes` is the size of the runtime."""
    name = Property.ROOM
    if status.free_bytes is None:
        return warning(name, "not reported", "look at the output of df on the device")
    free = f"{status.free_bytes / 1e6:.0f} MB free"
    if status.free_bytes < runtime_bytes:
        return error(name, f"{free}, and the runtime needs {runtime_bytes / 1e6:.0f} MB", "remove files of the device")
    if status.free_bytes < runtime_bytes + _SPARE_BYTES:
        return warning(name, f"{free} beside a runtime of {runtime_bytes / 1e6:.0f} MB", "large models may not fit")
    return ok(name, free)


def root(*, is_root: bool, refusal: str) -> CheckLine:
    """Return the line about root; `refusal` is the reason against it, empty where it can be had."""
    if is_root:
        return ok(Property.ROOT, "commands run as root")
    if not refusal:
        return ok(Property.ROOT, "can be had, and farm asks for it where a backend needs it")
    step = "LPAI and kernel logs need root, HTP does not: use an engineering build or su for them"
    return warning(Property.ROOT, refusal.removeprefix("root is needed, and "), step)


def temperature(status: DeviceStatus, limits: HealthConfig) -> CheckLine:
    """Return the line about temperature and battery."""
    name = Property.TEMPERATURE
    if problem := check(status, limits):
        return warning(name, problem, f"a run waits up to {limits.gate_wait_s:.0f} s before it measures")
    if status.temperature_c is None:
        return warning(name, "not reported", "farm cannot wait for a cool device: repeat measurements")
    battery = f", battery {status.battery_percent} %" if status.battery_percent is not None else ""
    return ok(name, f"{status.temperature_c:.1f} C{battery}")


def page_size(facts: PlatformFacts, headers: Mapping[str, ElfHeader]) -> CheckLine:
    """Return the line about memory pages; `headers` has the files of the runtime by name."""
    name = Property.PAGES
    if not facts.page_bytes:
        return warning(name, "not reported", "libraries that were linked for 4 KB pages may not load on newer phones")
    own = {file: one.page_bytes for file, one in headers.items() if one.machine != HEXAGON and one.page_bytes}
    pages = f"{facts.page_bytes // 1024} KB pages"
    if small := {file: size for file, size in own.items() if size < facts.page_bytes}:
        files = first_of([f"{file} ({size // 1024} KB)" for file, size in sorted(small.items())], _MOST_NAMED)
        step = "link farm's with NDK r28 (-Wl,-z,max-page-size=16384), take QNN's from a newer SDK"
        return error(name, f"{pages}, and these files are aligned for smaller ones: {files}", step)
    return ok(name, f"{pages}, {len(own)} files are aligned for them" if own else pages)


def selinux(facts: PlatformFacts, denied: Sequence[str]) -> CheckLine:
    """Return the line about SELinux; `denied` has its denials during the health check."""
    name = Property.SELINUX
    if denied:
        step = "allow it in the vendor's policy, or 'setenforce 0' as root on a device for tests"
        return error(name, f"{facts.selinux or 'present'}, and denies: {denied[-1]}", step)
    if not facts.selinux:
        return warning(name, "not reported", "look for 'avc: denied' in logcat if the DSP is refused")
    return ok(name, f"{facts.selinux}, no denial during the check")


def domain(device: Device, facts: PlatformFacts, checked: HealthCheckResult) -> CheckLine:
    """Return the line about the process domain for unsigned code."""
    name = Property.DOMAIN
    if checked.cause is Cause.DEVICE:
        return _explained(name, checked.problem)
    if device.kind == "virtual":
        return ok(name, _SIMULATED)
    if not checked.skipped and not checked.problem:
        return ok(name, "the unsigned skel of the health check ran on the DSP")
    return _reached(device, facts)


def _reached(device: Device, facts: PlatformFacts) -> CheckLine:
    """Return how far this user reaches the DSP of a device where the health check did not run."""
    name = Property.DOMAIN
    if facts.closed_nodes and not facts.nodes:
        step = "allow the node to this user in the vendor's rules, or run as root"
        return error(name, f"{', '.join(facts.closed_nodes)} may not be opened", step)
    if not facts.nodes:
        return error(name, "no FastRPC node of the compute DSP in /dev", "install the vendor's kernel with FastRPC")
    if device.os == "android" and not facts.fastrpc:
        return error(name, "no libcdsprpc.so in /vendor/lib64", "install the vendor's image of this device")
    return not_checked(name, f"{', '.join(facts.nodes)} can be opened, and the health check did not get so far")


def skel(device: Device, headers: Mapping[str, ElfHeader], checked: HealthCheckResult, missing: str) -> CheckLine:
    """Return the line about the skel; `missing` is the reason for an absent runtime."""
    name = Property.SKEL
    if missing:
        return _explained(name, missing)
    if checked.cause is Cause.RUNTIME:
        return _explained(name, checked.problem)
    if device.kind == "virtual":
        return ok(name, _SIMULATED)
    skels = [f"{file} for V{one.hexagon_arch}" for file, one in headers.items() if one.machine == HEXAGON]
    if not skels:
        return error(name, "the runtime has no skel", "farm setup runtime check --soc SOC lists the needed files")
    found = ", ".join(skels)
    if checked.problem or checked.skipped:
        return not_checked(name, f"{found}, and the health check did not load it")
    return ok(name, f"{found} was loaded")


def health(checked: HealthCheckResult) -> CheckLine:
    """Return the line about the health check."""
    name = Property.HEALTH
    if checked.skipped:
        return not_checked(name, checked.problem)
    if checked.cause in _EXPLAINED_ABOVE:
        return error(name, f"failed: see {_EXPLAINED_ABOVE[checked.cause]}")
    if checked.problem:
        return _explained(name, checked.problem)
    return ok(name, "passed")


def push_speed(bytes_per_s: float, runtime_bytes: int) -> CheckLine:
    """Return the line about the speed of a push."""
    speed = f"{bytes_per_s / 1e6:.1f} MB/s"
    if bytes_per_s < _SLOW_BYTES_PER_S:
        seconds = runtime_bytes / max(bytes_per_s, 1.0)
        step = "use another cable or port (USB 3), or a wired network"
        return warning(Property.PUSH, f"{speed}: the runtime alone takes {seconds:.0f} s", step)
    return ok(Property.PUSH, speed)


def latencies(checked: HealthCheckResult) -> CheckLine:
    """Return the line about the spread of the health check's latencies."""
    name, samples = Property.LATENCIES, checked.latency_ns
    if checked.problem or len(samples) < _LEAST_SAMPLES:
        return not_checked(name, "the health check gave none")
    first, *_, last = statistics.quantiles(samples, n=10)
    median = statistics.median(samples)
    spread = (last - first) / median if median else 0.0
    text = f"median {median / 1e6:.3f} ms of {len(samples)}, 8 of 10 within {100 * spread:.0f} %"
    if spread > _MOST_SPREAD:
        step = "other programs use the device, or its clocks change: stop them, cool it, set a performance mode"
        return warning(name, text, step)
    return ok(name, text)


def _explained(name: Property, reason: str) -> CheckLine:
    """Return the error of a reason that ends with the next step."""
    problem, _, step = reason.rpartition(": ")
    return error(name, problem or step, step if problem else "")
