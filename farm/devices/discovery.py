"""What is attached to an adb server: which devices can be used, and why the others cannot."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import msgspec

from farm.devices.adb_names import VIRTUAL_PREFIX
from farm.devices.device import AdbAddress, Device, Unusable
from farm.devices.text import clean_text
from farm.errors import DeviceError

# A phone under load answers in a second; one that takes longer is not fit to measure on.
_IDENTIFY_SECONDS = 10.0
_ANSWER_BYTES = 16 * 1024
# More are not attached to one machine; a server that lists more is not believed.
_MOST_DEVICES = 256

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SOC = re.compile(r"[A-Z0-9][A-Z0-9_]{1,31}")

_PROPERTIES = ("ro.soc.model", "ro.build.fingerprint", "ro.product.model", "ro.serialno", "ro.farm.virtual")
_SCRIPT = (
    'for name in "$@"; do echo "$name=$(getprop "$name")"; done;'
    'echo "machine=$(cat /sys/devices/soc0/machine 2>/dev/null)"'
)

_REASONS = {
    "unauthorized": "it does not trust this machine: unlock it and accept 'Allow USB debugging'",
    "authorizing": "it is being asked whether it trusts this machine: try again",
    "connecting": "it is being connected: try again",
    "offline": "adb sees it but it does not answer: replug it, or 'adb reconnect offline'",
    "no permissions": "this user may not open its USB device: add a udev rule for it",
    "recovery": "it is in recovery mode: restart it",
    "rescue": "it is in rescue mode: restart it",
    "sideload": "it is in sideload mode: restart it",
    "bootloader": "it is in its bootloader: restart it",
}


class Scan(msgspec.Struct, frozen=True):
    """What an adb server has attached, both parts sorted by serial."""

    devices: tuple[Device, ...]
    unusable: tuple[Unusable, ...]


def discover(port: int) -> list[Device]:
    """Return the usable devices behind the adb server on `port`, sorted. Raises InfraError without a server."""
    return list(scan(port).devices)


def scan(port: int) -> Scan:
    """Ask every device behind the adb server on `port` who it is, all at once. Raises InfraError without a server."""
    from farm.devices.adb_host import AdbHost

    listed = _attached(AdbHost(port).query("host:devices-l"))
    unusable = [
        Unusable(name, state, _REASONS.get(state, f"adb says {state!r}: replug it"))
        for name, state in listed
        if state != "device"
    ]
    ready = [name for name, state in listed if state == "device"]
    devices = []
    with ThreadPoolExecutor(max_workers=max(1, min(16, len(ready)))) as pool:
        for found in pool.map(lambda name: _try_identify(name, port), ready):
            if isinstance(found, Device):
                devices.append(found)
            else:
                unusable.append(found)
    return Scan(tuple(sorted(devices, key=_by_serial)), tuple(sorted(unusable, key=_by_serial)))


def identify(serial: str, port: int) -> Device:
    """Ask one device who it is, in one round trip. Raises DeviceError when it does not say what it has to."""
    from farm.devices.adb import AdbTransport

    argv = ["sh", "-c", _SCRIPT, "sh", *_PROPERTIES]
    done = AdbTransport(serial, port).run(argv, timeout_s=_IDENTIFY_SECONDS, max_output=_ANSWER_BYTES)
    said: dict[str, str] = {}
    for line in done.stdout.split(b"\n"):
        name, _, value = line.partition(b"=")
        said.setdefault(clean_text(name), clean_text(value))
    soc = _soc(said.get("ro.soc.model", "")) or _soc(said.get("machine", ""))
    if not soc:
        problem = "does not say which SoC it has: neither ro.soc.model nor /sys/devices/soc0/machine is a name"
        raise DeviceError(serial, problem)
    return Device(
        serial=serial,
        soc=soc,
        kind="virtual" if said.get("ro.farm.virtual") == "1" else "hardware",
        build=said.get("ro.build.fingerprint", ""),
        address=AdbAddress(port),
        product=said.get("ro.product.model", ""),
    )


def _try_identify(serial: str, port: int) -> Device | Unusable:
    try:
        return identify(serial, port)
    except DeviceError as error:
        return Unusable(serial, "device", clean_text(str(error).removeprefix(f"{serial}: ")))


def _attached(listing: str) -> list[tuple[str, str]]:
    """Return serial and state of every line of `host:devices-l`; a virtual device goes by its product."""
    attached = []
    for line in listing.splitlines()[:_MOST_DEVICES]:
        serial, _, rest = line.partition(" ")
        rest = rest.strip()
        # The one state of two words, followed by an explanation.
        state = "no permissions" if rest.startswith("no permissions") else clean_text(rest.split(" ")[0])
        product = next((word.removeprefix("product:") for word in rest.split() if word.startswith("product:")), "")
        if product.startswith(VIRTUAL_PREFIX) and _NAME.fullmatch(product):
            serial = product
        attached.append((clean_text(serial), state))
    return attached


def _soc(said: str) -> str:
    """Return an SoC's name as profiles have it: some builds add a bin or write it in small letters, "SM8650-AC"."""
    name = said.upper().split("-")[0].strip()
    return name if _SOC.fullmatch(name) else ""


def _by_serial(found: Device | Unusable) -> str:
    return found.serial
