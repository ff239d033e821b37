"""Frame rate, clock and cores of a target, for a backend that refuses unsupported values. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.suites.suite import Target


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
    known = BACKENDS.get(backend)
    names = known.frame_options if known is not None else None
    if names is None:
        return None

    def value(name: str) -> str:
        return options.get(f"{names.run_prefix}{name}") or options.get(name) or names.defaults[name]

    swept = [f"{prefix}{name}" for prefix in ("", names.run_prefix) for name in (names.fps, names.clock, names.cores)]
    return FrameSetting(
        fps=int(value(names.fps)),
        ftrt_ratio=int(value(names.clock)),
        cores=int(value(names.cores)),
        on_time=value(names.client) == names.on_time,
        others=tuple((name, text) for name, text in options.items() if name not in swept),
    )


def late_flags(target: Target) -> dict[str, str]:
    """Return the runner's flags with which QNN refuses no program for its time; {} where that changes nothing.

    The runner of direct mode has no such flag.
    """
    setting = frame_setting(target.backend, dict(target.options))
    names = BACKENDS[target.backend].frame_options
    if setting is None or names is None or not setting.on_time or target.direct:
        return {}
    name = f"{names.run_prefix}{names.client}"
    return {name: str(BACKENDS[target.backend].options[name].words[names.late])}
