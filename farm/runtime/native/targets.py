"""What native_runner/ is built for, and which backends have a runtime there."""

from __future__ import annotations

from typing import Literal

import msgspec

from farm.errors import UnknownNameError
from farm.runtime.native.elf import AARCH64, X86_64

Kind = Literal["simulator", "linux", "android", "oe-linux"]
Mode = Literal["traditional", "direct"]
"""Whether QNN runs on the device's processor and calls the DSP, or runs on the DSP, ExecuTorch's delegate with it."""


class BuildTarget(msgspec.Struct, frozen=True):
    """An operating system and a processor."""

    name: str
    kind: Kind
    machine: int
    """e_machine of its ELF files."""
    backends: tuple[str, ...]
    """Backends that have a runtime there."""
    rehearses: tuple[str, ...] = ()
    """Backends whose staging, options and rights can be tried there before a device is."""


HOST = "linux-x86_64"
LINUX_AARCH64 = "linux-aarch64"
ANDROID = "android-arm64"
OE_LINUX = "oe-linux-aarch64"

RUNNER = "farm_runner"
"""The program that native_runner/ builds for every target."""
BRIDGE = "libQnnHtp.so"
"""The library that it builds for this machine as well."""

TARGETS = {
    target.name: target
    for target in (
        BuildTarget(HOST, "simulator", X86_64, ("htp", "xnnpack"), rehearses=("lpai",)),
        # The aarch64 executorch wheel has no QNN backend.
        BuildTarget(LINUX_AARCH64, "linux", AARCH64, ("xnnpack",)),
        BuildTarget(ANDROID, "android", AARCH64, ("htp", "gpu", "lpai", "xnnpack")),
        BuildTarget(OE_LINUX, "oe-linux", AARCH64, ("htp", "gpu", "lpai")),
    )
}


def find_target(name: str) -> BuildTarget:
    """Return a target by name. Raises UnknownNameError."""
    try:
        return TARGETS[name]
    except KeyError:
        raise UnknownNameError("target", name, TARGETS) from None
