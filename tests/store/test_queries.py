"""Runs by name, and the history of jobs."""

from __future__ import annotations

import math
import re
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from farm.base.errors import FIRST_RUN, StoreError, UnknownNameError, UsageError
from farm.policy.situation import Priority
from farm.results.attempt import Direction, Measurement, OperatorProfile, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import Store

if TYPE_CHECKING:
    from conftest import Make

_MORNING = 1_795_225_501_000  # 2026-11-21 01:45:01 UTC


def _begin(store: Store, started_ms: int) -> str:
    return store.begin_run(RunRecord("farm run", "ada", "bench", {}, started_ms))


def test_a_run_id_says_when_and_is_given_once(store: Store) -> None:
    ids = [_begin(store, _MORNING) for _ in range(20)]
    assert len(set(ids)) == 20
    assert all(re.fullmatch(r"20261121-014501-[0-9a-f]{6}", run_id) for run_id in ids)
    assert _begin(store, _MORNING + 1000) > max(ids)


def test_runs_are_found_by_what_people_write(store: Store) -> None:
    first, second, third = (_begin(store, _MORNING + day * 86_400_000) for day in range(3))

    assert store.runs.latest_id() == third
    assert store.runs.resolve("latest", own=False) == third
    assert store.runs.resolve("latest~0", own=False) == third
    assert store.runs.resolve("latest~2", own=False) == first
    assert store.runs.resolve(second) == second
    assert store.runs.resolve("20261122") == second
    with pytest.raises(UsageError, match=f"several runs begin with '202611': {third}, {second}, {first}"):
        store.runs.resolve("202611")
    with pytest.raises(UsageError, match="latest~3: the store has 3 runs"):
        store.runs.resolve("latest~3", own=False)
    with pytest.raises(UnknownNameError, match=f"unknown run '{second[:-1]}x': did you mean '{second}'"):
        store.runs.resolve(f"{second[:-1]}x")
    for nonsense in ("", "%", "2026_121", "latest~", "latest~-1", "no\0such", "\udcff"):
        with pytest.raises(UnknownNameError):
            store.runs.resolve(nonsense)
    with pytest.raises(UnknownNameError):
        store.runs.view("20990101-000000-abcdef")


def test_an_empty_store_says_how_to_fill_it(sqlite_store: Store) -> None:
    assert sqlite_store.runs.latest_id() is None
    for ref in ("latest", "2026"):
        with pytest.raises(UsageError, match=f"'{FIRST_RUN}' makes one"):
            sqlite_store.runs.resolve(ref)
    with pytest.raises(UnknownNameError, match=f"'{FIRST_RUN}' makes some"):
        sqlite_store.history.points("quantized_ops")


def test_what_was_not_announced_is_refused(sqlite_store: Store, make: type[Make]) -> None:
    job, other = make.job(), make.job("other")
    with pytest.raises(StoreError, match="not in the store"):
        sqlite_store.plan_jobs("nonsense", [job])
    run_id = make.begin(sqlite_store, job)
    with pytest.raises(StoreError, match="has no job"):
        sqlite_store.record_attempt(run_id, make.attempt(other))
    with pytest.raises(StoreError, match="has no job"):
        sqlite_store.record_build(run_id, other.id, seconds=1.0, cached=False, bundle_key="")


def test_an_attempt_on_a_device_nobody_announced_is_kept_apart(sqlite_store: Store, make: type[Make]) -> None:
    job = make.job()
    run_id = make.begin(sqlite_store, job)
    sqlite_store.record_attempt(run_id, make.attempt(job, device="stranger"))
    assert [point.device_kind for point in sqlite_store.history.points(job.id)] == ["unknown"]


def test_history_never_mixes_virtual_and_hardware(store: Store, make: type[Make]) -> None:
    job = make.job()
    for hour, (kind, serial) in enumerate([("virtual", "virtual-1"), ("hardware", "phone-1")] * 3):
        run_id = make.begin(store, job, started_ms=_MORNING + hour * 3_600_000, kind=kind)
        attempt = make.attempt(
            job, device=serial, started_ms=_MORNING + hour, measurements=(make.latency(float(hour)),)
        )
        store.record_attempt(run_id, attempt)

    points = store.history.points("quantized_ops/relu", "latency", limit=2)

    assert [(point.device_kind, point.value) for point in points] == [
        ("hardware", 3.0),
        ("hardware", 5.0),
        ("virtual", 2.0),
        ("virtual", 4.0),
    ]
    assert {point.unit for point in points} == {"ns"}
    assert [point.time_ms - _MORNING for point in points] == [3, 5, 2, 4]


