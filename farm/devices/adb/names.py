"""How farm's names of devices and adb's go together."""

from __future__ import annotations

import re

# The name that a virtual device has as serial and as product.
VIRTUAL_PREFIX = "virtual-"

# The product that `farm connect` gives a device of another adb server: it is looked for there, and not once more here.
RELAYED_PRODUCT = "farm-connect"

_HOST_PORT = re.compile(r"[\w.-]+:\d{1,5}|\[[0-9A-Fa-f:]+\]:\d{1,5}")


def adb_target(serial: str) -> str:
    """Return what an adb server, and `adb -s`, finds the device `serial` by.

    adb calls a device behind `adb connect` by its port, which changes with every start; it can also find it by its
    product, and a virtual device's product is its serial.
    """
    return f"product:{serial}" if serial.startswith(VIRTUAL_PREFIX) else serial


def network_address(adb_name: str) -> str:
    """Return the `HOST:PORT` by which adb calls a device that `adb connect` attached; empty for every other."""
    return adb_name if _HOST_PORT.fullmatch(adb_name) else ""
