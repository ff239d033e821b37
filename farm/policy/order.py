"""The order in which the jobs of a run are built and handed out."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence


def dispatch_order(
    job_ids: Sequence[str],
    *,
    cached: Mapping[str, bool],
    expected_seconds: Mapping[str, float],
    sessions: Mapping[str, Hashable],
    first: Collection[str] = (),
) -> list[str]:
    """Return the order in which jobs are built and handed out. Pure.

    Jobs in `first` come before all others. Compiled jobs go next, so that devices work while
    the builders warm up; among those, jobs of the same session (by `sessions`) stand together, as
    every change starts a runner; then the longest expected first, which leaves no long job for the end. Otherwise the
    order given.
    """
    position = {job_id: n for n, job_id in enumerate(job_ids)}
    group: dict[Hashable, int] = {}
    for job_id in job_ids:
        group.setdefault(sessions[job_id], len(group))
    return sorted(
        job_ids,
        key=lambda job: (
            job not in first,
            not cached.get(job, False),
            group[sessions[job]],
            -expected_seconds.get(job, 0.0),
            position[job],
        ),
    )
