"""Records written to the store and read back without loss, and decisions at the time of recording."""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from hypothesis import example, given
from hypothesis import strategies as st
from old_store import connected, make_old_store
from recipe import FarmCopy, recipe_code
from sqlalchemy import Connection, select, text
from stores import place_store

from farm.base.errors import StoreLostError
from farm.builds.program.layers import LayerStep
from farm.results.attempt import Attempt, Direction, LayerComparison, Measurement, OperatorProfile, Stage, Verdict
from farm.store import schema, values
from farm.store.records import ArtifactRecord, BuildRecord, DeviceView, JobFile, RunRecord
from farm.store.rows import NewAttempt, insert_attempt_rows
from farm.store.schema import REVISION, VERSION_TABLE, metadata
from farm.store.store import Store, open_store
from farm.store.transfer.lines import AttemptLine
from farm.store.transfer.runs import LineFile, import_runs, runs_in
from farm.suites.suite import Case, InputSpec

from . import make

# Records written to the store and read back without loss, on both databases.


NAN, INF, GREAT = math.nan, math.inf, 2**53 + 1


def test_every_field_of_a_run_comes_back(store: Store) -> None:
    first, second = make.job(), make.job("conv2d", "16a16w")
    fingerprint = {"executorch": "1.5.1", "qnn": "2.51", "device_kind": "mixed"}
    run_id = store.begin_run(RunRecord("farm run --soc SM8650", "ada", "bench", fingerprint, 1_790_000_000_001))
    store.plan_jobs(run_id, [second, first])
    store.record_device(run_id, make.device())
    phone = msgspec.structs.replace(make.device("phone-1", "hardware", "google/x:15"), soc_reported="SM8650P")
    store.record_device(run_id, phone, {"skel": "s1"})
    store.record_builds(
        run_id, [BuildRecord(first.id, seconds=2.5, cached=False, bundle_key="a" * 64, fallback_ops={"aten.sin": 2})]
    )
    store.record_builds(run_id, [BuildRecord(second.id, seconds=0.0, cached=True, bundle_key="c" * 64)])
    pulled = make.attempt(
        first, verdict=Verdict.INFRA, stage=Stage.PUSH, reason="cable pulled", seconds=1.5, measurements=(),
        log="one\ntwo ✓",
    )  # fmt: skip
    wrong = make.attempt(
        first, verdict=Verdict.FAILED, stage=Stage.NUMERICS, reason="sqnr 12 dB < 20 dB", device="phone-1",
        started_ms=1_790_000_000_999, known_issue="weak precision", notes=("left to the CPU: aten.sin x2", "slow"),
        comparisons=(
            make.comparison(violations=("sqnr 12.0 dB < 20 dB", "cosine 0.9 < 0.99")),
            make.comparison(output=1, reference="quantized", sqnr_db=None, cosine=None, max_abs=None, mismatch=0.5),
        ),
        measurements=(
            make.latency(3.0, 1.5, 2.0),
            make.counter(12_345),
            Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (12.0,)),
        ),
        operators=(OperatorProfile("relu:OpId_80", "QnnBackend[0]", "cycles", 6, 0.0, 0.0, float(2**63), 0.25),),
        layers=(LayerComparison("conv", "aten.conv", LayerStep.QUANTIZATION, 0.5, 30.25, 0.999, diverges=True),),
    )  # fmt: skip
    for attempt in (pulled, wrong):
        store.record_attempt(run_id, attempt)
    store.finish_run(run_id, 1)

    view = store.runs.view(run_id)

    assert (view.command, view.user, view.host) == ("farm run --soc SM8650", "ada", "bench")
    assert (view.started_ms, view.exit_code, view.fingerprint) == (1_790_000_000_001, 1, fingerprint)
    assert view.finished_ms is not None
    assert view.devices == (
        DeviceView(
            "phone-1", "SM8650", "hardware", "google/x:15", jobs=1, busy_seconds=0.25,
            runtime={"skel": "s1", "soc_reported": "SM8650P"},
        ),
        DeviceView("virtual-1", "SM8650", "virtual", "farm/virtual/1", jobs=1, busy_seconds=1.5),
    )  # fmt: skip
    assert [job.id for job in view.jobs] == [second.id, first.id]
    conv, relu = view.jobs
    assert (conv.attempts, conv.cached, conv.build_seconds, conv.fallback_ops) == ((), True, 0.0, {})
    assert (relu.suite, relu.case, relu.soc, relu.backend) == ("quantized_ops", "relu", "SM8650", "htp")
    assert (relu.precision, relu.case_module) == ("8a8w", "torch.nn:ReLU")
    assert (relu.build_seconds, relu.cached, relu.fallback_ops) == (2.5, False, {"aten.sin": 2})
    assert relu.attempts == (pulled, wrong)


