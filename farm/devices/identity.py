"""Who a device is: asked of the device itself, in one round trip, and never believed from a flag."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from farm.devices.adb.names import NAME
from farm.devices.device import AdbAddress, Device, SshAddress
from farm.devices.text import clean_text
from farm.errors import DeviceError
from farm.suites.socs import load_socs

if TYPE_CHECKING:
    from farm.devices.device import Address
    from farm.devices.transport import Transport

# A phone under load answers in a second; one that takes longer is not fit to measure on.
_IDENTIFY_SECONDS = 10.0
_ANSWER_BYTES = 16 * 1024

_SOC = re.compile(r"[A-Z0-9][A-Z0-9_]{1,31}")
# What boards without a number of their own say, many of them the same.
_NO_SERIAL = re.compile(r"0*|unknown|none|null|n/a|default|0?123456789?0?(abcdef)?|(.)\2*", re.IGNORECASE)

_PROPERTIES = (
    "ro.soc.model",
    "ro.build.fingerprint",
    "ro.product.model",
    "ro.serialno",
    "ro.farm.virtual",
    "ro.build.version.sdk",
)
# $1: farm's folder, which is made and looked at on Linux, where others might have made it; the others: properties.
_SCRIPT = """
storage=$1; shift
if command -v getprop >/dev/null; then for name do echo "$name=$(getprop "$name")"; done; fi
soc=/sys/devices/soc0
echo "machine=$(cat $soc/machine 2>/dev/null)"
echo "serial=$(cat $soc/serial_number 2>/dev/null)"
if [ -r /proc/device-tree/compatible ]; then
    echo "compatible=$(tr '\\0' ' ' </proc/device-tree/compatible)"
    echo "model=$(tr '\\0' ' ' </proc/device-tree/model)"
fi
if [ -r /etc/os-release ]; then echo "system=$(sed -n 's/^PRETTY_NAME=//p' /etc/os-release | tr -d '"')"; fi
echo "kernel=$(uname -r)"
if [ -n "$storage" ]; then
    (umask 077; mkdir -p -- "$storage") 2>&1 | sed 's/^/storage_error=/'
    if [ -O "$storage" ] && [ -w "$storage" ]; then echo "storage=ok"; fi
fi
"""


def identify_transport(transport: Transport, address: Address, *, host: str = "") -> Device:
    """Ask the device behind `transport` who it is; `host` is the machine that it hangs on.

    Raises DeviceError when it does not say what it has to, or lets farm keep no files.
    """
    storage = "" if isinstance(address, AdbAddress) else str(transport.storage)
    argv = ["sh", "-c", _SCRIPT, "sh", storage, *_PROPERTIES]
    done = transport.run(argv, timeout_s=_IDENTIFY_SECONDS, max_output=_ANSWER_BYTES)
    said: dict[str, str] = {}
    for line in done.stdout.split(b"\n"):
        name, _, value = line.partition(b"=")
        said.setdefault(clean_text(name), clean_text(value))
    soc = read_soc(said)
    if not soc:
        problem = (
            "does not say which SoC it has: neither ro.soc.model nor /sys/devices/soc0/machine is a name, "
            "and /proc/device-tree/compatible has none that farm knows"
        )
        raise DeviceError(transport.serial, problem)
    if storage and said.get("storage") != "ok":
        why = said.get("storage_error") or "it is not this user's own, or cannot be written"
        problem = f"farm cannot keep its files in {storage}: {why}; name another folder by 'storage' in farm.toml"
        raise DeviceError(transport.serial, problem)
    android = isinstance(address, AdbAddress) and bool(said.get("ro.build.version.sdk"))
    system = " ".join(filter(None, (said.get("system", ""), said.get("kernel", ""))))
    serialno = _serial(said)
    return Device(
        serial=transport.serial if isinstance(address, AdbAddress) else serialno or transport.serial,
        soc=soc,
        kind="virtual" if said.get("ro.farm.virtual") == "1" else "hardware",
        build=said.get("ro.build.fingerprint") or clean_text(system),
        address=address,
        product=said.get("ro.product.model") or said.get("model", ""),
        os="android" if android else "linux",
        host=host,
        serialno=serialno,
    )


def read_soc(said: dict[str, str]) -> str:
    """Return the SoC that a device's answers name, as profiles have it; empty when none does. Pure.

    Of the entries in `compatible`, `qcom,qcs9100-ride qcom,qcs9100`, only one that is a profile's name counts.
    """
    soc = _soc(said.get("ro.soc.model", "")) or _soc(said.get("machine", ""))
    if soc:
        return soc
    parts = [entry.removeprefix("qcom,").upper() for entry in said.get("compatible", "").split() if "qcom," in entry]
    known = [part for part in parts if part in load_socs()]
    return known[0] if known else ""


def place_of(address: Address) -> str:
    """Return what a device is called before it has said who it is."""
    if isinstance(address, SshAddress):
        return address.host if address.port == 22 else f"{address.host}:{address.port}"
    return f"{address.host}:{address.port}" if isinstance(address, AdbAddress) else "localhost"


def _soc(said: str) -> str:
    """Return an SoC's name as profiles have it: some builds add a bin or write it in small letters, "SM8650-AC"."""
    name = said.upper().split("-")[0].strip()
    return name if _SOC.fullmatch(name) else ""


def _serial(said: dict[str, str]) -> str:
    for name in (said.get("ro.serialno", ""), said.get("serial", "")):
        if NAME.fullmatch(name) and not _NO_SERIAL.fullmatch(name):
            return name
    return ""
