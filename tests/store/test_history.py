"""Runs by name, and the history of jobs: pass rates, flakiness and trends, on both databases."""

from __future__ import annotations

import math
import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from made_runs import take
from stores import plans, statements

from farm.base.errors import FIRST_RUN, StoreError, UnknownNameError, UsageError
from farm.results.analysis.history import LOOKED_AT, Reliability
from farm.results.attempt import Direction, Measurement, OperatorProfile, Stage, Verdict
from farm.store.records import ArtifactRecord, JobFile, RunRecord
from farm.store.rows import now_ms
from farm.store.store import Store
from farm.suites.suite import Job

from . import make

# History of jobs: pass rates, flakiness and trends, on both databases.


P, F, I = Verdict.PASSED, Verdict.FAILED, Verdict.INFRA  # noqa: E741 - read as a table
VERDICTS = {"p": "passed", "f": "failed", "i": "infra"}


def tried(store: Store, hours_ago: int, *verdicts: tuple[Job, str], **facts: Any) -> str:
    """Record a run of jobs, an attempt for each letter: passed, failed, infra."""
    more = {"bundle_key": facts.pop("bundle_key", "b" * 64), "known_issue": facts.pop("known_issue", "")}
    results = [(job, VERDICTS[letter], more) for job, letters in verdicts for letter in letters]
    return make.run(store, hours_ago, *results, **facts)


def test_verdicts_of_the_same_code_that_disagree_are_flaky(store: Store) -> None:
    a, b, c = (make.job(name) for name in "abc")
    tried(store, 9, (a, "p"), (b, "p"), (c, "p"))
    slipped = tried(store, 8, (a, "f"), (b, "if"), (c, "p"))
    last = tried(store, 7, (a, "p"), (b, "f"), (c, "ip"))
    found = store.history.reliability([a.id, b.id, c.id], "virtual")
    assert {job: (one.reliability, one.passed, one.tries, one.since) for job, one in found.items()} == {
        a.id: (Reliability.NEWLY_FLAKY, 2, 3, slipped),
        b.id: (Reliability.NEWLY_FLAKY, 1, 3, slipped),
        c.id: (Reliability.STEADY, 3, 3, ""),
    }
    assert set(store.history.reliability([a.id, b.id, c.id], "virtual", last, failed_of_late=True)) == {a.id, b.id}
    assert store.history.reliability([a.id, c.id], "virtual", slipped)[a.id].tries == 2


def test_other_code_kinds_and_the_debugger_are_not_mixed_in(sqlite_store: Store) -> None:
    store, a = sqlite_store, make.job("a")
    tried(store, 9, (a, "p"))
    tried(store, 8, (a, "f"), qnn="2.52")
    tried(store, 7, (a, "f"), bundle_key="c" * 64)
    tried(store, 6, (a, "f"), kind="hardware")
    tried(store, 5, (a, "ff"), debug="intermediate outputs")
    found = store.history.reliability([a.id], "virtual")[a.id]
    assert (found.reliability, found.passed, found.tries) == (Reliability.STEADY, 1, 3)
    assert store.history.reliability([a.id], "hardware")[a.id].tries == 1
    assert store.history.reliability([a.id, "no/such[job]"], "unknown") == {}


def test_retries_and_known_issues_count_and_trouble_does_not(sqlite_store: Store) -> None:
    store, a, b, c = sqlite_store, *(make.job(name) for name in "abc")
    run_id = tried(store, 9, (a, "fp"), (b, "iip"), bundle_key="")
    tried(store, 8, (c, "f"), known_issue="is wrong")
    found = store.history.reliability([a.id, b.id, c.id], "virtual")
    assert (found[a.id].reliability, found[a.id].since) == (Reliability.NEWLY_FLAKY, run_id)
    assert (found[b.id].reliability, found[b.id].tries) == (Reliability.STEADY, 1)
    assert found[c.id].passed == 0


def test_flakiness_is_of_the_last_runs_of_a_job_along_indices(sqlite_store: Store) -> None:
    a, b = make.job("a"), make.job("b")
    store = sqlite_store
    tried(store, 99, (a, "fp"), (b, "p"))
    for hour in range(LOOKED_AT):
        last = tried(store, 90 - hour, (a, "p"))
        tried(store, 90 - hour, (b, "p"), kind="hardware")
    with statements(store) as asked:
        assert store.history.reliability([a.id, b.id], "virtual", last, failed_of_late=True) == {}
        assert store.history.reliability([a.id], "virtual")[a.id].reliability is Reliability.STEADY
    steps = [step for plan in plans(store, asked) for step in plan]
    assert len(steps) > 3
    assert [step for step in steps if re.match("SCAN (attempt|run_job|run)", step)] == []