def test_an_attempt_of_a_run_that_is_gone_tells_so_also_with_a_device(store: Store) -> None:
    job = make.job()
    for device in (None, make.device()):
        with pytest.raises(StoreLostError, match="20200101-000000-aaaaaa"):
            store.record_attempt("20200101-000000-aaaaaa", make.attempt(job), device)


def test_builds_of_many_jobs_are_recorded_together_or_not_at_all(store: Store) -> None:
    jobs = [make.job("conv2d", "16a16w"), make.job()]
    run_id = make.begin(store, *jobs)
    builds = [
        BuildRecord(jobs[0].id, 2.5, cached=False, bundle_key="a" * 64, fallback_ops={"aten.sin": 2}, program="p"),
        BuildRecord(jobs[1].id, 0.0, cached=True, bundle_key="d" * 64),
    ]
    with pytest.raises(StoreLostError, match="has no job other"):
        store.record_builds(run_id, [*builds, BuildRecord("other", 0.0, cached=True, bundle_key="e" * 64)])
    assert not any(job.build_seconds or job.cached for job in store.runs.view(run_id).jobs)

    store.record_builds(run_id, builds)

    found = [(job.build_seconds, job.cached, job.fallback_ops) for job in store.runs.view(run_id).jobs]
    assert found == [(2.5, False, {"aten.sin": 2}), (0.0, True, {})]


def test_odd_numbers_come_back_to_the_last_digit(store: Store) -> None:
    job = make.job()
    run_id = make.begin(store, job)
    samples = (GREAT, GREAT - 2, 2**63 - 1, -(2**63), 7)
    attempt = make.attempt(
        job,
        comparisons=(
            make.comparison(sqnr_db=INF, cosine=NAN, max_abs=-INF, mismatch=None),
            make.comparison(sqnr_db=NAN, cosine=None, max_abs=NAN, mismatch=NAN),
        ),
        measurements=(
            make.latency(INF, 1.0, NAN),
            Measurement("all_inf", "dB", Direction.HIGHER, (INF, INF)),
            Measurement("both_ways", "dB", Direction.HIGHER, (INF, -INF)),
            Measurement("none", "dB", Direction.HIGHER, ()),
            Measurement("exact", "1", Direction.HIGHER, (0.5, INF, NAN), exact=True),
            Measurement("cycles", "cycles", Direction.LOWER, samples, exact=True),
        ),
        operators=(OperatorProfile("x", "", "us", 1, NAN, -INF, INF, NAN),),
        layers=(
            LayerComparison("x", "y", LayerStep.COMPILER, NAN, -INF, None),
            LayerComparison("x", "y", LayerStep.DEVICE, INF, None, NAN),
        ),
    )
    store.record_attempt(run_id, attempt)

    (back,) = store.runs.view(run_id).jobs[0].attempts

    # NaN is not equal to itself; its text is.
    assert str(back) == str(attempt)
    points = {point.metric: (point.value, point.n, point.exact) for point in store.history.points("quantized_ops/relu")}
    assert points["cycles"] == (GREAT - 2, 5, True)
    assert {metric: value for metric, (value, _, _) in points.items() if metric != "cycles"} == {
        "latency": None, "all_inf": INF, "both_ways": None, "none": None, "exact": None,
    }  # fmt: skip


