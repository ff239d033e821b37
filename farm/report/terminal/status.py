"""Status, alerts, red jobs and histories -> lines for a terminal, urgent groups first. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from farm.base.errors import FIRST_RUN
from farm.report.model import format as fmt
from farm.report.model.history import HistoryTable
from farm.report.model.status import (
    TITLES,
    UNSURE,
    RunStanding,
    Standing,
    Status,
    ago,
    by_range,
    change_line,
    change_of,
    commit_link,
    counts,
    ended_text,
    exit_meaning,
    purpose_text,
    range_link,
    reasons_of,
    remark_text,
    short,
    standing_text,
    toolchain_text,
    unsure_lines,
    word_of,
)
from farm.report.terminal.layout import LEAST_WIDTH, columns, first_of, fitted, titled, wrapped
from farm.results.analysis.history import Record
from farm.store.records import AlertRecord, AlertState, HistoryPoint

# Status, alerts and red jobs -> lines for a terminal, urgent groups first. Pure.


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
    cause, remark = one.likely_cause and f"likely cause: {one.likely_cause}", one.remark and remark_text(one.remark)
    lines = (f"#{one.id} {one.job_id}", f"{change_line(one)}{unsure and f', {unsure}'}", cause, remark)
    return [line for line in lines if line]


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
    known = f"{counts([one])}{kind}" if run.began else f"exit code {run.exit_code}: {exit_meaning(run.exit_code)}"
    texts = (run.name, run.command, toolchain_text(run.toolchain), standing_text(run.toolchain), known)
    head = f"{run.run_id}: {purpose_text(run)} of {run.user}, {ago(run.started_ms, now_ms)}, {ended_text(run)}"
    return [head, *(f"  {text}" for text in texts if text)]


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


# Histories -> tables for a terminal, what changed beside each run, and a line for each metric that moved. Pure.


_LEAST_ROOM = 24
_BLOCKS = "▁▂▃▄▅▆▇█"
_BEYOND = {True: "▲", False: "▼"}


def history_lines(
    tables: Iterable[HistoryTable],
    records: Mapping[tuple[str, str], Record],
    alerts: Sequence[AlertRecord],
    commit_url: str = "",
    width: int = 80,
) -> list[str]:
    """Return the tables of histories; `records` are by job id and kind of device, `alerts` their known steps.

    `commit_url` is the address of a commit with a place `{commit}`, for a link to the newest change of commits. Changes
    are cut to `width`.
    """
    lines: list[str] = []
    width = max(width, LEAST_WIDTH)
    for table in tables:
        job = (table.job_id, table.kind)
        lines.append(f"{table.job_id}  {f'{table.kind} device' if table.kind else 'no device'}")
        commits = [row.first.commit or "" for row in table.rows]
        named = ["commit"] if any(commits) else []
        rows = [["started", "run", *named, "verdict", *table.metrics], ["", "", *[""] * len(named), "", *table.units]]
        for row in table.rows:
            verdict = "known issue" if row.first.known_issue else row.first.verdict
            verdict += ", local run" if row.first.local else ""
            commit = [f"{short(row.first.commit or '')}{'+' if row.first.dirty else ''}"] if named else []
            rows.append([_time(row.first.time_ms), row.first.run_id[-6:], *commit, verdict, *map(_figure, row.figures)])
        first = 3 + len(named)
        rows, dropped = _narrowed(rows, first + 1, width)
        changes = ["", "", *(row.change for row in table.rows)]
        for line, what in zip(columns(rows, range(first, len(rows[0])), "  "), changes, strict=True):
            lines += _with_change(line, what, width)
        if dropped:
            lines += wrapped(f"  no room for {', '.join(dropped)}: --metric, or a wider terminal", width)
        if job in records:
            lines.append(f"  {fmt.record(records[job])}")
        if link := _newest_change(commits, commit_url):
            # The address is not cut, so that it can be opened.
            lines.append(f"  {link}")
        lines += _plots(table, width)
        for one in alerts:
            if (one.job_id, one.device_kind) == job:
                step = f"{one.metric} {word_of(one)} since {one.first_bad}: {change_of(one)}, {one.state}"
                lines += wrapped(f"  #{one.id} {step}", width)
    return lines


def _narrowed(rows: list[list[str]], least: int, width: int) -> tuple[list[list[str]], list[str]]:
    """Return the columns of a table that fit, at least `least`, and the titles of the dropped columns."""
    kept = len(rows[0])
    while kept > least and max(map(len, columns([row[:kept] for row in rows], indent="  "))) > width:
        kept -= 1
    return [row[:kept] for row in rows], rows[0][kept:]


def _newest_change(commits: Sequence[str], url: str) -> str:
    """Return the address of a history's newest commit, or of the commits between two runs if it has two commits."""
    newest, before = [*dict.fromkeys(filter(None, reversed(commits))), "", ""][:2]
    return range_link(url, before, newest) or commit_link(url, newest)


def sparkline(values: Sequence[float | None]) -> str:
    """Return one block per value, by its place between the least and the greatest.

    None and NaN are a gap, infinite values an arrow.
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    least, most = min(finite, default=0.0), max(finite, default=0.0)
    return "".join(_block(value, least, most) for value in values)


def _block(value: float | None, least: float, most: float) -> str:
    if value is None or math.isnan(value):
        return " "
    if math.isinf(value):
        return _BEYOND[value > 0]
    if least == most:
        return _BLOCKS[len(_BLOCKS) // 2 - 1]
    return _BLOCKS[min(len(_BLOCKS) - 1, int(fmt.share_between(least, most, value) * len(_BLOCKS)))]


def _plots(table: HistoryTable, columns_shown: int) -> list[str]:
    """Return a line for every metric that moved: oldest to newest, with its least and greatest value."""
    lines = []
    width = max(map(len, table.metrics), default=0)
    series = [row for row in table.rows if not row.first.local] or table.rows
    for metric, column in zip(table.metrics, zip(*(row.figures for row in series), strict=True), strict=True):
        found = [point for point in column if point is not None]
        known = sorted((point for point in found if point.value is not None), key=lambda point: point.value or 0.0)
        if known and known[0].value != known[-1].value:
            # The newest values are kept when the line is too short for all.
            line = sparkline([point.value for point in found][-max(1, columns_shown - width - _LEAST_ROOM - 4) :])
            lines.append(f"  {metric.ljust(width)}  {line}  {_figure(known[0])} to {_figure(known[-1])}")
    return lines


def _with_change(line: str, what: str, width: int) -> list[str]:
    if not what:
        return [line]
    room = width - len(line) - 2
    # Figures are not cut, and a few characters of the change would be unreadable: the change gets its own line.
    if len(what) > room and room < _LEAST_ROOM:
        return [fitted(f"  from here: {what}", width), line]
    return [f"{line}  {fitted(what, room)}"]


def _figure(point: HistoryPoint | None) -> str:
    if point is None or point.value is None:
        return "-"
    if point.unit == "ns":
        return f"{point.value / 1e6:.3f}"
    if point.unit == "1":
        # The digits after the nines decide.
        return f"{point.value:.6g}"
    return f"{point.value:.0f}" if point.exact or point.unit in ("cycles", "bytes") else f"{point.value:.2f}"


def _time(epoch_ms: int) -> str:
    moment = fmt.local_time(epoch_ms)
    return f"{moment:%Y-%m-%d %H:%M}" if moment else "unknown time"
