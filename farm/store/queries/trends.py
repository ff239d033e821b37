"""Background of a report: numbers of the jobs in earlier runs, and kept files."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from sqlalchemy import Connection

from farm.store import values
from farm.store.details import fingerprints, job_file_of
from farm.store.records import Background, JobFile, TrendPoint, TrendSeries
from farm.store.statements import chunks, statement

METRICS = ("latency", "htp_cycles", "sqnr_fp32[0]")


def background(connection: Connection, run_id: str, runs: int) -> Background:
    """Return the artifacts of a run, and the newest `runs` values of METRICS in its branch up to it.

    Values are of its kind of device.
    """
    run = connection.execute(statement("runs.run"), {"run": run_id}).first()
    if run is None:
        return Background()
    of = {"run": run_id, "kind": run.run_device_kind, "branch": run.run_branch, "older": runs - 1, "metrics": METRICS}
    rows: list[Any] = []
    for name in ("history.trend_medians", "history.trend_counts"):
        rows += connection.execute(statement(name), of)
    rows.sort(key=lambda row: row[:2])
    series = {row.id: row for row in connection.execute(statement("history.trend_series"), of)}
    began: dict[str, tuple[int, str]] = {}
    for part in chunks(sorted({row.run_id for row in rows})):
        for row in connection.execute(statement("history.began"), {"runs": part}):
            began[row.id] = row.started_ms, row.fingerprint_hash
    trends: dict[str, list[TrendSeries]] = {}
    for series_id, of_series in groupby(rows, key=lambda row: row.series_id):
        points = tuple(
            TrendPoint(in_run, *began[in_run], str(case_id), values.level_of(metric, p50, samples))
            for _, in_run, case_id, p50, metric, samples in of_series
        )
        one = series[series_id]
        trends.setdefault(one.name, []).append(TrendSeries(one.metric, one.unit, one.direction, points))
    artifacts: dict[str, list[JobFile]] = {}
    for row in connection.execute(statement("runs.artifacts"), {"run": run_id, "job": 0}):
        artifacts.setdefault(row.job_id, []).append(job_file_of(row))
    return Background(
        trends={name: tuple(series) for name, series in trends.items()},
        facts=fingerprints(connection, {fingerprint for _, fingerprint in began.values()}),
        artifacts={name: tuple(records) for name, records in artifacts.items()},
    )
