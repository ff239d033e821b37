"""Durations in text: `90s`, `1h30m`. humanize formats durations and reads none."""

from __future__ import annotations

import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Seconds by the first letter of a unit."""
_UNIT = r"(?:s(?:ec(?:ond)?s?)?|m(?:in(?:ute)?s?)?|h(?:(?:ou)?rs?)?|d(?:ays?)?|w(?:eeks?)?)"
_PART = rf"(\d{{1,6}}(?:\.\d{{1,3}})?)\s*({_UNIT})\s*"
DAY_S = 86400
LONGEST_S = 30 * DAY_S
"""Longest wait in seconds."""
OLDEST_S = 100_000 * DAY_S
"""Greatest age in seconds."""


def in_seconds(text: str, longest_s: float = LONGEST_S) -> float | None:
    """Return `90s`, `10min`, `1.5h`, `1h30m`, `2d`, `12 weeks` in seconds; None for other text or a longer time."""
    parts = re.findall(_PART, text) if re.fullmatch(rf"\s*(?:{_PART})+", text) else []
    seconds = sum(float(number) * _SECONDS[unit[0]] for number, unit in parts)
    return seconds if 0 < seconds <= longest_s else None


def age_in_seconds(text: str) -> float | None:
    """Return an age in seconds, also zero (`0d`); None for other text."""
    return 0.0 if re.fullmatch(rf"\s*0+\s*{_UNIT}\s*", text) else in_seconds(text, OLDEST_S)