def test_hostile_text_is_kept_readable_and_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    # The real limits would take a database some seconds.
    monkeypatch.setattr(values, "OPERATORS_LIMIT", 20)
    monkeypatch.setattr(values, "LAYERS_LIMIT", 30)
    evil = "a\0\udcff" + "x" * 100_000
    job = make.job()
    run_id = store.begin_run(RunRecord("farm \0run \udcff", "a\0", "h\ud800", {"k\0": "v\udfff"}))
    store.plan_jobs(run_id, [job])
    attempt = make.attempt(
        job,
        verdict=Verdict.FAILED,
        reason="nul \0 surrogate \udcff " + "x" * 1_000_000,
        device="serial\0" * 1000,
        log="start" + "y" * 2_000_000 + "the end \0",
        known_issue="z" * 1_000_000,
        notes=("n" * 100_000,) * 1_000,
        comparisons=(make.comparison(violations=("v\0" * 10_000,)),),
        measurements=(Measurement("m\0" * 1_000, "\udcff" * 100, Direction.LOWER, (1.0,)),),
        operators=(OperatorProfile(evil, evil, evil, 1, 1.0, 1.0, 1.0, 1.0),) * 25,
        layers=(LayerComparison(evil, evil, LayerStep.COMPILER, 1.0, 1.0, 1.0),) * 35,
    )
    store.record_attempt(run_id, attempt)

    view = store.runs.view(run_id)
    (back,) = view.jobs[0].attempts

    assert view.command == "farm ␀run \\udcff"
    assert back.reason.startswith("nul ␀ surrogate \\udcff xxx")
    assert len(back.reason) < 10_000
    assert back.log.endswith("the end ␀")
    assert back.log.startswith("[1")
    assert len(back.log) < 300_000
    assert len(msgspec.json.encode(view)) < 2_000_000
    assert (len(back.operators), len(back.layers)) == (20, 30)
    assert back.operators[0].node.startswith("a␀\\udcffx")
    assert {len(back.operators[0].node), len(back.layers[0].layer), len(back.layers[0].operator)} == {256}


_DECIDING = {
    "sqlite": "SELECT sql FROM sqlite_master WHERE type = 'trigger'",
    "postgresql": "SELECT pg_get_functiondef(tgfoid), pg_get_triggerdef(pg_trigger.oid), proacl "
    "FROM pg_trigger JOIN pg_proc ON pg_proc.oid = tgfoid WHERE tgname = 'attempt_decides'",
}


def test_a_new_store_and_an_upgraded_one_have_the_tables_of_the_schema(empty_address: str) -> None:
    def is_of_farm(name: str | None, kind: str, _: object) -> bool:
        return kind != "table" or not str(name).startswith(("procrastinate_", "farm_"))

    deciding = []
    for old in (False, True):
        if old:
            _clear(empty_address)
            make_old_store(empty_address)
        with open_store(empty_address) as store:
            if "://" in empty_address:
                # Procrastinate's tables, which are no part of farm's schema.
                store.messages.require()
        with connected(empty_address) as connection:
            options = {"compare_type": True, "version_table": VERSION_TABLE, "include_name": is_of_farm}
            assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []
            found = connection.execute(text(_DECIDING[connection.dialect.name])).one()
        deciding.append([" ".join(str(one).split()) for one in found])
    assert deciding[0] == deciding[1]


def _clear(address: str) -> None:
    if "://" not in address:
        Path(address).unlink()
        return
    with connected(address) as connection:
        for statement in ("DROP SCHEMA public CASCADE", "CREATE SCHEMA public"):
            connection.execute(text(statement))


def test_an_attempt_offered_twice_is_recorded_once(store: Store) -> None:
    job = make.job()
    run_id = make.begin(store, job)
    timed = make.attempt(job, comparisons=(make.comparison(sqnr_db=math.nan),))
    untimed = make.attempt(job, started_ms=0, verdict=Verdict.INFRA, reason="the worker died", measurements=())
    for _ in range(2):
        store.record_attempt(run_id, timed, artifacts=[ArtifactRecord("a" * 64, 5, "etdump")])
        store.record_attempt(run_id, untimed)

    verdicts = [attempt.verdict for attempt in store.runs.view(run_id).jobs[0].attempts]

    # Without a time there is no telling that two are one.
    assert verdicts == ["passed", "infra", "infra"]
    assert store.runs.artifacts(run_id) == [JobFile("a" * 64, 5, "etdump", attempt=1)]
    assert store.runs.artifacts(run_id, job.id) == store.runs.artifacts(run_id)
    assert store.runs.artifacts(run_id, "another") == []


def test_two_runs_never_have_one_id(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["20260921-141320-aaaaaa", "20260921-141320-aaaaaa", "20260921-141320-bbbbbb"])
    monkeypatch.setattr("farm.store.rows.new_run_id", lambda _: next(ids))
    record = RunRecord("farm run", "ada", "bench", {"qnn": "2.51"})
    assert [store.begin_run(record) for _ in range(2)] == ["20260921-141320-aaaaaa", "20260921-141320-bbbbbb"]


def test_a_device_is_known_by_its_build_and_a_case_by_what_it_computes(sqlite_store: Store) -> None:
    versions = []
    for number, (build, changes) in enumerate(
        [("before update", {}), ("after update", {"precisions": ("8a8w", "16a16w")}), ("last", {"seed": 7})]
    ):
        job, phone = make.job(**changes), make.device("phone", "hardware", build)
        run_id = make.begin(sqlite_store, job)
        sqlite_store.record_attempt(run_id, make.attempt(job, device="phone", started_ms=number + 1), phone)
        view = sqlite_store.runs.view(run_id)
        assert [device.build for device in view.devices if device.serial == "phone"] == [build]
        versions.append(view.jobs[0].case_version)
    assert versions[0] == versions[1] != versions[2]


