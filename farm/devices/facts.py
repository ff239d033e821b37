"""Facts of a device, read from the device: its identity, its system, and its state right now."""

from __future__ import annotations

import contextlib
import re
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from farm.base.errors import DeviceError
from farm.base.forms import NAME
from farm.base.socs import SOC_NAME, profile_name, reported_profile
from farm.base.text import clean_text, count_of, named_values
from farm.devices.connect import transport_to
from farm.devices.device import Device, DeviceAddress, SshAddress
from farm.devices.files import TELL_ROOM, free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from farm.base.config.settings import HealthConfig
    from farm.devices.transport import Transport


# Identity of a device, read from the device itself in one round trip, never from an option.


# A phone under load answers in a second; a slower one is unfit for measurements.
_IDENTIFY_SECONDS = 10.0
_IDENTITY_BYTES = 16 * 1024

# Output of `uname -m` on machines for aarch64 programs.
_PROCESSORS = frozenset({"aarch64", "arm64"})
# Placeholder serials of boards, equal on many of them.
_NO_SERIAL = re.compile(r"0*|unknown|none|null|n/a|default|0?123456789?0?(abcdef)?|(.)\2*", re.IGNORECASE)

# Shell code that prints the boot id of a device. A virtual device has its own property, as the kernel's id belongs to
# this machine. Some builds of Android hide the kernel's id.
PRINT_BOOT = """
id=$(getprop farm.boot_id 2>/dev/null)
[ -n "$id" ] || id=$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)
[ -n "$id" ] || id=$(getprop ro.boottime.init 2>/dev/null)
echo "$id"
"""

_PROPERTIES = (
    "ro.soc.model",
    "ro.build.fingerprint",
    "ro.product.model",
    "ro.serialno",
    "ro.farm.virtual",
    "ro.build.version.sdk",
)
# $1: farm's folder, which is made and looked at on Linux, where others might have made it; the others: properties.
_IDENTITY_SCRIPT = (
    f"""
boot=$({PRINT_BOOT})
echo "boot=$boot"
"""
    r"""
storage=$1; shift
if command -v getprop >/dev/null; then for name do echo "$name=$(getprop "$name")"; done; fi
soc=/sys/devices/soc0
echo "machine=$(cat $soc/machine 2>/dev/null)"
echo "serial=$(cat $soc/serial_number 2>/dev/null)"
if [ -r /proc/device-tree/compatible ]; then
    echo "compatible=$(tr '\0' ' ' </proc/device-tree/compatible)"
    echo "model=$(tr '\0' ' ' </proc/device-tree/model)"
fi
if [ -r /etc/os-release ]; then echo "system=$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release | tr -d '"')"; fi
echo "kernel=$(uname -r)"
echo "processor=$(uname -m)"
if [ -n "$storage" ]; then
    (umask 077; mkdir -p -- "$storage") 2>&1 | sed 's/^/storage_error=/'
    if [ -O "$storage" ] && [ -w "$storage" ]; then echo "storage=ok"; fi
fi
"""
)


def identify(serial: str, address: DeviceAddress, *, host: str = "") -> Device:
    """Identify the device at `address`, named `serial` in errors; `host` is the machine that it is attached to.

    Raises DeviceError for missing answers and for a device without writable storage.
    """
    with contextlib.closing(transport_to(serial, address)) as transport:
        storage = "" if transport.is_android else str(transport.storage)
        argv = ["sh", "-c", _IDENTITY_SCRIPT, "sh", storage, *_PROPERTIES]
        done = transport.run(argv, timeout_s=_IDENTIFY_SECONDS, max_output=_IDENTITY_BYTES)
    properties = {name: values[0] for name, values in named_values(done.stdout.split(b"\n")).items()}
    reported, soc = reported_soc(properties)
    if isinstance(address, SshAddress) and "boot" not in properties:
        # The script prints its boot before everything else.
        text = clean_text(done.stderr.strip() or done.stdout)
        raise DeviceError(serial, address.no_shell(f"exit code {done.code}", text))
    if not soc:
        problem = (
            "does not report its SoC: neither ro.soc.model nor /sys/devices/soc0/machine is a name, "
            "and /proc/device-tree/compatible has none that farm knows"
        )
        raise DeviceError(serial, problem)
    kind: Literal["virtual", "hardware"] = "virtual" if properties.get("ro.farm.virtual") == "1" else "hardware"
    processor = properties.get("processor", "")
    if kind == "hardware" and processor and processor not in _PROCESSORS:
        problem = (
            f"has a processor of another kind: uname -m prints {processor!r}, and the programs of farm are for "
            "aarch64; virtual devices have ro.farm.virtual=1"
        )
        raise DeviceError(serial, problem)
    if storage and properties.get("storage") != "ok":
        why = properties.get("storage_error") or "it is not this user's own, or cannot be written"
        problem = f"farm cannot keep its files in {storage}: {why}; name another folder by 'storage' in farm.toml"
        raise DeviceError(serial, problem)
    android = transport.is_android and bool(properties.get("ro.build.version.sdk"))
    system = " ".join(filter(None, (properties.get("system", ""), properties.get("kernel", ""))))
    serialno = _serial(properties)
    return Device(
        # adb's name is an address; a virtual device keeps the serial of its start.
        serial=serial if kind == "virtual" and transport.is_android else serialno or serial,
        soc=soc,
        soc_reported="" if reported.upper() == soc else reported,
        kind=kind,
        build=properties.get("ro.build.fingerprint") or clean_text(system),
        address=address,
        product=properties.get("ro.product.model") or properties.get("model", ""),
        os="android" if android else "linux",
        host=host,
        serialno=serialno,
        boot_id=properties.get("boot", ""),
    )