def measured(store: Store, hours_ago: int, *found: tuple[Job, Verdict, float], **facts: str) -> str:
    """Record a run of jobs with their verdict and latency."""

    def metrics(latency: float) -> tuple[Measurement, ...]:
        cycles = Measurement("htp_cycles", "cycles", Direction.LOWER, (latency * 10,), exact=True)
        return make.latency(latency - 1, latency, latency + 1), cycles, make.counter(7.0)

    results = [(job, verdict, {"measurements": metrics(latency)}) for job, verdict, latency in found]
    return make.run(store, hours_ago, *results, **facts)  # type: ignore[arg-type]


def latencies(store: Store, run_id: str, job: Job, runs: int = 30) -> list[float | None]:
    series = {one.metric: one for one in store.history.background(run_id, runs).trends.get(job.id, ())}
    return [point.value for point in series["latency"].points] if "latency" in series else []


def test_trends_are_of_the_newest_runs_up_to_this_one_oldest_first(store: Store) -> None:
    a, b, c = (make.job(name) for name in "abc")
    measured(store, 10, (c, P, 1))
    ids = [measured(store, 9 - n, (a, P, 10.0 + n), (b, F, 20.0 + n)) for n in range(4)]
    assert latencies(store, ids[2], a) == [10, 11, 12]
    assert latencies(store, ids[3], b, runs=2) == [22, 23]
    found = store.history.background(ids[3])
    (cycles, latency) = found.trends[a.id]
    assert (cycles.metric, cycles.unit, cycles.direction) == ("htp_cycles", "cycles", "lower")
    assert [point.value for point in cycles.points] == [100, 110, 120, 130]
    assert [point.run_id for point in latency.points] == ids
    assert found.facts[latency.points[0].fingerprint]["device_kind"] == "virtual"
    # A job that was left out of some runs goes further back.
    assert latencies(store, measured(store, 5, (c, P, 3)), c, runs=2) == [1, 3]
    # The last of two attempts in a run counts.
    store.record_attempt(ids[3], make.attempt(a, started_ms=now_ms(), measurements=(make.latency(5, 6, 7),)))
    assert latencies(store, ids[3], a, runs=1) == [6]


def test_other_kinds_of_device_the_debugger_and_trouble_are_no_part_of_a_trend(sqlite_store: Store) -> None:
    store, a, b = sqlite_store, make.job("a"), make.job("b")
    measured(store, 9, (a, P, 1), kind="hardware")
    measured(store, 8, (a, P, 2), debug="layers")
    measured(store, 7, (a, I, 3))
    run_id = measured(store, 6, (a, P, 4), (b, P, 1))
    assert latencies(store, run_id, a) == [4]
    kept = ArtifactRecord("ab" * 32, 12, "etdump")
    store.record_attempt(run_id, make.attempt(b, started_ms=7), artifacts=(kept,))
    assert store.history.background(run_id).artifacts == {b.id: (JobFile("ab" * 32, 12, "etdump", attempt=2),)}
    nothing = store.history.background("20200101-000000-000000")
    assert (nothing.trends, nothing.facts, nothing.artifacts) == ({}, {}, {})


def test_no_step_of_a_trend_goes_over_a_whole_table(sqlite_store: Store) -> None:
    a = make.job("a")
    for hours in range(3):
        run_id = measured(sqlite_store, 5 - hours, (a, P, 1))
    with statements(sqlite_store) as asked:
        assert sqlite_store.history.background(run_id).trends
    found = plans(sqlite_store, asked)
    assert len(found) > 3
    growing = re.compile("SCAN (attempt|measurement|counter|run_job|comparison|artifact)")
    assert not [step for plan in found for step in plan if growing.match(step)]


# Runs by name, and the history of jobs.


_MORNING = 1_795_225_501_000  # 2026-11-21 01:45:01 UTC


def _begin(store: Store, started_ms: int) -> str:
    return store.begin_run(RunRecord("farm run", "ada", "bench", {}, started_ms))


def test_a_run_id_names_the_time_and_is_given_once(sqlite_store: Store) -> None:
    ids = [_begin(sqlite_store, _MORNING) for _ in range(20)]
    assert len(set(ids)) == 20
    assert all(re.fullmatch(r"20261121-014501-[0-9a-f]{6}", run_id) for run_id in ids)
    assert _begin(sqlite_store, _MORNING + 1000) > max(ids)


def test_runs_are_found_by_what_people_write(store: Store) -> None:
    first, second, third = (_begin(store, _MORNING + day * 86_400_000) for day in range(3))

    assert store.runs.latest_id() == third
    assert store.runs.resolve("latest", own=False) == third
    assert store.runs.resolve("latest~2", own=False) == first
    assert store.runs.resolve(second) == store.runs.resolve("20261122") == second
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
    with pytest.raises(UsageError, match=f"'{FIRST_RUN}' makes one"):
        sqlite_store.runs.resolve("latest")
    with pytest.raises(UnknownNameError, match=f"'{FIRST_RUN}' makes some"):
        sqlite_store.history.points("quantized_ops")


