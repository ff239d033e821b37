"""`farm` with attached virtual devices that it takes for phones: stubs of hardware without a DSP.

`python hardware_stub.py WORD...` is that `farm`.

A skel of the QNN SDK is part of the runtime, as on a phone.
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from farm.base.hashes import sha256_of
from farm.builds.runtime import runtime
from farm.builds.runtime.runtime import Runtime
from farm.cli.main import main
from farm.devices import discovery
from farm.devices.device import Device

_identify = discovery.identify


def _hardware(*arguments: Any, **named: Any) -> Device:
    return msgspec.structs.replace(_identify(*arguments, **named), kind="hardware")


def _android(config: Any, soc: Any, backend: str, mode: Any = "traditional", **_: Any) -> Runtime:
    made = msgspec.structs.replace(runtime.virtual_runtime(config, soc, backend, mode=mode), kind="android")
    skels = list(config.sdk_root.glob(f"lib/hexagon-v{soc.htp_arch}/unsigned/*Skel.so")) if config.sdk_root else []
    return msgspec.structs.replace(
        made,
        files=made.files | {path.name: path for path in skels},
        hashes=made.hashes | {path.name: sha256_of(path) for path in skels},
    )


WITH_HARDWARE = (sys.executable, __file__)
"""Words that start it."""

if __name__ == "__main__":
    discovery.identify = _hardware
    runtime.attached_runtime = _android
    main()
