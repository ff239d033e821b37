"""Where and why an attempt ended: what the steps of judging hand to each other."""

from __future__ import annotations

import msgspec

from farm.results.attempt import Cause, Comparison, Measurement, OperatorProfile, Stage, Verdict


class Ending(msgspec.Struct, frozen=True):
    """The part of an Attempt that judging finds out."""

    verdict: Verdict
    stage: Stage
    reason: str = ""
    comparisons: tuple[Comparison, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()
    cause: Cause = Cause.NONE


def infra(stage: Stage, reason: str, cause: Cause = Cause.NONE) -> Ending:
    """Return an ending that the farm or the device is to blame for."""
    return Ending(Verdict.INFRA, stage, reason, cause=cause)


def failed(stage: Stage, reason: str, cause: Cause) -> Ending:
    """Return an ending that the thing under test is to blame for, as far as one device can tell."""
    return Ending(Verdict.FAILED, stage, reason, cause=cause)
