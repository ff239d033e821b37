"""Forms of texts that farm reads: device names, run ids, bundle keys, durations."""

from __future__ import annotations

import re

# Forms of device names, run ids and bundle keys, checked before one becomes a word or a path.


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""A serial, a product or a name that can be a word of a command and a part of a file's name."""
RUN_ID = r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}"
"""Pattern of what `farm.store.rows.new_run_id` makes; the ids of nightly runs are the same."""

_RUN_ID = re.compile(RUN_ID)
# A SHA-256: `farm.builds.bundles.key`.
_BUNDLE_KEY = re.compile(r"[0-9a-f]{64}")


def is_run_id(text: str) -> bool:
    """Return whether `text` is the id of a run or a nightly run, and so a name that leads nowhere else."""
    return _RUN_ID.fullmatch(text) is not None


def is_bundle_key(text: str) -> bool:
    """Return whether `text` is the key of a bundle, and so a name that leads nowhere else."""
    return _BUNDLE_KEY.fullmatch(text) is not None


# Durations in text: `90s`, `1h30m`. humanize formats durations and reads none.


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
