"""`farm status`, `farm history`, `farm alerts` and `farm perf baseline`: what needs attention, numbers run by run, and
remarks.
"""

from __future__ import annotations

import datetime
import math
import shlex
import time
from typing import TYPE_CHECKING

import click

from farm.base.errors import UsageError
from farm.base.text import one_line
from farm.cli.options import branch_option, is_json, json_option, limit_option, metrics_option, soc_option
from farm.cli.output import acted, echo, notice, opened, print_json, reading, show, width
from farm.report.model.format import plural
from farm.report.terminal.layout import LEAST_WIDTH, fitted, titled, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.numbers.regressions.baseline import Level
    from farm.store.records import Remark


# `farm status` and `farm alerts list`: jobs and numbers that need attention, and remarks on them.


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


# `farm history` and `farm perf baseline`: numbers run by run, and the baselines for the next run.


# Most of one answer.
_MOST_JOBS = 200


@click.command("history")
@click.argument("job")
@soc_option("Only jobs for this SoC.")
@metrics_option("Metric to show, repeatable; otherwise the usual ones.")
@branch_option()
@click.option("--local/--no-local", default=True, help="Include your local runs, with a mark.")
@limit_option("Newest attempts of a job.")
@json_option("Print every metric as JSON instead of a table.")
def history_command(
    job: str, soc: str | None, metrics: tuple[str, ...], branch: str | None, limit: int, *, local: bool
) -> None:
    """Show the numbers of JOB run by run, oldest first.

    JOB is suite/case, a whole job id, a suite, or a pattern with * and ?. Times and counts are medians of an
    attempt's samples; figures of outputs come from the worst sample, as for limits. Virtual devices and hardware
    are never in one table. Changed conditions are shown beside a run. Below the table follow the pass rate of the
    last 20 runs, and whether the job is flaky; then a line for each metric that moved, from its least to its
    greatest, and its known steps. Your local runs, and runs of a dirty or private checkout, are marked in the table of
    the branch and left out of the lines below. Runs of 'farm debug' are left out.
    """
    from msgspec.structs import replace

    from farm.report.model.history import USUAL, ended, tables
    from farm.report.terminal.status import history_lines
    from farm.serve.pages.history import HistoryQuery, history_page

    query = HistoryQuery(
        job=job, soc=soc or "", metric=",".join(metrics), branch=branch or "", limit=limit, jobs=_MOST_JOBS,
        local=local, charts=False,
    )  # fmt: skip
    with reading() as reader:
        first = reader.read(history_page, query)
        more = [reader.read(history_page, replace(query, page=page)) for page in range(2, first.pages + 1)]
    parts = [first, *more]
    points = [one for part in parts for one in part.points]
    steps = [one for part in parts for one in part.alerts]
    reliability = [one for part in parts for one in part.reliability]
    facts = {key: values for part in parts for key, values in part.fingerprints.items()}
    shown, url = first.branch, first.commit_url
    if is_json():
        answer = {"schema": 2, "points": points, "reliability": reliability, "alerts": steps}
        print_json({**answer, "branch": shown} if shown else answer)
        return
    if shown:
        notice(f"branch {shown}")
    if not points:
        lacks = f"no attempt in branch {shown}" if shown else "no attempt that counts: 'farm runs list' lists the runs"
        notice(f"{job} has no history yet: {lacks}")
    elif all(point.local for point in points):
        notice("only your local runs are listed: numbers are judged once there are runs with --purpose nightly")
    for text in ended(points):
        notice(text)
    records = {(one.job_id, one.device_kind): one.record for one in reliability}
    for text in history_lines(tables(points, metrics or USUAL, facts), records, steps, url, width()):
        echo(text)


@click.command("baseline")
@click.argument("job")
@soc_option("Only jobs for this SoC.")
@metrics_option("Only this metric; repeatable.")
@branch_option()
@json_option("Print it as JSON.")
def baseline_command(job: str, soc: str | None, metrics: tuple[str, ...], branch: str | None) -> None:
    """Show the baselines for the next run of JOB.

    JOB is as for 'farm history'. A baseline is the median of at most 21 runs
    that are comparable with the newest, on its level; 8 are needed.
    """
    from farm.numbers.regressions.baseline import levels

    with opened(readonly=True) as (_, store):
        found = levels(store, job, soc, metrics, store.status.branch_to_show(branch))
    if not found and not is_json():
        _require(job, metrics)
        notice(f"{job}: no number with a baseline yet; 'farm history {shlex.quote(job)}' shows all numbers")
        return
    show({"levels": found}, _levels(found))


def _levels(found: Sequence[Level]) -> Iterator[str]:
    columns, last = max(LEAST_WIDTH, width()), None
    for level in found:
        if (level.job_id, level.device_kind) != last:
            last = level.job_id, level.device_kind
            yield fitted(f"{level.job_id}  {level.device_kind} device", columns)
        unit = "" if level.unit in ("1", "count") else level.unit
        value = "-" if math.isnan(level.median) else f"{level.median:,.6g} {unit}".strip()
        few = ", deterministic" if level.deterministic else "" if level.enough else ", too few to judge"
        yield fitted(f"  {level.metric}: {value}, {plural(level.runs, 'run')} since {level.since}{few}", columns)


@click.command("accept")
@click.argument("job")
@soc_option("Only jobs for this SoC.")
@metrics_option("Only this metric, repeatable; needs no suspected regression.")
@click.option("--run", "ref", metavar="RUN", help="Level of this run; otherwise of the newest run of each job.")
@click.option("--note", required=True, metavar="TEXT", help="Reason why the level is right.")
@branch_option()
@json_option("Print the accepted levels as JSON.")
def accept_command(
    job: str, soc: str | None, metrics: tuple[str, ...], ref: str | None, note: str, branch: str | None
) -> None:
    """Accept the new level of JOB's numbers.

    Open regressions are closed, and the next runs are compared with the new
    level. User, time and note stay in the store. JOB is as for 'farm history':
    a suite, or a pattern, accepts all suspected and confirmed regressions there.
    """
    from farm.numbers.regressions import baseline

    if not note.strip():
        raise UsageError("--note is empty: give the reason why the level is right")
    asked = {"job": job, "note": note, "soc": soc or "", "metric": ",".join(metrics), "run": ref or ""}
    if acted("accept", **asked, branch=branch or "", taken=("metrics", "ref")):
        return
    with opened(existing=True) as (_, store):
        run_id = None if ref is None else store.runs.resolve(ref)
        # A named run determines its branch.
        chosen = store.runs.branch(run_id)[0] if run_id and branch is None else store.status.branch_to_show(branch)
        done = baseline.accept(store, job, soc, metrics, run_id, user=store.user, note=note, branch=chosen)
    if is_json():
        print_json({"accepted": done})
        return
    for one in done:
        echo(f"#{one.alert} {one.job_id}: {one.metric}{', a step without an alert' if one.declared else ''}")
    if not done:
        where = "" if run_id is None else f" in {run_id}"
        _require(job, metrics, where)
        echo(f"{job} has no open regression{where}; --metric NAME accepts the level of a number without one")


def _require(job: str, metrics: tuple[str, ...], where: str = "") -> None:
    """Raise UsageError for named metrics that no job has."""
    if metrics:
        names = " or ".join(map(one_line, metrics))
        raise UsageError(
            f"{one_line(job)} has no judged number {names}{where}: "
            f"'farm perf baseline {shlex.quote(one_line(job))}' lists those it has"
        )
