"""Limits for differences between outputs and references, and defaults for manifests without limits."""

from __future__ import annotations

from typing import Any

import msgspec

from farm.suites.figures import figure_fields

_LimitFields: Any = msgspec.defstruct("_LimitFields", figure_fields(), frozen=True, forbid_unknown_fields=True)


class Limits(_LimitFields):  # type: ignore[misc]
    """Limits for one output against one reference, by figure: farm/suites/figures.py.

    A limit that is None is measured but does not decide.
    """


class Tolerance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits against both references: the FP32 module, and the quantized module on the CPU."""

    fp32: Limits = Limits()
    quantized: Limits = Limits()


# Two ways of computing in float32 differ by its rounding: docs/reference/suites.md.
_DEFAULTS = {"fp32": Tolerance(fp32=Limits(sqnr_db=100.0, mismatch=0.0))}
# Defaults of text generation, from measurements: docs/guides/language_models.md. The least values of 16a8w were
# 59.0 dB, and 45.9 dB at the worst position; of 16a4w, without the first of these decoders, 57.4 and 45.9. A wrong
# element in a cache gives 37 and 23.
_GENERATE_DEFAULTS = {
    "16a8w": Tolerance(quantized=Limits(sqnr_db=55.0, worst_position_db=48.0)),
    "16a4w": Tolerance(quantized=Limits(sqnr_db=42.0, worst_position_db=34.0)),
    "16a4w_block": Tolerance(quantized=Limits(sqnr_db=42.0, worst_position_db=34.0)),
}


def default_tolerance(precision: str, *, generates: bool = False) -> Tolerance:
    """Return the default limits at `precision`; `generates` for a case of text generation."""
    return (_GENERATE_DEFAULTS if generates else _DEFAULTS).get(precision, Tolerance())
