"""What is said of a job that a run had no time for. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.report.model.format import duration

if TYPE_CHECKING:
    from farm.store.view import Stale

_DAY_S = 86_400


def stale_words(stale: Stale, now_ms: int) -> str:
    """Return how old what is known of a stale job is, and why it is: `last run 3 days before, passed; ...`.

    `now_ms` is when the run began that left it out, so that the words are the same whenever they are read.
    """
    if not stale.last_ms:
        return f"never run before; {stale.reason}"
    seconds = max(0.0, (now_ms - stale.last_ms) / 1000)
    days = int(seconds // _DAY_S)
    age = f"{days} day{'' if days == 1 else 's'}" if days else duration(seconds)
    return f"last run {age} before, {stale.last_outcome or 'unknown'}; {stale.reason}"
