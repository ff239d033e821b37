"""Decision whether a job may begin on a device whose rented session ends. Pure."""

from __future__ import annotations

UNKNOWN_SECONDS = 60.0
"""Expected time of a job without history."""
# Push, health check and recording come on top of the runs that the estimate is made from.
_FACTOR, _MARGIN_SECONDS = 1.25, 10.0


def fits(expected_s: float | None, until_s: float, now_s: float) -> bool:
    """Return whether a job of `expected_s` ends before `until_s`; 0 for a device without an end, None for no history.

    Times are epoch seconds.
    """
    if not until_s:
        return True
    seconds = UNKNOWN_SECONDS if expected_s is None else expected_s
    return now_s + _FACTOR * seconds + _MARGIN_SECONDS <= until_s
