"""How farm's names of devices and adb's go together."""

from __future__ import annotations

# The name that a virtual device has as serial and as product.
VIRTUAL_PREFIX = "virtual-"


def adb_target(serial: str) -> str:
    """Return what an adb server, and `adb -s`, finds the device `serial` by.

    adb calls a device behind `adb connect` by its port, which changes with every start; it can also find it by its
    product, and a virtual device's product is its serial.
    """
    return f"product:{serial}" if serial.startswith(VIRTUAL_PREFIX) else serial
