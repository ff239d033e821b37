"""State of the farm and its results, as `farm status`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from farm.report.model.status import TITLES, Status, by_range, counts, read_status, unsure_lines
from farm.serve.page import Facts, Text
from farm.store.queries.browse import Progress
from farm.store.store import Store
from farm.store.values import branch_text


class StatusQuery(msgspec.Struct, frozen=True):
    """Parameters of the status page."""

    run: Text = ""
    """Run instead of the newest nightly run."""
    branch: Text = ""
    own: bool = False
    """`latest` is a run of the user, as in `farm status latest`."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000, description="Rows of each list.")] = 20


class StatusFacts(Facts, frozen=True, kw_only=True):
    """State of the farm."""

    path: ClassVar[str] = "/"
    template: ClassVar[str] = "status.html.j2"
    schema: int = 4
    status: Status
    progress: dict[str, Progress]
    """Progress of the last day's runs by run id."""
    known: int
    """Devices in the store."""
    branches: list[str]
    limit: int

    def shown(self) -> dict[str, Any]:
        """Return the groups of the page and the words of its template."""
        status, limit = self.status, self.limit
        found = [(str(standing), title, status.jobs(standing)) for standing, title in TITLES.items()]
        changed = (
            ("flaky", "Newly flaky", status.records("newly_flaky")),
            ("healed", "Healed", status.records("healed")),
        )
        ranges = by_range(status.regressions)[:limit]
        return {
            "groups": [(key, title, jobs[:limit], len(jobs)) for key, title, jobs in found if jobs],
            "reliability": [(key, title, jobs[:limit], len(jobs)) for key, title, jobs in changed if jobs],
            "ranges": [(good, bad, alerts[:limit], len(alerts)) for good, bad, alerts in ranges],
            "shown": sorted(
                {branch_text(one.run.toolchain.branch if one.run.toolchain else "") for one in status.runs}
            ),
            "unsure": unsure_lines(status),
        }


def status_page(store: Store, query: StatusQuery) -> StatusFacts:
    """Return the state of the farm and its results, as `farm status`."""
    runs = [store.runs.resolve(query.run, own=query.own)] if query.run else []
    return status_facts(store, query.limit, runs=runs, branch=query.branch)


def status_facts(store: Store, limit: int, *, runs: Sequence[str] = (), branch: str = "") -> StatusFacts:
    """Return the state of runs; without `runs` of the newest nightly run of a branch."""
    status = read_status(store, branch or None, run_ids=runs)
    return StatusFacts(
        title=counts(status.runs) if status.runs else "No run yet",
        status=status,
        progress={one.run_id: one for one in store.browse.progress()},
        known=len(store.devices.all()),
        branches=list(map(branch_text, store.status.branches())),
        limit=limit,
    )
