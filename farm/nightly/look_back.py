"""The one place where a night looks back at the numbers of a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.nightly.record import Findings, Told

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.config.settings import Config

SHARE = 0.2
"""Part of the time of a cell that is kept for measuring candidates again: docs/regressions.md has what they cost."""


def look_back(config: Config, run_id: str, say: Callable[[str], None], budget_s: float | None) -> Findings:
    """Return the regressions that a run shows, within a time in seconds; None for as long as it takes."""
    from farm.regressions.confirm_job import PairsRequest
    from farm.regressions.confirm_run import confirm_run
    from farm.report.model.alerts import change_of, word_of
    from farm.store.records import AlertState
    from farm.store.store import open_store

    with open_store(config.store_url) as store:
        found = confirm_run(config, store, run_id, PairsRequest(command="farm nightly"), say, budget_s=budget_s)
    for line in found.left_out:
        say(line)
    states = [one.state for one in found.alerts]
    return Findings(
        tuple(Told(one.job_id, f"{one.metric} {word_of(one)}: {change_of(one)}") for one in found.regressions),
        confirmed=states.count(AlertState.CONFIRMED),
        unknown=states.count(AlertState.UNKNOWN),
        not_asked=found.not_asked,
    )
