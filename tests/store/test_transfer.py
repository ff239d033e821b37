"""Runs go from one store into another as lines of JSON, and nothing else gets in."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from stores import place_store

from farm.base.errors import UsageError
from farm.results.attempt import (
    Cause,
    Direction,
    LayerComparison,
    LayerStep,
    Measurement,
    OperatorProfile,
    Stage,
    Verdict,
)
from farm.results.measurements import counted
from farm.store.records import ArtifactRecord, BuildRecord, RunRecord, SkipReason
from farm.store.store import Store, open_store
from farm.store.transfer.lines import encode
from farm.store.transfer.runs import LineFile, import_runs, runs_in
from farm.store.values import jsonable

from . import make

NAN, INF = math.nan, math.inf
NIGHT = 1_790_000_000_000
DAY = 86_400_000


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Store]:
    """A second store, in SQLite."""
    place_store(tmp_path / "other.db")
    with open_store(tmp_path / "other.db") as opened:
        yield opened


def exported(store: Store, *run_ids: str) -> bytes:
    return b"".join(store.transfer.export(run_ids or [run.id for run in store.transfer.runs()]))


def imported(store: Store, tmp_path: Path, *exports: bytes) -> tuple[list[str], list[str]]:
    """Import exports, and return the ids of added runs and of runs that the store had."""
    paths = [tmp_path / f"export-{number}.jsonl" for number in range(len(exports))]
    with contextlib.ExitStack() as opened:
        for path, data in zip(paths, exports, strict=True):
            path.write_bytes(data)
        added, present = import_runs(
            store.transfer, runs_in(opened.enter_context(LineFile(str(path))) for path in paths)
        )
    return [run.id for run in added], [run.id for run in present]


def said(store: Store, run_id: str) -> bytes:
    # NaN is not equal to itself; its text is. SQLite has one zero in a column.
    view = jsonable(msgspec.to_builtins(store.runs.view(run_id)))
    return msgspec.json.encode(view, order="sorted").replace(b"-0.0", b"0.0")


def everything(store: Store) -> list[str]:
    """Record two runs, the first with something of all that a store keeps, the second with a failure beside it."""
    relu, conv, late = make.job(), make.job("conv2d", "16a16w"), make.job("softmax", soc="SM8750")
    facts = {"qnn": "2.51", "executorch": "1.5.1", "device_kind": "virtual"}
    run_id = store.begin_run(RunRecord("farm run --soc 'SM8650' \x1b[31m", "ada", "bench", facts, NIGHT, "nightly"))
    store.plan_jobs(run_id, [conv, relu, late])
    store.record_device(run_id, make.device())
    store.record_device(run_id, make.device("phone-1", "hardware", "google/x:15"))
    store.record_device(run_id, make.device("phone-1", "hardware", "google/x:14"))
    builds = (
        BuildRecord(
            relu.id, 0.1 + 0.2, cached=False, bundle_key="a" * 64, fallback_ops={"aten.sin": 2},
            operators={"aten.relu.default": 1},
        ),
        BuildRecord(conv.id, 0.0, cached=True, bundle_key="c" * 64, fallback_ops={}),
    )  # fmt: skip
    store.record_builds(run_id, builds)
    store.mark_skipped(run_id, {late.id: SkipReason("no time", NIGHT - DAY, "passed", "20260101-000000-abcdef")})
    hang = make.attempt(
        relu, verdict=Verdict.INFRA, stage=Stage.PUSH, cause=Cause.GONE, reason="cable pulled", measurements=(),
        log="one\ntwo ✓ \x1b[1m", started_ms=0, seconds=0.1,
    )  # fmt: skip
    store.record_attempt(run_id, hang)
    great = 2**53 + 1
    numbers = make.attempt(
        relu, verdict=Verdict.FAILED, stage=Stage.NUMERICS, cause=Cause.NUMERICS, reason="sqnr 12 dB < 20 dB",
        known_issue="weak", notes=("left to the CPU: aten.sin x2", "slow"), seconds=0.2,
        comparisons=(
            make.comparison(sqnr_db=INF, cosine=NAN, max_abs=-INF, peak=-0.0, violations=("sqnr 12.0 dB < 20 dB",)),
            make.comparison(output=1, reference="quantized", sqnr_db=None, mismatch=5e-324, steps=0.1, loss_db=1e300),
            make.comparison(output=2, name="[1].0"),
        ),
        measurements=(
            make.latency(3.0, 0.1, -0.0, INF, -INF, NAN, 5e-324, 1.7976931348623157e308, 1 / 3),
            Measurement("pte_size", "bytes", Direction.LOWER, (great, great - 2, 2**63 - 1, -(2**63)), exact=True),
            Measurement("half", "1", Direction.HIGHER, (0.5, 2.0, NAN), exact=True),
            Measurement("beyond", "1", Direction.HIGHER, (1e300,), exact=True),
            Measurement("none", "dB", Direction.HIGHER, ()),
        ),
        operators=(
            OperatorProfile("aten_relu:OpId_8", "QnnBackend[0]", "cycles", 3, 1.5, -0.0, INF, 0.1),
            OperatorProfile("inf", "", "ns", 2, NAN, NAN, NAN, NAN),
        ),
        layers=(
            LayerComparison("a", "aten.relu", LayerStep.COMPILER, NAN, INF, None, diverges=True),
            LayerComparison("b", "aten.relu", LayerStep.DEVICE, 1e-9, None, 0.3),
        ),
    )  # fmt: skip
    kept = [ArtifactRecord("e" * 64, 2**40, "etdump"), ArtifactRecord("d" * 64, 0, "optrace:x.json")]
    store.record_attempt(run_id, numbers, make.device("phone-1", "hardware", "google/x:14"), artifacts=kept)
    store.record_attempt(run_id, make.attempt(conv, seconds=0.3))
    store.record_attempt(run_id, make.attempt(relu, device="never announced", started_ms=NIGHT + 5))
    store.finish_run(run_id, 1)
    second = make.begin(store, relu, conv, started_ms=NIGHT + DAY)
    failed = {"verdict": Verdict.FAILED, "stage": Stage.EXECUTE, "reason": "crash", "started_ms": NIGHT + DAY}
    store.record_attempt(second, make.attempt(conv, measurements=(make.counter(7),), **failed))
    store.finish_run(second, 1)
    return [run_id, second]


@pytest.mark.parametrize("address", ["postgresql"], indirect=True)
@pytest.mark.parametrize("into_postgresql", [True, False])
def test_runs_are_the_same_in_another_store(store: Store, other: Store, tmp_path: Path, into_postgresql: bool) -> None:
    source, target = (other, store) if into_postgresql else (store, other)
    run_ids = everything(source)
    data = exported(source)

    assert imported(target, tmp_path, data) == (run_ids, [])

    for run_id in run_ids:
        assert said(target, run_id) == said(source, run_id)
        assert target.runs.artifacts(run_id) == source.runs.artifacts(run_id)
        assert target.runs.verdicts(run_id) == source.runs.verdicts(run_id)
    assert str(target.history.points("*")) == str(source.history.points("*"))
    profiles = [one.history.profiles("quantized_ops/relu")[0].artifacts for one in (source, target)]
    assert profiles[0] == profiles[1]
    hashes = [point.fingerprint for point in source.history.points("*")]
    assert target.history.fingerprints(hashes) == source.history.fingerprints(hashes)
    assert exported(target) == data


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Export of the two runs of `everything`."""
    path = tmp_path_factory.mktemp("two_runs") / "farm.db"
    place_store(path)
    with open_store(path) as store:
        everything(store)
        return exported(store)


