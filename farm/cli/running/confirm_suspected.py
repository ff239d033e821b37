"""Confirmation of a nightly cell's suspected regressions by interleaved pairs, within a time."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.dispatch.nightly.record import Findings, JobNote

if TYPE_CHECKING:
    from farm.base.config.settings import Config


logger = logging.getLogger(__name__)


def confirm_suspected(config: Config, run_id: str, budget_s: float | None) -> Findings:
    """Return the regressions of a run after measuring its suspected changes within `budget_s`; None: no limit."""
    from farm.dispatch.request.resume import config_of_run
    from farm.numbers.regressions.confirm_job import PairsRequest
    from farm.numbers.regressions.confirm_run import confirm_run
    from farm.report.model.alerts import change_line
    from farm.store.records import AlertState
    from farm.store.store import open_store

    with open_store(config.store_url) as store:
        try:
            config = config_of_run(config, store.runs.view(run_id), "")
        except FarmError as error:
            # Results of another toolchain must not be recorded for this run, so it is judged without a measurement.
            logger.warning(
                "suspected changes of run %s are not measured, its toolchain cannot be used: %s", run_id, error
            )
            budget_s = 0.0
        found = confirm_run(config, store, run_id, PairsRequest(command="farm nightly"), budget_s=budget_s)
    for line in found.left_out:
        logger.info(line)
    states = [one.state for one in found.alerts]
    return Findings(
        tuple(JobNote(one.job_id, change_line(one)) for one in found.regressions),
        confirmed=states.count(AlertState.CONFIRMED),
        unknown=states.count(AlertState.UNKNOWN),
        not_measured=found.not_measured,
    )
