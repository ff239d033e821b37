"""How a device is right now, read in one round trip, and whether it is cool and charged enough to be measured on."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from farm.base.errors import DeviceError
from farm.devices.identity import PRINT_BOOT
from farm.devices.room import TELL_ROOM, free_bytes
from farm.devices.text import named_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farm.base.config.settings import HealthConfig
    from farm.devices.transport import Transport

# dumpsys waits for the service, which answers at once unless the device is in trouble.
STATUS_SECONDS = 20.0
# A case cools down by a degree in half a minute.
POLL_SECONDS = 5.0
_ANSWER_BYTES = 64 * 1024

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
        stderr = done.stderr.decode(errors="replace")
        raise DeviceError(transport.serial, "does not report its state", code=done.code, stderr=stderr)
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