def run_ids_of(data: bytes) -> list[str]:
    return [line["id"] for line in map(json.loads, data.splitlines()) if line["kind"] == "run"]


def test_an_export_is_json_that_any_tool_reads(two_runs: bytes) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in two_runs.splitlines()]

    assert (lines[0]["kind"], lines[0]["layout"]) == ("farm-export", 4)
    kinds = [line["kind"] for line in lines[1:]]
    assert kinds == ["run", *["job"] * 3, *["attempt"] * 4, "run", *["job"] * 2, "attempt"]
    (numbers,) = [line for line in lines if line.get("known_issue")]
    latency, size = numbers["measurements"][:2]
    assert latency["samples"][:6] == [3.0, 0.1, -0.0, "inf", "-inf", "nan"]
    assert size["samples"] == [2**53 + 1, 2**53 - 1, 2**63 - 1, -(2**63)]
    assert (numbers["comparisons"][0]["sqnr_db"], numbers["comparisons"][0]["mismatch"]) == ("inf", None)
    assert lines[1]["devices"][numbers["device"]]["build"] == "google/x:14"


def test_an_import_twice_adds_nothing_and_another_run_of_the_same_id_is_refused(
    store: Store, two_runs: bytes, tmp_path: Path
) -> None:
    first, second = run_ids_of(two_runs)
    lines = two_runs.splitlines(keepends=True)
    only_second = b"".join([lines[0], *lines[9:]])
    assert imported(store, tmp_path, only_second) == ([second], [])
    assert imported(store, tmp_path, two_runs, only_second) == ([first], [second])
    assert imported(store, tmp_path, two_runs + two_runs) == ([], [first, second])
    assert exported(store) == two_runs

    changed = only_second.replace(b'"reason":"crash"', b'"reason":"hang"')
    refused = rf"export-0.jsonl:2: run {second}: the store has another.*nothing was"
    with pytest.raises(UsageError, match=refused) as caught:
        imported(store, tmp_path, changed)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="occurs twice with different content"):
        imported(store, tmp_path, only_second, changed)
    assert exported(store) == two_runs