def reported_soc(properties: dict[str, str]) -> tuple[str, str]:
    """Return the name of the SoC in a device's answers, and the name of its profile; empty for none. Pure.

    A name without a profile is returned unchanged, and no device matches it. An entry of `compatible`,
    `qcom,qcs9100-ride qcom,qcs9100`, counts only with a profile.
    """
    for text in (properties.get("ro.soc.model", ""), properties.get("machine", "")):
        if soc := _soc(text):
            return text.strip(), reported_profile(text.strip()) or profile_name(soc) or soc
    parts = [
        entry.removeprefix("qcom,").upper() for entry in properties.get("compatible", "").split() if "qcom," in entry
    ]
    return next(((part, soc) for part in parts if (soc := profile_name(part))), ("", ""))


def _soc(text: str) -> str:
    """Return an SoC's name as profiles have it: some builds add a bin or write it in small letters, "SM8650-AC"."""
    name = text.upper().split("-")[0].strip()
    return name if SOC_NAME.fullmatch(name) else ""


def _serial(properties: dict[str, str]) -> str:
    names = (properties.get("ro.serialno", ""), properties.get("serial", ""))
    return next((name for name in names if NAME.fullmatch(name) and not _NO_SERIAL.fullmatch(name)), "")


# Facts of a device's system that decide whether programs run there: page size, SELinux, access to the DSP.


_PLATFORM_SECONDS = 20.0
_ANSWER_BYTES = 64 * 1024
_MOST_PAGE_BYTES = 1 << 20
_MOST_DENIALS = 5
_DENIAL = re.compile(r"avc: {1,8}denied .{0,200}(?:farm_runner|qnn_executor|fastrpc|adsprpc).{0,200}")

# Nodes of FastRPC's driver for the compute DSP, on newer and on older kernels.
_NODES = "/dev/fastrpc-cdsp /dev/fastrpc-cdsp-secure /dev/adsprpc-smd /dev/adsprpc-smd-secure"
# Source of the page size without getconf: the kernel.
_PLATFORM_SCRIPT = f"""
page=$(getconf PAGE_SIZE 2>/dev/null)
[ -n "$page" ] || page=$(($(sed -n 's/^KernelPageSize: *\\([0-9]*\\) kB$/\\1/p' /proc/self/smaps | head -n 1) * 1024))
echo "page=$page"
echo "selinux=$(getenforce 2>/dev/null || cat /sys/fs/selinux/enforce 2>/dev/null)"
for node in {_NODES}; do
    [ -e "$node" ] && if [ -r "$node" ]; then echo "node=$node"; else echo "closed=$node"; fi
done
for file in /vendor/lib64/libcdsprpc.so /system/vendor/lib64/libcdsprpc.so /usr/lib/libcdsprpc.so*; do
    [ -e "$file" ] && echo "fastrpc=$file"
done
echo "end=1"
"""


class PlatformFacts(msgspec.Struct, frozen=True):
    """Facts of a device's system; empty or 0 for unreported ones."""

    page_bytes: int = 0
    """Size of a memory page."""
    selinux: str = ""
    """State of SELinux: Enforcing, Permissive or Disabled."""
    nodes: tuple[str, ...] = ()
    """Device nodes of FastRPC that this user may read."""
    closed_nodes: tuple[str, ...] = ()
    """Device nodes of FastRPC that this user may not read."""
    fastrpc: tuple[str, ...] = ()
    """Libraries of FastRPC on the device."""


