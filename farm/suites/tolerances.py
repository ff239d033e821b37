"""Limits of what outputs may differ from their references, and those that hold where a manifest says nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from farm.suites.figures import figure_fields

_LimitFields: Any = msgspec.defstruct("_LimitFields", figure_fields(), frozen=True, forbid_unknown_fields=True)


class Limits(_LimitFields):  # type: ignore[misc]
    """What one output may differ from one reference, by figure: farm/suites/figures.py.

    A limit that is None is measured but does not decide.
    """


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits against both references: the FP32 module, and the quantized module on the CPU."""

    fp32: Limits = Limits()
    quantized: Limits = Limits()


# Two ways of computing in float32 differ by its rounding: docs/reference/suites.md.
_DEFAULTS = {"fp32": Tolerance(fp32=Limits(sqnr_db=100.0, mismatch=0.0))}
# Of cases that generate text, measured: docs/guides/language_models.md. The least of 16a8w were 59.0 dB, and 45.9 at
# the worst position; of 16a4w, where the first of these decoders was not measured, 57.4 and 45.9. A wrong element of
# a cache leaves 37 and 23.
_GENERATE_DEFAULTS = {
    "16a8w": Tolerance(quantized=Limits(sqnr_db=55.0, worst_position_db=48.0)),
    "16a4w": Tolerance(quantized=Limits(sqnr_db=42.0, worst_position_db=34.0)),
    "16a4w_block": Tolerance(quantized=Limits(sqnr_db=42.0, worst_position_db=34.0)),
}


def default_tolerance(precision: str, *, generates: bool = False) -> Tolerance:
    """Return what decides at `precision` where a manifest says nothing; `generates`: of a case that generates text."""
    return (_GENERATE_DEFAULTS if generates else _DEFAULTS).get(precision, Tolerance())