def test_the_way_in_which_lines_and_numbers_are_written_does_not_matter(
    sqlite_store: Store, two_runs: bytes, tmp_path: Path
) -> None:
    def rewritten(line: bytes) -> bytes:
        members = list(json.loads(line).items())
        return json.dumps(dict(reversed(members)), separators=(" , ", " : ")).encode() + b"\r\n"

    ways = b"".join(map(rewritten, two_runs.splitlines()))
    for number, way in ((b"[3.0 ,", b"[3 ,"), (b"[7]", b"[7.0]"), (b": 0.2 ,", b": 2e-1 ,"), (b"2.0 ,", b"2 ,")):
        assert number in ways
        ways = ways.replace(number, way)
    assert imported(sqlite_store, tmp_path, ways)[0] == run_ids_of(two_runs)
    assert exported(sqlite_store) == two_runs


def test_an_unfinished_run_goes_over_as_it_stands(sqlite_store: Store, other: Store, tmp_path: Path) -> None:
    assert imported(sqlite_store, tmp_path, exported(other)) == ([], [])
    job = make.job()
    run_id = make.begin(other, job)
    imported(sqlite_store, tmp_path, exported(other))
    view = sqlite_store.runs.view(run_id)
    assert (view.finished_ms, view.jobs[0].attempts) == (None, ())
    other.record_attempt(run_id, make.attempt(job))
    with pytest.raises(UsageError, match="or another state of this one: not imported"):
        imported(sqlite_store, tmp_path, exported(other))


