"""How closely a run looks inside of its programs."""

from __future__ import annotations

from enum import StrEnum

from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.errors import UsageError


class Profile(StrEnum):
    """What `farm run --profile` may be."""

    AUTO = "auto"
    """What costs no latency: cycles on the simulator, nothing on hardware."""
    OFF = "off"
    BASIC = "basic"
    """Totals of every program."""
    DETAILED = "detailed"
    """Every node."""
    OPTRACE = "optrace"
    """What the SDK's tools make a timeline of: compiled in."""

    @property
    def kept(self) -> bool:
        """Whether it was asked for, so that the profile is kept with the attempt."""
        return self not in (Profile.AUTO, Profile.OFF)

    def flags(self, kind: str) -> dict[str, str]:
        """Return the runner's flags for it on a device that is `virtual` or `hardware`."""
        if self is Profile.AUTO:
            # The simulator's speed does not change with it; that of hardware would.
            return {"profile_level": "2"} if kind == "virtual" else {}
        # What was compiled in counts where nothing is said when running.
        level = {Profile.OFF: "0", Profile.BASIC: "1", Profile.DETAILED: "2"}.get(self)
        return {} if level is None else {"profile_level": level}


def require_profilable(profile: Profile, *, direct: bool) -> None:
    """Raise UsageError for a profile that direct mode's runner has no flag for."""
    if direct and profile.kept:
        raise UsageError(f"direct mode's runner takes no profile level: leave --profile or {DIRECT_MODE} out")