# Statistics agree with numpy; packed samples are unpacked without loss.


_FINITE = st.floats(-1e15, 1e15)


@given(st.lists(_FINITE, min_size=1, max_size=50))
def test_statistics_are_those_of_numpy(samples: list[float]) -> None:
    found = values.statistics_of(samples)
    array = np.array(samples)
    expected = {
        "min": array.min(),
        "p10": np.percentile(array, 10),
        "p50": np.median(array),
        "p90": np.percentile(array, 90),
        "p99": np.percentile(array, 99),
        "mean": array.mean(),
        "mad": np.median(np.abs(array - np.median(array))),
    }
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-3 * math.ulp(1e15) + 1e-9 * float(np.abs(array).max()))


@given(st.lists(st.floats(), max_size=20))
@example([sys.float_info.max] * 3)
@example([-sys.float_info.max] * 3)
def test_statistics_are_never_nan(samples: list[float]) -> None:
    assert not any(value is not None and math.isnan(value) for value in values.statistics_of(samples).values())


@given(st.text(st.characters(), max_size=300), st.integers(3, 100))
def test_clean_text_is_bounded_and_storable(text: str, limit: int) -> None:
    cleaned = values.clean(text, limit)
    assert len(cleaned) <= limit
    assert "\0" not in cleaned
    cleaned.encode()


def test_a_case_that_has_to_repeat_itself_is_another_one() -> None:
    # A program with a state is executed warm then, so that its latency begins another series.
    case = Case("mine", "one", ".nets:Last", (InputSpec((8,)),))
    versions = [
        values.case_version(msgspec.structs.replace(case, deterministic=one), "source") for one in (None, False, True)
    ]
    assert versions[0] == versions[1] != versions[2]


# Fields of an attempt are columns of its row and members of its line in an export, each declared once.


_OF_THE_ROW = {"recorded_ms", "digest"}


def test_every_field_is_a_column_and_every_column_a_field(tmp_path: Path) -> None:
    place_store(tmp_path / "farm.db")
    connection = sqlite3.connect(tmp_path / "farm.db")
    columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(attempt)")}
    connection.close()
    fields, line = set(Attempt.__struct_fields__), set(AttemptLine.__struct_fields__)
    details = {"comparisons", "measurements", "operators", "layers"}
    assert columns - {"id", "run_job_id", "device_id"} - _OF_THE_ROW == fields - {"job_id", "device"} - details
    assert line - _OF_THE_ROW - {"job", "artifacts"} == fields - {"job_id"}


_RECORDED_AND_CARRIED = """
from pathlib import Path
import msgspec
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.store.transfer.runs import LineFile, import_runs, runs_in
from farm.suites.suite import Case, Job, Target
job = Job(Case("ops", "relu", "torch.nn:ReLU", ()), Target("SM8650", "htp", "8a8w"))
with open_store("other.db") as store:
    run_id = store.begin_run(RunRecord("farm run", "ada", "bench", {}))
    store.plan_jobs(run_id, [job])
    store.record_attempt(run_id, Attempt(job.id, Verdict.PASSED, Stage.DONE, "", log_chars=7))
    Path("runs.jsonl").write_bytes(b"".join(store.transfer.export([run_id])))
with open_store("farm.db") as store, LineFile("runs.jsonl") as lines:
    import_runs(store.transfer, runs_in([lines]))
    print(msgspec.json.encode(store.runs.view(run_id)).decode())
"""


def test_the_recipe_of_a_column_records_carries_and_views_it(tmp_path: Path, farm_cache: Path) -> None:
    field, revision = recipe_code("developers/recipes.md", "Adding a column to attempts")
    copy = FarmCopy.make(tmp_path, farm_cache)
    copy.insert("farm/results/attempt.py", "\n\nclass Ending(", field)
    number = f"{int(REVISION) + 1:04}"
    revision = revision.replace('down_revision = "0015"', f'down_revision = "{REVISION}"')
    revision = revision.replace('revision = "0016"', f'revision = "{number}"', 1)
    (tmp_path / f"farm/store/migrations/versions/rev_{number}_log_chars.py").write_text(revision)
    done = copy.python("-c", _RECORDED_AND_CARRIED)
    assert done.returncode == 0, done.stderr
    [job] = json.loads(done.stdout)["jobs"]
    assert job["attempts"][0]["log_chars"] == 7