@pytest.mark.parametrize("address", ["postgresql"], indirect=True)
def test_a_transaction_does_not_stand_still_while_lines_are_made_or_read(
    address: str, two_runs: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(0.2)
            return function(*arguments)

        return call

    path = tmp_path / "export.jsonl"
    path.write_bytes(b"".join(two_runs.splitlines(keepends=True)[:9]))
    with (
        open_store(f"{address}&options=-c idle_in_transaction_session_timeout%3D500ms") as store,
        LineFile(str(path)) as file,
    ):
        [found] = runs_in([file])
        monkeypatch.setattr("farm.store.transfer.runs.encode", slowly(encode))
        assert store.transfer.add(lambda: map(slowly(lambda line: line), found.lines()), found.digest)
        assert exported(store) == path.read_bytes()


def test_the_newest_result_is_that_of_the_newest_run_not_of_the_last_import(
    sqlite_store: Store, other: Store, tmp_path: Path
) -> None:
    job, store = make.job(), sqlite_store
    older = make.run(other, 48, (job, Verdict.FAILED, {"seconds": 0.5}))
    newer = make.run(store, 24, (job, Verdict.PASSED))

    imported(store, tmp_path, exported(other))

    assert store.runs.latest_id() == newer
    assert [point.run_id for point in store.history.points(job.id)] == [older, newer]
    assert [found.result.run_id for found in store.status.job_results([job.id])] == [newer]
    assert store.selection.failed_last([job.id], "virtual", "ada") == set()
    assert store.selection.expected([job.id], "virtual")[job.id].last.run_id == newer


def edited(two_runs: bytes, line: int, *path: str | int, to: Any) -> list[dict[str, Any]]:
    """Return the lines of an export with one place of one line changed."""
    lines = [json.loads(one) for one in two_runs.splitlines()]
    place: Any = lines[line - 1]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return lines


def written(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


# Lines: 1 the head, 2 a run, 3 to 5 its jobs (conv2d, relu, softmax), 6 to 9 its attempts, 10 the second run.
IMPOSSIBLE: list[tuple[list[str | int], Any, str]] = [
    ([1, "layout"], 5, r"of a newer farm \(layout 5, this one knows 4\): update farm"),
    ([1, "layout"], 0, "Expected `int` >= 1"),
    ([2, "id"], "../../etc", "matching regex"),
    ([2, "id"], "20000101-000000-abcdef", "does not name the time"),
    ([2, "user"], "ada\x1b[2J", r"'ada\\x1b\[2J' has characters that cannot be printed"),
    ([2, "priority"], "\u202e", "matching regex"),
    ([2, "fingerprint", "qnn"], "2\0", "matching regex"),
    ([2, "fingerprint"], {str(fact): "" for fact in range(10_001)}, "length <= 10000"),
    ([2, "started_ms"], 10**15, "Expected `int` <="),
    ([2, "devices", 0, "kind"], "phone", "Invalid enum value 'phone'"),
    ([2, "devices", 0, "serial"], "x" * 300, "length <= 256"),
    ([2, "surprise"], 1, "unknown field `surprise`"),
    ([3, "id"], "quantized_ops/conv2d[SM8750-htp-16a16w]", "suite, case and target make the job"),
    ([3, "version"], "v", "matching regex"),
    ([3, "bundle_key"], "../../x", "matching regex"),
    ([4, "build_seconds"], -1.0, "Expected `float` >= 0"),
    ([4, "operators", "aten.relu.default"], 2**31, "Expected `int` <="),
    ([6, "job"], "quantized_ops/gone[SM8650-htp-8a8w]", "which is no job of run"),
    ([6, "device"], 4, "names device 4, and run .* has 4, from 0"),
    ([6, "device"], -1, "Expected `int` >= 0"),
    ([6, "seconds"], "nan", "Expected `float`, got `str`"),
    ([6, "log"], "\0", "matching regex"),
    ([6, "reason"], "x" * 5000, "length <= 4000"),
    ([6, "digest"], "x", "matching regex"),
    ([7, "measurements", 0, "samples"], [0] * 2**22, "more than 4,194,304 values"),
    ([7, "measurements", 0, "samples", 0], "NaN", "Invalid enum value 'NaN'"),
    ([7, "measurements", 1, "samples", 0], 2**63, "Expected `int` <="),
    ([7, "measurements", 0, "metric"], "\x9b31m", "cannot be printed"),
    ([7, "comparisons", 0, "output"], 2**31, "Expected `int` <="),
    ([7, "operators", 0, "node"], "a\nb", "cannot be printed"),
    ([7, "artifacts", 0, "sha256"], "/" * 64, "matching regex"),
    ([7, "artifacts", 0, "size"], -5, "Expected `int` >= 0"),
]


def test_an_export_that_cannot_be_is_refused_with_the_number_of_its_line_and_changes_nothing(
    sqlite_store: Store, two_runs: bytes, tmp_path: Path
) -> None:
    exports = [(written(edited(two_runs, *place, to=value)), place[0], problem) for place, value, problem in IMPOSSIBLE]  # type: ignore[misc]
    whole = two_runs.splitlines(keepends=True)
    for dropped, line, problem in (
        (1, 1, "is no export of farm"),
        (2, 2, "belongs to no run"),
        (3, 5, "is another line: run .* has 3 jobs, the file 2 of them"),
        (9, 9, "is another line: run .* has 4 attempts, the file 3 of them"),
        (13, 12, "is the last line: run .* has 1 attempts, the file 0 of them"),
    ):
        exports.append((b"".join(whole[: dropped - 1] + whole[dropped:]), line, problem))
    head = b'{"kind":"farm-export","layout":1,"farm":"1"}\n'
    exports += [
        (b"", 1, "is no export of farm"),
        (b"\n", 1, "Input data was truncated"),
        (b"\xff\xfe", 1, "malformed"),
        (b"[" * 100_000, 1, ""),
        (head + b'{"kind":"run"', 2, "Input data was truncated"),
        (head + b"[]", 2, "Expected `object`, got `array`"),
        (b'{"kind":"farm-export","layout":7,"farm":"9","more":[]}', 1, "of a newer farm"),
    ]
    for data, number, problem in exports:
        with pytest.raises(
            UsageError, match=rf"export-0.jsonl:{number}: .*{problem}.*; nothing was imported"
        ) as caught:
            imported(sqlite_store, tmp_path, data)
        assert str(caught.value).isprintable(), problem
        assert len(str(caught.value)) < 1000, problem
    assert sqlite_store.transfer.runs() == []


def test_content_that_the_store_would_keep_otherwise_is_not_imported(
    store: Store, two_runs: bytes, tmp_path: Path
) -> None:
    make.begin(store, make.job())
    before = exported(store)
    for line, name, value in (
        (4, "module", "other:Case"),  # a case that is known otherwise
        (7, "artifacts", [{"sha256": "e" * 64, "size": 2**40, "kind": "etdump"}] * 2),
        (8, "digest", "f" * 64),  # an attempt twice
        (4, "position", 9),  # jobs in another order
    ):
        lines = edited(two_runs, line, name, to=value)
        lines[8]["digest"], lines[8]["job"] = "f" * 64, lines[7]["job"]
        with pytest.raises(UsageError, match="of this name with other content: not imported"):
            imported(store, tmp_path, written(lines))
        assert exported(store) == before


def test_the_longest_texts_that_a_store_keeps_can_be_imported(
    sqlite_store: Store, other: Store, tmp_path: Path
) -> None:
    job = make.job()
    run_id = make.begin(other, job)
    attempt = make.attempt(
        job, verdict=Verdict.FAILED, reason="r\0" * 10**5, log="\udcff" * 10**6, known_issue="k" * 10**5,
        notes=("n\0" * 10**4,) * 300, device="\udcff" * 1000,
        comparisons=(make.comparison(violations=("v" * 10**4,) * 300),),
        measurements=(Measurement("m\0" * 1000, "\udcff" * 100, Direction.LOWER, (1.0,)),),
        operators=(OperatorProfile("n" * 1000, "\udcff" * 1000, "u" * 100, 1, 1.0, 1.0, 1.0, 1.0),),
    )  # fmt: skip
    other.record_attempt(run_id, attempt)
    imported(sqlite_store, tmp_path, exported(other))
    assert said(sqlite_store, run_id) == said(other, run_id)


def test_a_counter_that_an_older_farm_took_for_better_one_way_or_for_exact_goes_on_in_its_series(
    sqlite_store: Store, other: Store, tmp_path: Path
) -> None:
    job = make.job()
    measured = (counted("delegated_ops", 72), counted("dsp_heap_difference", 4096))
    for hours, store in ((2, sqlite_store), (1, other)):
        make.run(store, hours, (job, Verdict.PASSED, {"measurements": measured}))
    data = exported(other)
    older = data.replace(b'"direction":"none"', b'"direction":"higher"').replace(b'"exact":false', b'"exact":true')
    assert older.count(b'"exact":true') == 2
    imported(sqlite_store, tmp_path, older)
    assert [point.direction for point in sqlite_store.history.points(job.id, "delegated_ops")] == ["none"] * 2
    heap = sqlite_store.history.points(job.id, "dsp_heap_difference")
    assert [(point.exact, point.value) for point in heap] == [(False, 4096.0)] * 2
