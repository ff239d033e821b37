"""Settings of a run for the execution of its jobs, with the profiling level; light, as options of commands need it."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.errors import UsageError


class Profile(StrEnum):
    """Values of `farm run --profile`."""

    AUTO = "auto"
    """Profiling without a cost in latency: cycles on the simulator, none on hardware."""
    OFF = "off"
    BASIC = "basic"
    """Totals of every program."""
    DETAILED = "detailed"
    """Every node."""
    OPTRACE = "optrace"
    """Profiling that is compiled in, for timelines of the SDK's tools."""

    @property
    def kept(self) -> bool:
        """True for a requested profile, which is kept with the attempt."""
        return self not in (Profile.AUTO, Profile.OFF)

    def flags(self, kind: str) -> dict[str, str]:
        """Return the runner's flags for it on a device that is `virtual` or `hardware`."""
        if self is Profile.AUTO:
            # Profiling changes the speed of hardware and not the speed of the simulator.
            return {"profile_level": "2"} if kind == "virtual" else {}
        # Without a level at run time the compiled one applies.
        level = {Profile.OFF: "0", Profile.BASIC: "1", Profile.DETAILED: "2"}.get(self)
        return {} if level is None else {"profile_level": level}


class Execution(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the execution of each job of a run."""

    iterations: int = 3
    warm_up: int = 1
    timeout_s: float = 300.0
    reducible: bool = False
    """True if farm chose iterations and warm-up: virtual devices, and runners that write a file per execution, may do
    fewer."""
    profile: Profile = Profile.AUTO
    heap: bool = False
    """True to measure the DSP's heap, and nothing else."""
    seconds: int | None = None
    """Seconds for which programs repeat their prompts to generate text; None runs every prompt once."""

    @property
    def execution(self) -> dict[str, Any]:
        """These settings by name, for another struct with them."""
        return {name: getattr(self, name) for name in Execution.__struct_fields__}


def require_profilable(profile: Profile, *, direct: bool) -> None:
    """Raise UsageError for a profile that direct mode's runner has no flag for."""
    if direct and profile.kept:
        raise UsageError(f"direct mode's runner takes no profile level: leave --profile or {DIRECT_MODE} out")
