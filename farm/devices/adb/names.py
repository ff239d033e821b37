"""How farm's names of devices and adb's go together."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# The name that a virtual device has as serial and as product.
VIRTUAL_PREFIX = "virtual-"

# Product of devices that `farm devices connect` relays from another adb server: discovery skips them here.
RELAYED_PRODUCT = "farm-connect"

SERIAL_VARIABLE = "ANDROID_SERIAL"
# Variables by which programs of adb choose a server and a device. ADB_SERVER_SOCKET wins over the two after it.
_CHOOSING = ("ADB_SERVER_SOCKET", "ANDROID_ADB_SERVER_ADDRESS", "ANDROID_ADB_SERVER_PORT", SERIAL_VARIABLE)


def adb_target(serial: str) -> str:
    """Return what an adb server, and `adb -s`, finds the device `serial` by.

    adb calls a device behind `adb connect` by its port, which changes with every start; it can also find it by its
    product, and a virtual device's product is its serial.
    """
    return f"product:{serial}" if serial.startswith(VIRTUAL_PREFIX) else serial


def choose_server(environment: MutableMapping[str, str], variables: Mapping[str, str]) -> None:
    """Make `variables` the only ones of an environment that choose an adb server and a device."""
    for name in _CHOOSING:
        environment.pop(name, None)
    environment.update(variables)


def named_device(environment: Mapping[str, str]) -> str:
    """Return the device that ANDROID_SERIAL names; empty where adb would take any, as for an empty value."""
    return environment.get(SERIAL_VARIABLE, "")


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this environment for programs that call adb, with `variables` that choose server and device."""
    environment = dict(os.environ)
    choose_server(environment, variables)
    return environment
