"""The one place where a night looks back at the numbers of a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.nightly.record import Findings

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.config import Config

SHARE = 0.0
"""Part of the time of a cell that is kept for looking back."""


def look_back(config: Config, run_id: str, say: Callable[[str], None], budget_s: float | None) -> Findings:
    """Return the regressions that a run shows, within a time in seconds; None for as long as it takes.

    Nothing looks at the numbers yet, so that there are none.
    """
    del config, run_id, say, budget_s
    return Findings()