def test_history_shows_attempts_that_measured_nothing(store: Store, make: type[Make]) -> None:
    job = make.job()
    run_id = make.begin(store, job, started_ms=_MORNING)
    store.record_attempt(run_id, make.attempt(job))
    failed = make.attempt(
        job, verdict=Verdict.FAILED, stage=Stage.BUILD, reason="no", device="", started_ms=0, measurements=()
    )
    store.record_attempt(run_id, failed)

    good, bad = store.history.points(job.id, "latency")

    assert (good.verdict, good.value, good.n, good.device) == ("passed", 2.0, 3, "virtual-1")
    # The attempt needed no device, and belongs to the history of the only kind of device in its run.
    assert (bad.verdict, bad.value, bad.n, bad.metric, bad.device, bad.device_kind) == (
        "failed",
        None,
        0,
        "latency",
        "",
        "virtual",
    )
    assert bad.time_ms == _MORNING
    assert (good.run_id, good.job_id) == (run_id, job.id)
    assert len(good.fingerprint) == len(good.case_version) == 64


def test_a_run_is_looked_at_before_jobs_are_too_many(
    sqlite_store: Store, make: type[Make], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.store.queries.history._MOST_PARAMETERS", 2)
    jobs = [make.job(name) for name in ("a", "b", "c")]
    make.begin(sqlite_store, *jobs)
    run_id = make.begin(sqlite_store, jobs[0])
    sqlite_store.record_attempt(
        run_id, make.attempt(jobs[0], operators=(OperatorProfile("n", "", "ns", 1, 1.0, 1.0, 1.0, 1.0),))
    )
    with pytest.raises(UsageError, match="3 jobs match"):
        sqlite_store.profiles.newest("*")
    assert [record.job_id for record in sqlite_store.profiles.newest("*", run_id)] == [jobs[0].id]


def test_runs_of_farm_debug_are_no_history_and_no_expectation(store: Store, make: type[Make]) -> None:
    job = make.job()
    known = {"executorch": "1.5.1", "device_kind": "virtual"}
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", known))
    store.plan_jobs(run_id, [job])
    store.record_attempt(run_id, make.attempt(job, seconds=2.0), make.device())
    facts = {**known, "debug": "intermediate outputs"}
    debugged = store.begin_run(RunRecord("farm debug", "ada", "bench", facts))
    store.plan_jobs(debugged, [job])
    store.record_attempt(debugged, make.attempt(job, seconds=90.0, started_ms=1), make.device())

    (point,) = store.history.points(job.id)

    assert point.run_id == run_id
    assert store.selection.expected([job.id], "virtual")[job.id].run_seconds == 2.0
    assert store.history.fingerprints([point.fingerprint]) == {point.fingerprint: known}


def test_jobs_are_found_by_case_suite_id_and_wildcard(store: Store, make: type[Make]) -> None:
    jobs = [make.job(), make.job("relu6"), make.job(precision="16a16w"), make.job(soc="SM8750")]
    run_id = make.begin(store, *jobs)
    for job in jobs:
        store.record_attempt(run_id, make.attempt(job))

    def found(pattern: str, soc: str | None = None) -> set[str]:
        return {point.job_id for point in store.history.points(pattern, soc=soc)}

    relu, relu6, wide, other_soc = (job.id for job in jobs)
    assert found("quantized_ops/relu") == {relu, wide, other_soc}
    assert found("quantized_ops/relu", "sm8650") == {relu, wide}
    assert found(relu) == {relu}
    assert found("quantized_ops") == {relu, relu6, wide, other_soc}
    assert found("*/relu?") == {relu6}
    assert found("quantized_ops/relu[*-16a16w]") == {wide}
    with pytest.raises(UnknownNameError, match="did you mean 'quantized_ops/relu'"):
        store.history.points("quantized_ops/rellu")
    with pytest.raises(UnknownNameError, match=re.escape(f"did you mean {relu!r}")):
        store.history.points("quantized_ops/relu[SM8650-htp-8a8]")
    with pytest.raises(UnknownNameError, match="did you mean 'latency'"):
        store.history.points("quantized_ops/relu", "latencies")
    # An SoC that farm knows is not unknown because nothing ran there.
    with pytest.raises(UsageError, match="quantized_ops/relu has no result on SM8850 yet: there are results on SM8"):
        store.history.points("quantized_ops/relu", soc="sm8850")
    with pytest.raises(UnknownNameError, match="unknown SoC 'SM8851': did you mean 'SM8850'"):
        store.history.points("quantized_ops/relu", soc="SM8851")
    for hostile in ("\0", "\udcff", "*" * 10_000, "[", "(", "%"):
        try:
            store.history.points(hostile)
        except UnknownNameError:
            continue


def test_the_queries_in_the_documentation_run(sqlite_store: Store, make: type[Make], tmp_path: Path) -> None:
    job, missing = make.job("conv2d"), make.job("missing")
    run_id = make.begin(sqlite_store, job, missing, started_ms=_MORNING, kind="hardware")
    nodes = [
        OperatorProfile(name, "QnnBackend[0]", "cycles", 3, 5.0, 5.0, 5.0, 0.5)
        for name in ("aten_add_tensor:OpId_3", "aten_add_tensor:OpId_4", "Input OpId_2", "whole call: time")
    ]
    failed = make.attempt(
        job, device="phone-1", verdict=Verdict.FAILED, reason="sqnr", stage=Stage.NUMERICS, operators=tuple(nodes)
    )
    sqlite_store.record_attempt(run_id, failed)
    token = sqlite_store.leases.request(
        ["phone-1"], count=1, user="ada", host="bench", pid=7, purpose="farm run", priority=Priority.PERSON, ttl_s=60
    )
    assert sqlite_store.leases.poll(token, ttl_s=60)
    document = (Path(__file__).parents[2] / "docs/reference/store.md").read_text()
    queries = re.findall(r"```sql\n(.*?)```", document, re.DOTALL)
    connection = sqlite3.connect(tmp_path / "farm.db")
    wrong, lacking, latency, held, cycles = (
        connection.execute(query.replace("20261121-014501-4f7a12", run_id)).fetchall() for query in queries
    )
    connection.close()
    assert wrong == [(job.id, "failed", "numerics", "sqnr")]
    assert [row[:3] for row in held] == [("phone-1", "ada", "farm run")]
    assert lacking == [(missing.id,)]
    assert cycles == [("aten_add_tensor", 2, 10.0), ("Input OpId_2", 1, 5.0)]
    assert [(row[0], row[3], row[4]) for row in latency] == [(run_id, 3, 2e-6)]


@pytest.mark.parametrize(
    ("metric", "unit", "direction", "samples", "expected"),
    [
        ("sqnr_fp32[0]", "dB", Direction.HIGHER, (38.65, 38.70, 38.35), 38.35),
        ("cosine_fp32[1]", "1", Direction.HIGHER, (0.999, 0.99, 0.9995), 0.99),
        ("kl_quantized[0]", "1", Direction.LOWER, (0.1, 0.3, 0.2), 0.3),
        ("psnr[0]", "dB", Direction.HIGHER, (30.0, math.inf, 20.0), 20.0),
        ("top1[0]", "1", Direction.HIGHER, (1.0, 1.0, 0.0, 0.0), 0.5),
        ("latency", "ns", Direction.LOWER, (1.0, 2.0, 9.0), 2.0),
        ("step_time[0-63]", "ns", Direction.LOWER, (1.0, 2.0, 9.0), 2.0),
    ],
)
def test_series_have_the_value_that_decides(
    store: Store, make: type[Make], metric: str, unit: str, direction: Direction, samples: tuple[float, ...],
    expected: float,
) -> None:  # fmt: skip
    job = make.job()
    run_id = make.begin(store, job)
    measured = Measurement(metric, unit, direction, samples)
    store.record_attempt(run_id, make.attempt(job, measurements=(measured,)))
    [point] = store.history.points(job.id, metric)
    assert point.value == pytest.approx(expected)
    [past] = store.history.pasts_of_run(run_id)
    assert [one.values for one in past.series] == [(pytest.approx(expected),)]
    trends = {one.metric: one.points for series in store.history.background(run_id).trends.values() for one in series}
    assert [point.value for point in trends.get(metric, ())] in ([], [pytest.approx(expected)])