def read_platform(transport: Transport) -> PlatformFacts:
    """Ask a device for the facts of its system. Raises DeviceError."""
    done = transport.run(["sh", "-c", _PLATFORM_SCRIPT], timeout_s=_PLATFORM_SECONDS, max_output=_ANSWER_BYTES)
    values = named_values(done.stdout.split(b"\n"))
    if "end" not in values:
        raise DeviceError(transport.serial, "does not answer about its system", code=done.code, stderr=done.stderr)
    return parse_platform(values)


def parse_platform(values: Mapping[str, Sequence[str]]) -> PlatformFacts:
    """Return the facts in the values of a device's answer. Pure."""
    page = count_of(values.get("page", [""])[0]) or 0
    plausible = 0 < page <= _MOST_PAGE_BYTES and page & (page - 1) == 0
    selinux = values.get("selinux", [""])[0]
    return PlatformFacts(
        page if plausible else 0,
        {"0": "Permissive", "1": "Enforcing"}.get(selinux, selinux),
        tuple(values.get("node", ())),
        tuple(values.get("closed", ())),
        tuple(dict.fromkeys(values.get("fastrpc", ()))),
    )


def denials(logs: Iterable[str]) -> tuple[str, ...]:
    """Return the newest lines of `logs` in which SELinux denies something to a runner, or at the DSP. Pure."""
    found = (_DENIAL.search(line) for log in logs for line in log.splitlines())
    return tuple(dict.fromkeys(clean_text(one[0]) for one in found if one is not None))[-_MOST_DENIALS:]


# How a device is right now, read in one round trip, and whether it is cool and charged enough to be measured on.


# dumpsys waits for the service, which answers at once unless the device is in trouble.
STATUS_SECONDS = 20.0
# A case cools down by a degree in half a minute.
POLL_SECONDS = 5.0

# Plausible range of a sensor; other values come from sensors that are off or use another unit.
_COLDEST, _HOTTEST = -40.0, 125.0
_MOST_SECONDS = 3e9
# A clock that was never set starts in 1970.
_MOST_OFFSET_MS = 100 * 366 * 86_400_000

_BOOT_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_NUMBER = re.compile(r"-?\d{1,18}(\.\d{1,18})?")

_BOOT = f'echo "boot=$({PRINT_BOOT})"'
# $1: farm's folder, which need not be there yet, $2: what asks for the room of the current folder.
_COMMON = """
echo "time=$(date +%s.%N)"
echo "uid=$(id -u)"
read -r uptime rest </proc/uptime && echo "uptime=$uptime"
folder=$1
while [ -n "$folder" ] && [ ! -d "$folder" ]; do folder=${folder%/*}; done
(cd "$folder/" && eval "$2") | sed 's/^/free=/'
for zone in /sys/class/thermal/thermal_zone*/temp; do echo "zone=$(cat "$zone" 2>/dev/null)"; done
"""
_ANDROID = "dumpsys battery 2>/dev/null | sed 's/^/battery=/'"
_LINUX = """
for supply in /sys/class/power_supply/*; do
    if [ "$(cat "$supply/type" 2>/dev/null)" = Battery ]; then
        echo "battery=level: $(cat "$supply/capacity" 2>/dev/null)"
        echo "battery=temperature: $(cat "$supply/temp" 2>/dev/null)"
        break
    fi
done
"""


class DeviceStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """State of a device at one moment. None: the device reports no value or an impossible one."""

    root: bool
    """Commands run as root."""
    battery_percent: int | None
    """None without a battery, too."""
    temperature_c: float | None
    """Temperature of the battery, which throttles a phone; of the hottest sensor on devices without a battery."""
    free_bytes: int | None
    """Room where farm keeps its files."""
    boot_id: str
    """Boot id, different after every boot; empty if unreported."""
    uptime_s: float | None
    clock_offset_ms: int | None
    """How far its clock is ahead of this machine's."""
    addresses: tuple[str, ...] = ()
    """Names of adb for it, that in use first; none for a device with one address."""


def read_status(transport: Transport, *, os: Literal["android", "linux"]) -> DeviceStatus:
    """Ask a device how it is. Raises DeviceError."""
    script = _BOOT + _COMMON + (_ANDROID if os == "android" else _LINUX)
    argv = ["sh", "-c", script, "sh", str(transport.storage), TELL_ROOM]
    before_ms = time.time() * 1000
    done = transport.run(argv, timeout_s=STATUS_SECONDS, max_output=_ANSWER_BYTES)
    after_ms = time.time() * 1000
    values = named_values(done.stdout.split(b"\n"))
    if "uid" not in values:
        raise DeviceError(transport.serial, "does not report its state", code=done.code, stderr=done.stderr)
    return parse_status(values, (before_ms + after_ms) / 2)


