"""`farm status` and `farm alerts list`: jobs and numbers that need attention, and remarks on them."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

import click

from farm.cli.options import branch_option, json_option, limit_option
from farm.cli.output import acted, opened, reading, show, width
from farm.report.terminal.layout import LEAST_WIDTH, fitted, titled, wrapped

if TYPE_CHECKING:
    from farm.store.records import Remark

_STATES = ("open", "acknowledged", "accepted", "fixed")


@click.command("status")
@click.argument("run", required=False)
@branch_option()
@limit_option("Most jobs of a kind.", 10)
@json_option("Print every job as JSON.")
def status_command(run: str | None, branch: str | None, limit: int) -> None:
    """Show the status: new failures, regressions, not tested, infra trouble.

    Then follow fixed, newly flaky and healed jobs, and devices that are not fit.

    Without RUN the status is of the newest nightly run of the last eight days:
    all cells of a farm nightly, and nightly runs that began within 18 hours,
    the run with the worst result first. Without a nightly run it is of the newest run of the
    branch, or a local run of yours. A failure is new when the job did not fail at
    its previous verdict in the branch on this kind of device. Regressions are
    all open ones, of any run: see farm alerts list. Local runs, and runs of a dirty or
    private checkout, belong to no branch.
    """
    from farm.report.terminal.status import status_lines
    from farm.serve.pages.status import StatusQuery, status_page

    with reading() as reader:
        status = reader.read(status_page, StatusQuery(run=run or "", branch=branch or "", own=True)).status
    now_ms = time.time_ns() // 1_000_000
    show({"schema": 3, "status": status}, status_lines(status, now_ms, limit, width()))


@click.command("list")
@branch_option()
@limit_option("Most alerts, and most jobs of a run.", 10)
@json_option("Print it as JSON.")
def list_command(branch: str | None, limit: int) -> None:
    """List open regressions and failing jobs, with their remarks.

    Accepted and fixed alerts are left out.
    """
    from farm.report.model.status import Standing, read_status
    from farm.report.terminal.status import alert_lines

    with opened(readonly=True) as (_, store):
        status = read_status(store, branch=branch)
        alerts, shown = status.regressions, status.branch
        red = status.jobs(Standing.NEW_FAILURE, Standing.STILL_FAILING)
        found = store.alerts.remarks([f"job:{job.job_id}" for _, job in red])
    remarks = {job.job_id: found.get(f"job:{job.job_id}", []) for _, job in red}
    jobs = [
        {"job_id": job.job_id, "run": one.run.run_id, "reason": job.reason, "remarks": remarks[job.job_id]}
        for one, job in red
    ]
    lines = [f"branch {shown}"] if shown else []
    lines += [f"REGRESSIONS: {len(alerts)}", *alert_lines(alerts, limit)] if alerts else []
    for one in status.runs:
        blocks = [
            [job.job_id, job.reason, *map(_remark_line, remarks[job.job_id][-1:])] for run, job in red if run is one
        ]
        lines += titled(f"RED in {one.run.run_id}{f' {one.run.name}' if one.run.name else ''}", blocks, limit)
    unbegun = [[one.title, one.run.command] for one in status.runs if not one.run.began]
    lines += titled("NEVER BEGAN", unbegun, limit)
    if not (alerts or red or unbegun):
        lines.append("nothing needs attention: no open regression, no red job")
    answer = {"schema": 3, "alerts": alerts, "runs": [one.run.run_id for one in status.runs], "jobs": jobs}
    answer |= {"branch": shown} if shown else {}
    show(answer, (fitted(text, max(LEAST_WIDTH, width())) for text in lines))


@click.command("assign")
@click.argument("subject", metavar="ALERT|JOB")
@click.option("--state", type=click.Choice(_STATES), help="New state; by default as before, or acknowledged.")
@click.option("--owner", default="", metavar="NAME", help="Owner of the alert or job.")
@click.option("--note", default="", metavar="TEXT", help="Note, such as the number of an issue.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), metavar="DATE", help="Last day (UTC) of the remark.")
@json_option("Print it as JSON.")
def assign_command(subject: str, state: str | None, owner: str, note: str, until: datetime.datetime | None) -> None:
    """Record owner, state and note of a regression or a failing job.

    \b
    farm alerts assign 12 --owner ada --note "see #345"    alert 12
    farm alerts assign 12 --state accepted --note "..."    as alerts accept
    farm alerts assign suite/case[...] --owner ada         a failing job

    A remark changes no verdict: a failing job still fails. Without options
    the remarks are shown.
    """
    from farm.numbers.regressions.remarks import assign

    asked = {"subject": subject, "state": state or "", "owner": owner, "note": note}
    if acted("assign", **asked, until=f"{until:%Y-%m-%d}" if until else ""):
        return
    with opened(existing=True) as (_, store):
        key, title = assign(store, subject, store.user, state=state, owner=owner, note=note, until=until)
        remarks = store.alerts.remarks([key]).get(key, [])
    lines = [title, *(f"  {_remark_line(one)}" for one in remarks)]
    lines += [] if remarks else ["  no remark on it yet"]
    show({"subject": key, "remarks": remarks}, (part for line in lines for part in wrapped(line)))


def _remark_line(one: Remark) -> str:
    def day(time_ms: int) -> str:
        return f"{datetime.datetime.fromtimestamp(time_ms / 1000, tz=datetime.UTC):%Y-%m-%d}"

    until = "" if one.until_ms is None else f" until {day(one.until_ms - 1)}"
    owner = f", handled by {one.owner}" if one.owner else ""
    return f"{day(one.time_ms)}: {one.state}{until} by {one.user}{owner}{f': {one.note}' if one.note else ''}"
