"""The end of a run on a shared farm, recorded by the task `farm.finish` on any agent.

Several agents may call `finish` at once and again: the first complete call counts, and the others change nothing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError
from farm.base.exit_codes import ExitCode
from farm.base.interrupts import INTERRUPTED
from farm.dispatch.cluster.terms import decode_terms
from farm.dispatch.request.budget import Budget
from farm.dispatch.request.ending import exit_code_of
from farm.store.cluster.unreadable import REFUSED_BY

if TYPE_CHECKING:
    from farm.store.cluster.records import Order
    from farm.store.store import Store
    from farm.store.view import RunView

logger = logging.getLogger(__name__)


def finish(store: Store, run_id: str) -> int | None:
    """Record the end of a run and compare its numbers with earlier runs; return its exit code.

    None while work of the run is left, and for a run that was not submitted. Raises StoreError.
    """
    from farm.dispatch.history_comparison import record_comparison

    store.cluster.end_if_over(run_id)
    order = store.cluster.order(run_id)
    if order is None or order.state != "ended":
        return None
    view = store.runs.view(run_id)
    if view.finished_ms is not None:
        return view.exit_code
    if not order.cancelled_by:
        _mark_skipped(store, view, order)
        view = store.runs.view(run_id)
    code = INTERRUPTED if order.cancelled_by else exit_code_of(view)
    if order.cancelled_by == REFUSED_BY:
        code = ExitCode.REFUSED
    try:
        record_comparison(store, run_id)
    except FarmError as error:
        # Verdicts are in the store, and stay.
        run = {"run": run_id}
        logger.warning("the numbers of run %s were not compared with those before: %s", run_id, error, extra=run)
    # Last: if this agent dies before, other agents find a run without an end and repeat these steps.
    store.finish_run(run_id, code, once=True)
    return code


def _mark_skipped(store: Store, view: RunView, order: Order) -> None:
    """Mark the jobs that the budget kept from starting as skipped."""
    try:
        terms = decode_terms(order.terms)
    except msgspec.MsgspecError:
        # An order of another version of farm.
        return
    left = [job.id for job in view.jobs if not job.attempts and job.skipped is None]
    if terms.budget_s is None or not left or not order.is_late:
        return
    branch, private = store.runs.branch(view.id)
    kind = view.fingerprint.get("device_kind", "hardware")
    past = store.selection.expected(left, kind, branch, local_runs_of=view.user if private else "")
    store.mark_skipped(view.id, dict(Budget(terms.budget_s).unbegun(left, past)))
