"""How long something takes, as people write it."""

from __future__ import annotations

import re

_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_PART = r"(\d{1,6}(?:\.\d{1,3})?)\s*(s|min|m|h|d)\s*"
_LONGEST_S = 30 * 86400


def in_seconds(text: str) -> float | None:
    """Return `90s`, `10m`, `1.5h`, `1h30m` or `2d` in seconds; None for what is none, or more than 30 days."""
    parts = re.findall(_PART, text) if re.fullmatch(rf"\s*(?:{_PART})+", text) else []
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return seconds if 0 < seconds <= _LONGEST_S else None
