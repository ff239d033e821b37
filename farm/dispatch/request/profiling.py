"""How closely a run looks inside of its programs."""

from __future__ import annotations

from enum import StrEnum

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


def require_profilable(profile: Profile, *, direct: bool) -> None:
    """Raise UsageError for a profile that direct mode's runner has no flag for."""
    if direct and profile.kept:
        raise UsageError(f"direct mode's runner takes no profile level: leave --profile or {DIRECT_MODE} out")
