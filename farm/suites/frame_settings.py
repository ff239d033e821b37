"""Frame rate, clock and cores of a target, for a backend that refuses unsupported values. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.suites.suite import Target

_SWEPT = ("fps", "ftrt_ratio", "core_selection")


class FrameSetting(msgspec.Struct, frozen=True):
    """Setting that a program runs with: run time, else compiler, else default."""

    fps: int
    ftrt_ratio: int
    cores: int
    """Bit mask, 0 for any."""
    on_time: bool
    """A program whose time cannot be kept is refused."""
    others: tuple[tuple[str, str], ...]
    """Options of the target that the setting leaves out: what else differs between two programs."""

    @property
    def text(self) -> str:
        """`fps 5, ftrt_ratio 10, core_selection 0`."""
        return f"fps {self.fps}, ftrt_ratio {self.ftrt_ratio}, core_selection {self.cores}"


def frame_setting(backend: str, options: Mapping[str, str]) -> FrameSetting | None:
    """Return the setting of a target, None for a backend without one."""
    defaults = BACKENDS[backend].frame_defaults if backend in BACKENDS else {}
    if not defaults:
        return None

    def value(name: str) -> str:
        return options.get(f"{backend}_{name}") or options.get(name) or defaults[name]

    return FrameSetting(
        fps=int(value("fps")),
        ftrt_ratio=int(value("ftrt_ratio")),
        cores=int(value("core_selection")),
        on_time=value("client_perf_type") == "real_time",
        others=tuple((name, text) for name, text in options.items() if name.removeprefix(f"{backend}_") not in _SWEPT),
    )


def late_flags(target: Target) -> dict[str, str]:
    """Return the runner's flags with which QNN refuses no program for its time; {} where that changes nothing.

    The runner of direct mode has no such flag.
    """
    setting = frame_setting(target.backend, dict(target.options))
    if setting is None or not setting.on_time or target.direct:
        return {}
    name = f"{target.backend}_client_perf_type"
    return {name: str(BACKENDS[target.backend].options[name].words["non_real_time"])}
