"""Where and why an attempt ended: what the steps of judging hand to each other."""

from __future__ import annotations

import msgspec

from farm.results.attempt import Comparison, Measurement, OperatorProfile, Stage, Verdict


class Ending(msgspec.Struct, frozen=True):
    """The part of an Attempt that judging finds out."""

    verdict: Verdict
    stage: Stage
    reason: str = ""
    comparisons: tuple[Comparison, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = ()
    operators: tuple[OperatorProfile, ...] = ()


def infra(stage: Stage, reason: str) -> Ending:
    """Return an ending that the farm or the device is to blame for."""
    return Ending(Verdict.INFRA, stage, reason)


def failed(stage: Stage, reason: str) -> Ending:
    """Return an ending that the thing under test is to blame for."""
    return Ending(Verdict.FAILED, stage, reason)
