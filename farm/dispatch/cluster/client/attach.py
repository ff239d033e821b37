"""Following a submitted run: from another terminal, or after a nightly run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.base.errors import UsageError
from farm.base.interrupts import INTERRUPTED
from farm.dispatch.cluster.client.follow import FollowEnd, InterruptChoice, follower_of
from farm.dispatch.request.request import RunOutcome
from farm.dispatch.run.steps import log_numbers, report_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.base.config.settings import Config
    from farm.dispatch.progress import ProgressListener


def attach(
    config: Config, ref: str, listener: ProgressListener, ask: Callable[[], InterruptChoice] | None = None
) -> RunOutcome:
    """Follow a run, `latest`, an id or a name, and return its outcome.

    Ctrl-C cannot cancel the run of another user. Raises UnknownNameError, UsageError for a run that was not submitted.
    """
    from farm.store.store import open_store

    with open_store(config.store_url) as store:
        run_id = store.runs.resolve(ref)
        order = store.cluster.order(run_id)
        if order is None:
            raise UsageError(f"run {run_id} was not handed in to the shared farm: 'farm report {run_id}' shows it")
        first = store.cluster.progress(run_id, 0)
        ending = FollowEnd.FINISHED
        if not first.finished:
            view = store.runs.view(run_id)
            jobs = sum(job.skipped is None or bool(job.attempts) for job in view.jobs)
            listener.begin(jobs=jobs, to_build=first.to_build - first.built, devices=sorted(first.running))
            ending = follower_of(store, run_id, listener, built=first.built, ask=ask).follow(first)
        view = store.runs.view(run_id)
        path = config.run_folder(run_id) / "report.html"
        if ending is FollowEnd.LEFT:
            return RunOutcome(INTERRUPTED, view, path, left=True)
        log_numbers(store, run_id)
        code = view.exit_code if ending is FollowEnd.FINISHED and view.exit_code is not None else INTERRUPTED
        return RunOutcome(code, view, report_of(config, store, view))
