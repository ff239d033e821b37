"""Step 3: what of a change is to blame? From pairs in which one thing at a time is new. Pure: docs/regressions.md."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from farm.analysis.confirmation import Answer, Confirmation
from farm.analysis.scale import GATES, Scale, change_text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class Axis(StrEnum):
    """What can be swapped by itself between the last good run and the first bad one."""

    PROGRAM = "program"
    """The bundle's `.pte`."""
    RUNTIME = "runtime"
    """The runner."""
    SDK = "sdk"
    """QNN's libraries and skel."""
    DEVICE = "device"
    """Another device of the SoC, or the same with another system."""


class Guilt(StrEnum):
    """What the swaps say together."""

    AXIS = "axis"
    """One axis explains the change."""
    SEVERAL = "several"
    """More than one do, each a part of it."""
    INTERACTION = "interaction"
    """Only together: the axes by themselves leave over more than chance, and all that differ were swapped."""
    UNEXPLAINED = "unexplained"
    """What was measured does not tell."""
    NOTHING = "nothing"
    """There is no change to explain."""


class Explanation(msgspec.Struct, frozen=True):
    """Which axes are to blame for a change, and what they leave over. Changes are on the scale of the series."""

    guilt: Guilt
    axes: tuple[Axis, ...]
    """The guilty ones, the greatest effect first."""
    rest: float
    """What the axes by themselves leave over of the whole change, and its interval; NaN where none was swapped."""
    rest_low: float
    rest_high: float
    reason: str
    """One line."""


def explain(
    scale: Scale,
    whole: Confirmation,
    alone: Mapping[Axis, Confirmation],
    differing: Collection[Axis],
    *,
    gate: float | None = None,
) -> Explanation:
    """Name the axes that explain a change.

    `whole` compares all old with all new; `alone` compares all old with all old but for one axis; `differing` are the
    axes that are not the same. All from one device, with `confirm`. `gate`: an effect this small, on `scale`, is none.

    An axis is guilty when its interval leaves out 0 and its effect is beyond the gate, either way. What is left over
    counts when its interval, from those of all that were measured, leaves out 0 and it is beyond the gate.
    """
    gate = GATES[scale].confirmed if gate is None else gate
    if whole.answer is Answer.REFUTED or max(abs(whole.low), abs(whole.high)) < gate:
        return _without(Guilt.NOTHING, "the whole change is none")
    if not _is_there(whole.change, whole.low, whole.high, gate):
        return _without(Guilt.UNEXPLAINED, "the whole change is not certain: measure more pairs")
    used = {axis: one for axis, one in alone.items() if one.pairs}
    if not used:
        return _without(Guilt.UNEXPLAINED, "no axis was swapped by itself")
    guilty = [axis for axis, one in used.items() if _is_there(one.change, one.low, one.high, gate)]
    guilty.sort(key=lambda axis: -abs(used[axis].change))
    rest = whole.change - sum(one.change for one in used.values())
    # Independent measurements: their half widths add as squares do.
    half = math.hypot(*((one.high - one.low) / 2.0 for one in (whole, *used.values())))
    missing = sorted(set(differing) - used.keys())
    guilt, reason = _guilt(guilty, missing, is_left=_is_there(rest, rest - half, rest + half, gate))
    effects = "; ".join(
        f"{axis} {change_text(scale, one.change)} ({change_text(scale, one.low)} to {change_text(scale, one.high)})"
        for axis, one in sorted(used.items(), key=lambda item: -abs(item[1].change))
    )
    said = f"{reason}: {effects}; of {change_text(scale, whole.change)} in all {change_text(scale, rest)} left over"
    return Explanation(guilt, tuple(guilty), rest, rest - half, rest + half, said)


def _guilt(guilty: list[Axis], missing: list[Axis], *, is_left: bool) -> tuple[Guilt, str]:
    if is_left and missing:
        return Guilt.UNEXPLAINED, f"{' and '.join(missing)} not swapped by itself"
    if is_left:
        return Guilt.INTERACTION, "only together, or something that is no axis"
    if not guilty:
        return Guilt.UNEXPLAINED, "no axis stands out, and nothing is certain to be left over"
    return (Guilt.AXIS if len(guilty) == 1 else Guilt.SEVERAL), " and ".join(guilty)


def _is_there(change: float, low: float, high: float, gate: float) -> bool:
    """Tell whether a change is beyond the gate, and by its interval (low, high) not 0."""
    return abs(change) > gate and (low > 0.0 or high < 0.0)


def _without(guilt: Guilt, reason: str) -> Explanation:
    return Explanation(guilt, (), math.nan, -math.inf, math.inf, reason)
