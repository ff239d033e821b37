"""Status, alerts and red jobs -> lines for a terminal, what needs a look first. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.report.model import format as fmt
from farm.report.model.alerts import UNSURE, by_range, change_of, remark_text, word_of
from farm.report.model.commits import standing_text, toolchain_text
from farm.report.model.status import TITLES, ago, counts, reasons_of, unsure_lines
from farm.report.terminal.layout import LEAST_WIDTH, first_of, fitted, titled
from farm.store.records import AlertState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.report.model.status import Standing, Status
    from farm.store.records import AlertRecord, RunStatus


def status_lines(status: Status, now_ms: int, limit: int, width: int = 80) -> list[str]:
    """Return the status, what needs a look first; at most `limit` jobs of a kind, no line wider than `width`."""
    lines = ["no run yet: 'farm run' makes one"] if status.run is None else _run(status, status.run, now_ms, limit)
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
    lines = [f"#{one.id} {one.job_id}", f"{one.metric} {word_of(one)}: {change_of(one)}{unsure and f', {unsure}'}"]
    lines += [f"attributed cause: {one.guilt}"] if one.guilt else []
    return lines + ([remark_text(one.remark)] if one.remark else [])


def _run(status: Status, run: RunStatus, now_ms: int, limit: int) -> list[str]:
    kind = f" on {run.device_kind} devices" if run.device_kind else ""
    ended = f"exit code {run.exit_code}" if run.finished_ms is not None else "NOT FINISHED"
    line = [f"line {status.line}"] if status.line else []
    told = [f"  {text}" for text in (toolchain_text(run.toolchain), standing_text(run.toolchain)) if text]
    lines = [
        *line,
        f"{run.run_id}: {run.priority} run of {run.user}, {ago(run.started_ms, now_ms)}, {ended}",
        f"  {run.command}",
        *told,
        f"  {counts(status)}{kind}",
    ]
    first, *others = TITLES
    lines += _jobs(status, run, now_ms, limit, first)
    if status.regressions:
        new = sum(one.run_id == run.run_id for one in status.regressions)
        lines += ["", f"REGRESSIONS: {len(status.regressions)}, {new or 'none'} of this run"]
        lines += alert_lines(status.regressions, limit)
    unsure = unsure_lines(status)
    lines += ["", *unsure] if unsure else []
    for kind_of_job in others:
        lines += _jobs(status, run, now_ms, limit, kind_of_job)
    for title, found in (("NEWLY FLAKY", status.newly_flaky), ("HEALED", status.healed)):
        lines += titled(title, [(job_id, fmt.record(record)) for job_id, record in found.items()], limit)
    return lines


def _jobs(status: Status, run: RunStatus, now_ms: int, limit: int, kind: Standing) -> list[str]:
    blocks = [
        [job.job_id, *reasons_of(job, now_ms), *([remark_text(remark)] if remark else [])]
        for job in run.jobs
        if status.jobs[job.job_id] is kind
        for remark in (status.remarks.get(job.job_id),)
    ]
    return titled(TITLES[kind].upper(), blocks, limit)
