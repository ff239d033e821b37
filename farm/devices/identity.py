"""Identity of a device, read from the device itself in one round trip, never from an option."""

from __future__ import annotations

import contextlib
import re
from typing import Literal

from farm.base.errors import DeviceError
from farm.base.ids import NAME
from farm.base.socs import SOC_NAME, profile_name, reported_profile
from farm.devices.connect import transport_to
from farm.devices.device import Device, DeviceAddress, SshAddress
from farm.devices.text import clean_text, named_values

# A phone under load answers in a second; a slower one is unfit for measurements.
_IDENTIFY_SECONDS = 10.0
_ANSWER_BYTES = 16 * 1024

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
_SCRIPT = (
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
        argv = ["sh", "-c", _SCRIPT, "sh", storage, *_PROPERTIES]
        done = transport.run(argv, timeout_s=_IDENTIFY_SECONDS, max_output=_ANSWER_BYTES)
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
    for name in (properties.get("ro.serialno", ""), properties.get("serial", "")):
        if NAME.fullmatch(name) and not _NO_SERIAL.fullmatch(name):
            return name
    return ""