def test_a_record_of_an_unknown_run_or_job_is_refused(sqlite_store: Store) -> None:
    job, other = make.job(), make.job("other")
    with pytest.raises(StoreError, match="not in the store"):
        sqlite_store.plan_jobs("nonsense", [job])
    run_id = make.begin(sqlite_store, job)
    with pytest.raises(StoreError, match="has no job"):
        sqlite_store.record_attempt(run_id, make.attempt(other))


def test_history_never_mixes_virtual_and_hardware(store: Store) -> None:
    job = make.job()
    for hour, (kind, serial) in enumerate([("virtual", "virtual-1"), ("hardware", "phone-1")] * 3):
        run_id = make.begin(store, job, started_ms=_MORNING + hour * 3_600_000, kind=kind)
        measured = (make.latency(float(hour)),)
        store.record_attempt(
            run_id, make.attempt(job, device=serial, started_ms=_MORNING + hour, measurements=measured)
        )

    points = store.history.points("quantized_ops/relu", "latency", limit=2)

    found = [(point.device_kind, point.value) for point in points]
    assert found == [("hardware", 3.0), ("hardware", 5.0), ("virtual", 2.0), ("virtual", 4.0)]
    assert {point.unit for point in points} == {"ns"}
    assert [point.time_ms - _MORNING for point in points] == [3, 5, 2, 4]


def test_history_shows_attempts_that_measured_nothing_and_devices_that_were_not_announced(
    store: Store,
) -> None:
    job = make.job()
    run_id = make.begin(store, job, started_ms=_MORNING)
    store.record_attempt(run_id, make.attempt(job))
    failed = make.attempt(
        job, verdict=Verdict.FAILED, stage=Stage.BUILD, reason="no", device="", started_ms=0, measurements=()
    )
    store.record_attempt(run_id, failed)

    good, bad = store.history.points(job.id, "latency")

    assert (good.verdict, good.value, good.n, good.device) == ("passed", 2.0, 3, "virtual-1")
    assert (good.run_id, good.job_id) == (run_id, job.id)
    assert len(good.fingerprint) == len(good.case_version) == 64
    # The attempt needed no device, and belongs to the history of the only kind of device in its run.
    assert (bad.verdict, bad.value, bad.n, bad.metric, bad.device, bad.device_kind) == (
        "failed", None, 0, "latency", "", "virtual",
    )  # fmt: skip
    assert bad.time_ms == _MORNING
    strange = make.job("strange")
    run_id = make.begin(store, strange)
    store.record_attempt(run_id, make.attempt(strange, device="stranger"))
    assert [point.device_kind for point in store.history.points(strange.id)] == ["unknown"]


