"""Targets of native_runner/, and the backends with a runtime on each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from farm.base.backends.registry import BACKENDS
from farm.base.errors import UnknownNameError
from farm.builds.runtime.native.elf import AARCH64, X86_64

if TYPE_CHECKING:
    from farm.base.backends.descriptor import Backend

Kind = Literal["simulator", "linux", "android", "oe-linux"]
Mode = Literal["traditional", "direct"]
"""Place of QNN and ExecuTorch's delegate: on the device's processor, which calls the DSP, or on the DSP itself."""


class BuildTarget(msgspec.Struct, frozen=True):
    """Operating system and processor."""

    name: str
    kind: Kind
    machine: int
    """e_machine of its ELF files."""

    @property
    def backends(self) -> tuple[str, ...]:
        """Backends with a runtime on the target: first those without need of root, CPU backends last."""
        return tuple(
            one.name
            for one in sorted(BACKENDS.values(), key=lambda one: (one.on_cpu, one.needs_root))
            if self._runs(one)
        )

    @property
    def rehearses(self) -> tuple[str, ...]:
        """Backends whose staging, options and rights can be tried on the target before a device is available."""
        if self.kind != "simulator":
            return ()
        return tuple(one.name for one in BACKENDS.values() if one.on_host == "rehearsed")

    def _runs(self, backend: Backend) -> bool:
        if self.kind == "simulator":
            return backend.on_host == "runs"
        # The aarch64 executorch wheel has no QNN backend, and the runner for Arm Linux with QNN is ExecuTorch's.
        return self.kind == "android" or backend.on_cpu == (self.kind == "linux")


HOST = "linux-x86_64"
LINUX_AARCH64 = "linux-aarch64"
ANDROID = "android-arm64"
OE_LINUX = "oe-linux-aarch64"

RUNNER = "farm_runner"
"""Program that native_runner/ builds for every target."""
BRIDGE = "libQnnHtp.so"
"""Library that native_runner/ builds for this machine only."""

TARGETS = {
    target.name: target
    for target in (
        BuildTarget(HOST, "simulator", X86_64),
        BuildTarget(LINUX_AARCH64, "linux", AARCH64),
        BuildTarget(ANDROID, "android", AARCH64),
        BuildTarget(OE_LINUX, "oe-linux", AARCH64),
    )
}


def find_target(name: str) -> BuildTarget:
    """Return a target by name. Raises UnknownNameError."""
    try:
        return TARGETS[name]
    except KeyError:
        raise UnknownNameError("target", name, TARGETS) from None
