"""`farm triage`."""

from __future__ import annotations

import datetime
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option
from farm.cli.output import echo, print_json, wrapped
from farm.config.settings import load_config
from farm.errors import UnknownNameError, UsageError
from farm.system.text import one_line
from farm.system.user import user_name

if TYPE_CHECKING:
    from farm.store.records import Remark
    from farm.store.store import Store

_STATES = ("open", "acknowledged", "accepted", "fixed")


@click.command("triage")
@click.argument("subject", required=False, metavar="[ALERT|JOB]")
@click.option("--state", type=click.Choice(_STATES), help="What becomes of it; otherwise as it was, or acknowledged.")
@click.option("--owner", default="", metavar="NAME", help="Who sees to it.")
@click.option("--note", default="", metavar="TEXT", help="What there is to say.")
@click.option("--until", type=click.DateTime(["%Y-%m-%d"]), metavar="DATE", help="Last day (UTC) that this counts.")
@click.option("--limit", type=click.IntRange(min=1), default=10, show_default=True, help="Most of a kind.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@config_option
def command(
    subject: str | None,
    state: str | None,
    owner: str,
    note: str,
    until: datetime.datetime | None,
    limit: int,
    config_file: Path | None,
    *,
    as_json: bool,
) -> None:
    """Say what becomes of a regression or of a red job, or list them.

    \b
    farm triage                                     what needs somebody
    farm triage 12 --owner ada --note "see #345"    alert 12 has somebody
    farm triage 12 --state accepted --note "..."    the new level is right
    farm triage suite/case[...] --owner ada         the same of a red job

    A remark changes no verdict: a red job stays red, and says who sees to
    it. Accepted and fixed alerts are not told of any more.
    """
    from farm.store.store import open_store

    config = load_config(config_file)
    if subject is None:
        options = (("--state", state), ("--owner", owner), ("--note", note), ("--until", until))
        if given := [name for name, value in options if value]:
            raise UsageError(f"{given[0]} of what? Give the number of an alert, or a job: 'farm triage' lists them")
        with open_store(config.store_url, readonly=True) as store:
            _list(store, limit, as_json=as_json)
        return
    with open_store(config.store_url, existing=True) as store:
        key, told = _subject(store, subject)
        if state in ("accepted", "fixed") and key.startswith("job:"):
            raise UsageError(f"a job is red until it passes: --state {state} is for alerts; acknowledge it, or mend it")
        if state is not None or owner or note or until is not None:
            store.alerts.remark(key, _remark(state or _state_now(store, key), owner, note, until))
        said = store.alerts.remarks([key]).get(key, [])
    if as_json:
        print_json({"subject": key, "remarks": said})
        return
    lines = [told, *(f"  {_told(one)}" for one in said)] if said else [told, "  nobody has said anything of it"]
    for line in lines:
        echo("\n".join(wrapped(line)))


def _subject(store: Store, subject: str) -> tuple[str, str]:
    number = subject.removeprefix("#")
    if number.isascii() and number.isdigit():
        from farm.report.model.alerts import change_of, word_of

        # No database has as many.
        if len(number) > 18:
            raise UnknownNameError("alert", number[:18] + "…", [])
        alert = store.alerts.get(int(number))
        return f"alert:{alert.id}", f"#{alert.id} {alert.job_id}: {alert.metric} {word_of(alert)}, {change_of(alert)}"
    names = store.history.job_names(subject)
    if len(names) > 1:
        raise UsageError(f"{subject} means {len(names)} jobs, such as {names[0]} and {names[1]}: name one")
    return f"job:{names[0]}", names[0]


def _state_now(store: Store, key: str) -> str:
    """Return what a remark without a state makes of a subject: what is accepted or fixed stays so."""
    said = store.alerts.remarks([key]).get(key)
    over = not said or (said[-1].until_ms or math.inf) <= time.time() * 1000
    return "acknowledged" if not said or over or said[-1].state == "open" else said[-1].state


def _remark(state: str, owner: str, note: str, until: datetime.datetime | None) -> Remark:
    from farm.store.records import Remark

    until_ms = None
    if until is not None:
        end = until.replace(tzinfo=datetime.UTC) + datetime.timedelta(days=1)
        if end < datetime.datetime.now(tz=datetime.UTC):
            raise UsageError(f"--until {until:%Y-%m-%d} is over")
        until_ms = round(end.timestamp() * 1000)
    return Remark(state, user_name(), owner, note, until_ms=until_ms)


def _list(store: Store, limit: int, *, as_json: bool) -> None:
    from farm.report.model.status import Standing, standing
    from farm.report.terminal.status import alert_lines

    alerts = store.alerts.open()
    run_id = store.status.run_to_show()
    status = store.status.of_run(run_id) if run_id else None
    wanted = (Standing.NEW_FAILURE, Standing.STILL_FAILING)
    red = [job for job in (status.jobs if status else ()) if standing(job) in wanted]
    remarks = store.alerts.remarks([f"job:{job.job_id}" for job in red])
    if as_json:
        jobs = [
            {"job_id": job.job_id, "reason": job.reason, "remarks": remarks.get(f"job:{job.job_id}", [])} for job in red
        ]
        print_json({"alerts": alerts, "run": run_id, "jobs": jobs})
        return
    lines = [f"REGRESSIONS: {len(alerts)}", *alert_lines(alerts, limit)] if alerts else []
    if red:
        lines += ["", f"RED in {run_id}: {len(red)}"]
        for job in red[:limit]:
            lines += [f"  {job.job_id}", f"    {job.reason}"]
            lines += [f"    {_told(one)}" for one in remarks.get(f"job:{job.job_id}", [])[-1:]]
        lines += [f"  and {len(red) - limit} more: --limit"] if len(red) > limit else []
    width = max(40, shutil.get_terminal_size().columns)
    for line in lines or ["nothing needs anybody: no open regression, no red job"]:
        indent = len(line) - len(line.lstrip())
        echo(" " * indent + one_line(line, width - indent))


def _told(one: Remark) -> str:
    day = datetime.datetime.fromtimestamp(one.time_ms / 1000, tz=datetime.UTC)
    until = ""
    if one.until_ms is not None:
        until = f" until {datetime.datetime.fromtimestamp(one.until_ms / 1000 - 1, tz=datetime.UTC):%Y-%m-%d}"
    owner = f", {one.owner} sees to it" if one.owner else ""
    return f"{day:%Y-%m-%d}: {one.state}{until} by {one.user}{owner}{f': {one.note}' if one.note else ''}"