def test_the_newest_attempt_with_a_profile_is_found(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = make.job(), make.job("conv2d")
    nodes = tuple(OperatorProfile(name, "Qnn", "cycles", 6, 0.0, 0.0, float(2**63), 0.25) for name in ("a", "b"))
    etdump, summary = ArtifactRecord("e" * 64, 5_688, "etdump"), ArtifactRecord("f" * 64, 1, "qhas:x.json")
    first, second = (make.begin(store, job, other, started_ms=_MORNING + 1000 * n) for n in range(2))
    third = make.begin(store, job, make.job("more"), started_ms=_MORNING + 2000)
    store.record_attempt(first, make.attempt(job, operators=nodes[:1]), artifacts=[etdump])
    store.record_attempt(second, make.attempt(job, operators=nodes, started_ms=2))
    store.record_attempt(second, make.attempt(other, started_ms=3), artifacts=[summary])
    store.record_attempt(third, make.attempt(job, started_ms=4))

    qhas, newest = store.history.profiles("quantized_ops")
    assert (newest.job_id, newest.run_id, newest.operators, newest.artifacts) == (job.id, second, nodes, ())
    assert (newest.device, newest.device_kind, newest.verdict) == ("virtual-1", "virtual", "passed")
    assert (newest.facts, len(newest.case_version)) == ({"executorch": "1.5.1"}, 64)
    assert (qhas.job_id, qhas.operators, [file.kind for file in qhas.artifacts]) == (other.id, (), ["qhas:x.json"])
    (older,) = store.history.profiles("quantized_ops/relu", first)
    assert (older.operators, older.artifacts) == (nodes[:1], (etdump,))
    with pytest.raises(UsageError, match=f"run {third} has no profile of quantized_ops/relu: a run with --profile"):
        store.history.profiles("quantized_ops/relu", third)
    with pytest.raises(UnknownNameError, match="did you mean 'quantized_ops/relu'"):
        store.history.profiles("quantized_ops/rellu")
    # A run is looked at before the jobs are too many for a query.
    monkeypatch.setattr("farm.store.queries.history._MOST_PARAMETERS", 2)
    with pytest.raises(UsageError, match="3 jobs match"):
        store.history.profiles("*")
    assert [record.job_id for record in store.history.profiles("*", first)] == [job.id]


def test_runs_of_farm_debug_are_no_history_and_no_expectation(store: Store) -> None:
    job = make.job()
    run_id = make.run(store, 2, (job, Verdict.PASSED, {"seconds": 2.0}))
    make.run(store, 1, (job, Verdict.PASSED, {"seconds": 90.0}), debug="intermediate outputs")
    (point,) = store.history.points(job.id)
    assert point.run_id == run_id
    assert store.selection.expected([job.id], "virtual")[job.id].run_seconds == 2.0
    assert store.history.fingerprints([point.fingerprint]) == {point.fingerprint: {"device_kind": "virtual"}}


def test_jobs_are_found_by_case_suite_id_and_wildcard(store: Store) -> None:
    jobs = [make.job(), make.job("relu6"), make.job(precision="16a16w"), make.job(soc="SM8750")]
    make.run(store, 0, *((job, Verdict.PASSED) for job in jobs))

    def found(pattern: str, soc: str | None = None) -> set[str]:
        return {point.job_id for point in store.history.points(pattern, soc=soc)}

    relu, relu6, wide, other_soc = (job.id for job in jobs)
    assert found("quantized_ops/relu") == {relu, wide, other_soc}
    assert found("quantized_ops/relu", "sm8650") == {relu, wide}
    assert found(relu) == {relu}
    assert found("quantized_ops") == {relu, relu6, wide, other_soc}
    assert found("*/relu?") == {relu6}
    assert found("quantized_ops/relu[*-16a16w]") == {wide}
    for pattern, metric, soc, message in (
        ("quantized_ops/rellu", None, None, "did you mean 'quantized_ops/relu'"),
        ("quantized_ops/relu[SM8650-htp-8a8]", None, None, re.escape(f"did you mean {relu!r}")),
        ("quantized_ops/relu", "latencies", None, "did you mean 'latency'"),
        ("quantized_ops/relu", None, "SM8851", "unknown SoC 'SM8851': did you mean 'SM8850'"),
        # An SoC that farm knows is not unknown because nothing ran there.
        ("quantized_ops/relu", None, "sm8850", "has no result on SM8850 yet: there are results on SM8"),
    ):
        with pytest.raises(UsageError, match=message):
            store.history.points(pattern, metric, soc=soc)
    for hostile in ("\0", "\udcff", "*" * 10_000, "[", "(", "%"):
        try:
            store.history.points(hostile)
        except UnknownNameError:
            continue


def test_the_queries_in_the_documentation_run(sqlite_store: Store, tmp_path: Path) -> None:
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
    take(sqlite_store, "phone-1", "ada")
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


DECIDING = {
    ("sqnr_fp32[0]", "dB", Direction.HIGHER): ((38.65, 38.70, 38.35), 38.35),
    ("cosine_fp32[1]", "1", Direction.HIGHER): ((0.999, 0.99, 0.9995), 0.99),
    ("kl_quantized[0]", "1", Direction.LOWER): ((0.1, 0.3, 0.2), 0.3),
    ("psnr[0]", "dB", Direction.HIGHER): ((30.0, math.inf, 20.0), 20.0),
    ("top1[0]", "1", Direction.HIGHER): ((1.0, 1.0, 0.0, 0.0), 0.5),
    ("latency", "ns", Direction.LOWER): ((1.0, 2.0, 9.0), 2.0),
    ("step_time[0-63]", "ns", Direction.LOWER): ((1.0, 2.0, 9.0), 2.0),
}
"""Samples and the value that decides, by metric, unit and direction."""


def test_series_have_the_value_that_decides(store: Store) -> None:
    job = make.job()
    measured = tuple(Measurement(*key, samples) for key, (samples, _) in DECIDING.items())
    run_id = make.run(store, 0, (job, Verdict.PASSED, {"measurements": measured}))
    expected = {metric: pytest.approx(value) for (metric, _, _), (_, value) in DECIDING.items()}
    assert {point.metric: point.value for point in store.history.points(job.id)} == expected
    [past] = store.history.pasts_of_run(run_id)
    assert sorted(value for one in past.series for value in one.values) == sorted(
        value for _, value in DECIDING.values()
    )
    [trends] = store.history.background(run_id).trends.values()
    assert trends
    assert all(point.value == expected[one.metric] for one in trends for point in one.points)
