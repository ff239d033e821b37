"""Status, alerts and red jobs -> lines for a terminal, urgent groups first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from farm.base.errors import FIRST_RUN
from farm.report.model import format as fmt
from farm.report.model.alerts import UNSURE, by_range, change_line, remark_text
from farm.report.model.commits import standing_text, toolchain_text
from farm.report.model.status import (
    TITLES,
    RunStanding,
    Standing,
    Status,
    ago,
    counts,
    ended_text,
    exit_meaning,
    purpose_text,
    reasons_of,
    unsure_lines,
)
from farm.report.terminal.layout import LEAST_WIDTH, first_of, fitted, titled
from farm.store.records import AlertRecord, AlertState


def status_lines(status: Status, now_ms: int, limit: int, width: int = 80) -> list[str]:
    """Return the status, urgent groups first; at most `limit` jobs of a kind, no line wider than `width`."""
    lines = _runs(status, now_ms, limit) if status.runs else [f"no run yet: '{FIRST_RUN}' makes one"]
    if status.devices:
        lines += ["", f"DEVICES: {len(status.devices)} not fit"]
        lines += [f"  {one.device}: {one.state}{f': {one.reason}' if one.reason else ''}" for one in status.devices]
    lines += [
        f"unfinished: {one.run_id} of {one.user} on {one.host}, began {ago(one.started_ms, now_ms)}"
        for one in status.unfinished
    ]
    return [fitted(line, max(width, LEAST_WIDTH)) for line in lines]


def alert_lines(alerts: Sequence[AlertRecord], limit: int) -> list[str]:
    """Return alerts by range of runs, at most `limit` of a range."""
    lines = []
    for good, bad, group in by_range(alerts):
        lines += [f"  {good} good, {bad} bad", *first_of([_alert(one) for one in group], limit, "    ")]
    return lines


def _alert(one: AlertRecord) -> list[str]:
    unsure = UNSURE.get(AlertState(one.state), "")
    lines = [f"#{one.id} {one.job_id}", f"{change_line(one)}{unsure and f', {unsure}'}"]
    lines += [f"likely cause: {one.likely_cause}"] if one.likely_cause else []
    return lines + ([remark_text(one.remark)] if one.remark else [])


def _runs(status: Status, now_ms: int, limit: int) -> list[str]:
    lines = [f"branch {status.branch}"] if status.branch else []
    if len(status.runs) > 1:
        lines += [f"the nightly run: {len(status.runs)} runs, {counts(status.runs)}"]
    lines += [line for one in status.runs for line in _run(one, now_ms)]
    first, *others = TITLES
    lines += _jobs(status, now_ms, limit, first)
    if status.regressions:
        new = sum(one.regressions for one in status.runs)
        where = "this run" if len(status.runs) == 1 else "this nightly run"
        lines += ["", f"REGRESSIONS: {len(status.regressions)}, {new or 'none'} of {where}"]
        lines += alert_lines(status.regressions, limit)
    unsure = unsure_lines(status)
    lines += ["", *unsure] if unsure else []
    for kind_of_job in others:
        lines += _jobs(status, now_ms, limit, kind_of_job)
    for title, field in (("NEWLY FLAKY", "newly_flaky"), ("HEALED", "healed")):
        lines += titled(title, [(job_id, fmt.record(record)) for job_id, record in status.records(field)], limit)
    return lines


def _run(one: RunStanding, now_ms: int) -> list[str]:
    run = one.run
    kind = f" on {run.device_kind} devices" if run.device_kind else ""
    texts = [f"  {text}" for text in (toolchain_text(run.toolchain), standing_text(run.toolchain)) if text]
    known = f"{counts([one])}{kind}" if run.began else f"exit code {run.exit_code}: {exit_meaning(run.exit_code)}"
    return [
        f"{run.run_id}: {purpose_text(run)} of {run.user}, {ago(run.started_ms, now_ms)}, {ended_text(run)}",
        *([f"  {run.name}"] if run.name else []),
        f"  {run.command}",
        *texts,
        f"  {known}",
    ]


def _jobs(status: Status, now_ms: int, limit: int, kind: Standing) -> list[str]:
    several = len(status.runs) > 1
    blocks = [
        [
            job.job_id,
            *([f"in {one.title}"] if several else []),
            *reasons_of(job, one.run, now_ms),
            *([remark_text(remark)] if remark else []),
        ]
        for one, job in status.jobs(kind)
        for remark in (status.remarks.get(job.job_id),)
    ]
    return titled(TITLES[kind].upper(), blocks, limit)
