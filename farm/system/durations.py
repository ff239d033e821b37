"""How long something takes, as people write it."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_PART = r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|min|m|h|d|w)\s*"
DAY_S = 86400
LONGEST_S = 30 * DAY_S
"""Of what somebody waits for."""
OLDEST_S = 100_000 * DAY_S
"""Of the age of something."""


def in_seconds(text: str, longest_s: float = LONGEST_S) -> float | None:
    """Return `90s`, `10m`, `1.5h`, `1h30m`, `2d` or `12w` in seconds; None for what is none, or is longer."""
    parts = re.findall(_PART, text) if re.fullmatch(rf"\s*(?:{_PART})+", text) else []
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return seconds if 0 < seconds <= longest_s else None


def age_in_seconds(text: str) -> float | None:
    """Return an age in seconds, which may also be nothing: `0d`; None for what is none."""
    return 0.0 if re.fullmatch(r"\s*0+\s*[smhdw]\s*", text) else in_seconds(text, OLDEST_S)