def check(status: DeviceStatus, limits: HealthConfig) -> str:
    """Return the reason against a measurement now, empty for none. Unreported values are no reason. Pure."""
    problems = []
    if status.temperature_c is not None and status.temperature_c > limits.max_temperature_c:
        problems.append(f"at {status.temperature_c:.1f} C, limit {limits.max_temperature_c:.1f} C")
    if status.battery_percent is not None and status.battery_percent < limits.min_battery_percent:
        problems.append(f"at {status.battery_percent} % of battery, at least {limits.min_battery_percent} %")
    return " and ".join(problems)


def wait_until_cool(
    transport: Transport,
    os: Literal["android", "linux"],
    limits: HealthConfig,
    sleep: Callable[[float], None],
    stop: Callable[[], bool] = lambda: False,
) -> str:
    """Wait until nothing speaks against measuring, at most `limits.gate_wait_s`, and return a note for the result.

    The note is empty when there was nothing to wait for. `sleep` takes seconds and may return early; `stop` is asked
    after it. Raises DeviceError.
    """
    waited = 0.0
    first = problem = check(read_status(transport, os=os), limits)
    while problem and waited < limits.gate_wait_s and not stop():
        pause = min(POLL_SECONDS, limits.gate_wait_s - waited)
        sleep(pause)
        waited += pause
        problem = check(read_status(transport, os=os), limits)
    if problem:
        return f"measured {problem}, after waiting {waited:.0f} s"
    return f"waited {waited:.0f} s before measuring: it was {first}" if first else ""


def parse_status(values: Mapping[str, Sequence[str]], now_ms: float) -> DeviceStatus:
    """Return the status in the values of a device's answer; `now_ms` is this machine's epoch then. Pure."""
    boot, uid, uptime, moment = (values.get(name, [""])[0] for name in ("boot", "uid", "uptime", "time"))
    battery: dict[str, str] = {}
    for line in values.get("battery", ()):
        key, _, rest = line.partition(":")
        battery.setdefault(key.strip(), rest.strip())
    zones = [celsius for text in values.get("zone", ()) for celsius in _zone(text)]
    percent, celsius = _battery(battery)
    return DeviceStatus(
        root=uid == "0",
        battery_percent=percent,
        temperature_c=celsius if celsius is not None else max(zones, default=None),
        free_bytes=free_bytes(values.get("free", ())),
        boot_id=boot if _BOOT_ID.fullmatch(boot) else "",
        uptime_s=_number(uptime, 0, _MOST_SECONDS),
        clock_offset_ms=_offset_ms(moment, now_ms),
    )


def _battery(battery: dict[str, str]) -> tuple[int | None, float | None]:
    """Return percent and degrees. The service of a board without a battery invents values and marks them."""
    if battery.get("present", "true") != "true":
        return None, None
    level, scale = _number(battery.get("level", ""), 0, 1e6), _number(battery.get("scale", "100"), 1, 1e6)
    percent = round(level * 100 / scale) if level is not None and scale else None
    tenths = _number(battery.get("temperature", ""), _COLDEST * 10, _HOTTEST * 10)
    return percent if percent is not None and percent <= 100 else None, tenths / 10 if tenths is not None else None


def _zone(text: str) -> list[float]:
    """Return a sensor's degrees in a list, empty for a sensor that is off. Some drivers use no thousandths."""
    value = _number(text, _COLDEST * 1000, _HOTTEST * 1000)
    if value is None or value == 0:
        return []
    celsius = value / 1000 if abs(value) >= 1000 else value
    return [celsius] if _COLDEST < celsius <= _HOTTEST else []


def _offset_ms(text: str, now_ms: float) -> int | None:
    # A date that knows no nanoseconds is right to half a second.
    seconds, _, fraction = text.partition(".")
    value = _number(f"{seconds}.{fraction}" if fraction.isdecimal() else f"{seconds}.5", 0, 1e12)
    if value is None:
        return None
    offset = round(value * 1000 - now_ms)
    return offset if abs(offset) <= _MOST_OFFSET_MS else None


def _number(text: str, least: float, most: float) -> float | None:
    if not text.isascii() or not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    return value if least <= value <= most else None
