"""Option `--pull-request` of the commands that judge a commit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from farm.cli.output import notice

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.base.config.settings import Config
    from farm.dispatch.notify.pull_request import PullRequest
    from farm.report.formats.review import Review
    from farm.store.view import RunView


def find_pull_request(text: str) -> PullRequest | None:
    """Return the pull request of the option, found on its server; None without the option.

    Raises UsageError, ReviewError; MissingToolError without the extra `review`.
    """
    if not text:
        return None
    from farm.dispatch.notify.pull_request import PullRequest, place_of, take_token

    place = place_of(text, os.environ)
    return PullRequest(place, take_token(place.kind))


def post_review(pull: PullRequest | None, make: Callable[[], Review]) -> None:
    """Post the result of `make`; an error becomes a notice, as the exit code is about the commit."""
    if pull is None:
        return
    from farm.dispatch.notify.pull_request import ReviewError

    try:
        pull.post(make())
    except ReviewError as error:
        notice(f"not posted: {error}")
    else:
        notice(f"posted to {pull.place}")


def review_of_run(config: Config, view: RunView) -> Review:
    """Return the review of a recorded run."""
    from farm.report.formats.review import run_review
    from farm.report.model.status import standing
    from farm.store.store import open_store

    with open_store(config.store_url, readonly=True) as store:
        states = {job.job_id: standing(job) for job in store.status.of_run(view.id).jobs}
        return run_review(view, states, store.alerts.of_run(view.id))
