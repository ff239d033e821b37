"""Runs `farm` with attached virtual devices that it takes for phones, as a stub of hardware that has no DSP.

`python tests/hardware_stub.py run --soc ...`
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from farm.cli.main import main
from farm.devices import discovery
from farm.runtime import runtime

if TYPE_CHECKING:
    from farm.devices.device import Device
    from farm.runtime.runtime import Runtime

_identify = discovery.identify


def _hardware(*arguments: Any, **named: Any) -> Device:
    return msgspec.structs.replace(_identify(*arguments, **named), kind="hardware")


def _android(config: Any, soc: Any, backend: str, mode: Any = "traditional", **_: Any) -> Runtime:
    return msgspec.structs.replace(runtime.virtual_runtime(config, soc, backend, mode=mode), kind="android")


if __name__ == "__main__":
    discovery.identify = _hardware
    runtime.attached_runtime = _android
    main()