# Decisions at the time of recording: the deciding attempt, the kind of a run, and its kind of devices.


_DECIDED = """
    SELECT job.name, run_job.decisive_verdict, attempt.started_ms
    FROM run_job JOIN job ON job.id = run_job.job_id LEFT JOIN attempt ON attempt.id = run_job.decisive_attempt_id
"""


def rows(address: str, query: str) -> list[tuple[Any, ...]]:
    with open_store(address, readonly=True) as reader, reader._database.reading() as connection:
        return [tuple(row) for row in connection.exec_driver_sql(query)]


def judged(order: Sequence[Verdict]) -> int:
    """Return the number of the attempt that decides: the last without trouble of the farm, else the last."""
    numbers = [number for number, verdict in enumerate(order, 1) if verdict is not Verdict.INFRA]
    return numbers[-1] if numbers else len(order)


def test_the_last_verdict_about_the_code_decides_in_the_store_and_in_reports(address: str) -> None:
    orders = [order for count in range(4) for order in itertools.product(Verdict, repeat=count)]
    jobs = [make.job(f"case_{number}") for number in range(len(orders))]
    expected = {job.id: (judged(order), order) for job, order in zip(jobs, orders, strict=True)}
    with open_store(address) as store:
        run_id = make.begin(store, *jobs)
        for job, order in zip(jobs, orders, strict=True):
            for when, verdict in enumerate(order, start=1):
                store.record_attempt(run_id, make.attempt(job, verdict=verdict, started_ms=when))
        shown = {job.id: (job.decisive_attempt, job.decisive) for job in store.runs.view(run_id).jobs}
    found = {name: (verdict, when) for name, verdict, when in rows(address, _DECIDED)}
    assert found == {
        job: (order[number - 1], number) if number else (None, None) for job, (number, order) in expected.items()
    }
    assert {job: (number, one and one.started_ms) for job, (number, one) in shown.items()} == {
        job: (number, number or None) for job, (number, _) in expected.items()
    }
    assert len(found) == 85


def test_of_two_recorders_at_the_same_time_the_store_and_reports_choose_the_same(
    address: str,
) -> None:
    job = make.job("together")
    known = {"recorded_ms": 1, "device_id": None, "digest": None}

    def record(connection: Connection, number: int, verdict: Verdict) -> None:
        run_job = connection.execute(select(schema.run_job)).one()
        row = {**known, "id": number, "run_job_id": run_job.id}
        attempt = make.attempt(job, verdict=verdict)
        insert_attempt_rows(connection, [NewAttempt(row, run_job.job_id, attempt, ())])

    with open_store(address) as store:
        run_id = make.begin(store, job)
        # PostgreSQL gives ids before rows are there: the attempt with the greater id may be the first.
        store._database.write(lambda connection: record(connection, 20, Verdict.PASSED))
        store._database.write(lambda connection: record(connection, 10, Verdict.FAILED))
        [shown] = store.runs.view(run_id).jobs
        assert shown.decisive is not None
        assert shown.decisive.verdict == store.runs.verdicts(run_id)[job.id].outcome == Verdict.FAILED


KINDS = {
    "farm run --soc SM8650": "suite",
    "farm pytest tests": "tests",
    "farm exec ops/relu --virtual 1": "exec",
    "farm jobs rerun ops/relu": "repro",
    "farm debug ops/relu": "debug",
    "somebody's own": "suite",
}


def test_a_run_is_recorded_and_imported_with_its_kind_and_that_of_its_devices(tmp_path: Path) -> None:
    addresses, file = [str(tmp_path / name) for name in ("home.db", "elsewhere.db")], tmp_path / "runs.jsonl"
    for address in addresses:
        place_store(Path(address))
    with open_store(addresses[0]) as home, open_store(addresses[1]) as elsewhere:
        for command in KINDS:
            facts = {"device_kind": "virtual", **({"debug": "intermediate outputs"} if "debug" in command else {})}
            home.begin_run(RunRecord(command, "ada", "bench", facts))
        file.write_bytes(b"".join(home.transfer.export([run.id for run in home.transfer.runs()])))
        with LineFile(str(file)) as lines:
            import_runs(elsewhere.transfer, runs_in([lines]))
    for address in addresses:
        found = rows(address, "SELECT command, run_kind, run_device_kind FROM run")
        assert sorted(found) == sorted((command, kind, "virtual") for command, kind in KINDS.items())
