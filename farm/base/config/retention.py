"""Retention of runs: the reason for which each stays. Pure; `docs/reference/store.md` explains the rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from farm.base.durations import age_in_seconds

RESULTS = 30
"""Newest results of every job that stay by default: a baseline of 21 and room for nights that cannot be compared."""


class RetentionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[retention]` of farm.toml: conditions under which a run stays. None is no rule."""

    keep: str | None = None
    """Age up to which runs stay: `90d`, `12w`, `36h`."""
    keep_nightly: str | None = None
    """Age up to which nightly runs stay; default: as `keep`."""
    keep_runs: int | None = None
    """Newest runs of a branch that stay; local runs are counted apart."""
    keep_results: int = RESULTS
    """Newest results of each job whose runs stay, at least 1."""


class FailuresConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[failures]` of farm.toml: limits of the inputs and outputs that are kept of failed attempts."""

    keep_attempts: int = 20
    """Failed attempts of a run with kept files; 0 keeps none."""
    keep_mb: int = 64
    """Inputs and outputs of one attempt together, in MiB."""


class Rules(msgspec.Struct, frozen=True):
    """Conditions under which a run stays; `keep_ms`, `keep_runs` or both are set."""

    keep_ms: int | None = None
    keep_nightly_ms: int | None = None
    """None: as for others."""
    keep_runs: int | None = None
    keep_results: int = RESULTS


class RunFacts(msgspec.Struct, frozen=True):
    """Facts of a run for the decision about it."""

    run_id: str
    started_ms: int
    """Epoch, milliseconds."""
    priority: str
    branch: str = ""
    private: bool = False
    """True for a run outside its branch's history."""


class KeepReason(StrEnum):
    """Reason for which a run stays."""

    AGE = "age"
    NEWEST = "newest"
    """Among the newest runs of its branch that `keep_runs` asks for."""
    RESULTS = "results"
    """The run has a result that is among the newest of its job."""
    GOING_ON = "going on"
    """The run has no end and began, or got a record, within a day."""
    ALERT = "alert"
    """Something else in the store names it."""


def age_ms(text: str) -> int | None:
    """Return `90d`, `12w` or `36h` in milliseconds; None for other text."""
    seconds = age_in_seconds(text)
    return None if seconds is None else int(seconds * 1000)


def decide(
    runs: Sequence[RunFacts], rules: Rules, now_ms: int, protected: Mapping[str, KeepReason]
) -> dict[str, KeepReason | None]:
    """Return the reason for which each run stays, None for a run to delete, in the order of `runs`, newest first.

    A run stays for any single reason. Runs in `protected` stay at any age.
    """
    nightly_ms = rules.keep_ms if rules.keep_nightly_ms is None else rules.keep_nightly_ms
    decided: dict[str, KeepReason | None] = {}
    newer: Counter[tuple[str, bool]] = Counter()
    for run in runs:
        # Local runs are counted apart, so that they push no nightly run out.
        group = ("", True) if run.private else (run.branch, False)
        number, newer[group] = newer[group], newer[group] + 1
        keep_ms = nightly_ms if run.priority == "nightly" else rules.keep_ms
        if keep_ms is not None and run.started_ms > now_ms - keep_ms:
            decided[run.run_id] = KeepReason.AGE
        elif rules.keep_runs is not None and number < rules.keep_runs:
            decided[run.run_id] = KeepReason.NEWEST
        else:
            decided[run.run_id] = protected.get(run.run_id)
    return decided
