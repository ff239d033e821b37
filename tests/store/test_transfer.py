"""Runs go from one store into another as lines of JSON, and nothing else gets in."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from store_template import place_store

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
from farm.store.records import ArtifactRecord, RunRecord
from farm.store.store import Store, open_store
from farm.store.transfer.line_files import LineFile, import_runs, runs_in
from farm.store.transfer.lines import RunLine, encode
from farm.store.values import jsonable
from farm.store.view import SkipReason

if TYPE_CHECKING:
    from conftest import Make

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


def imported(store: Store, tmp_path: Path, *exports: bytes) -> tuple[list[RunLine], list[RunLine]]:
    files = []
    for number, data in enumerate(exports):
        path = tmp_path / f"export-{number}.jsonl"
        path.write_bytes(data)
        files.append(LineFile(str(path)))
    try:
        return import_runs(store.transfer, runs_in(files))
    finally:
        for file in files:
            file.__exit__(None, None, None)


def said(store: Store, run_id: str) -> bytes:
    # NaN is not equal to itself; its text is. SQLite has one zero in a column.
    view = jsonable(msgspec.to_builtins(store.runs.view(run_id)))
    return msgspec.json.encode(view, order="sorted").replace(b"-0.0", b"0.0")


def everything(store: Store, make: type[Make]) -> list[str]:
    """Record two runs, the first with something of all that a store keeps, the second with a failure beside it."""
    relu, conv, late = make.job(), make.job("conv2d", "16a16w"), make.job("softmax", soc="SM8750")
    facts = {"qnn": "2.51", "executorch": "1.5.1", "device_kind": "virtual"}
    run_id = store.begin_run(RunRecord("farm run --soc 'SM8650' \x1b[31m", "ada", "bench", facts, NIGHT, "nightly"))
    store.plan_jobs(run_id, [conv, relu, late])
    store.record_device(run_id, make.device())
    store.record_device(run_id, make.device("phone-1", "hardware", "google/x:15"))
    store.record_device(run_id, make.device("phone-1", "hardware", "google/x:14"))
    store.record_build(
        run_id, relu.id, seconds=0.1 + 0.2, cached=False, bundle_key="a" * 64, fallback_ops={"aten.sin": 2},
        operators={"aten.relu.default": 1},
    )  # fmt: skip
    store.record_build(run_id, conv.id, seconds=0.0, cached=True, bundle_key="c" * 64, fallback_ops={})
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
    failed = make.attempt(conv, verdict=Verdict.FAILED, stage=Stage.EXECUTE, reason="crash", started_ms=NIGHT + DAY)
    store.record_attempt(second, failed)
    store.finish_run(second, 1)
    return [run_id, second]


@pytest.mark.parametrize("into_the_same_kind", [True, False])
def test_runs_are_the_same_in_another_store(
    store: Store, other: Store, make: type[Make], tmp_path: Path, into_the_same_kind: bool
) -> None:
    source, target = (other, store) if into_the_same_kind else (store, other)
    run_ids = everything(source, make)
    data = exported(source)

    added, present = imported(target, tmp_path, data)

    assert ([run.id for run in added], present) == (run_ids, [])
    for run_id in run_ids:
        assert said(target, run_id) == said(source, run_id)
        assert target.runs.artifacts(run_id) == source.runs.artifacts(run_id)
        assert target.runs.verdicts(run_id) == source.runs.verdicts(run_id)
    assert str(target.history.points("*")) == str(source.history.points("*"))
    assert (
        target.profiles.newest("quantized_ops/relu")[0].artifacts
        == source.profiles.newest("quantized_ops/relu")[0].artifacts
    )
    hashes = [point.fingerprint for point in source.history.points("*")]
    assert target.history.fingerprints(hashes) == source.history.fingerprints(hashes)
    assert exported(target) == data


def test_names_of_outputs_go_into_another_store(sqlite_store: Store, make: type[Make], tmp_path: Path) -> None:
    job = make.job()
    run_id = make.begin(sqlite_store, job)
    written = make.comparison(output=1, name="input x as written")
    sqlite_store.record_attempt(run_id, make.attempt(job, comparisons=(make.comparison(name="[1].0"), written)))
    sqlite_store.finish_run(run_id, 0)
    data = exported(sqlite_store)
    with open_store(tmp_path / "other.db") as other:
        imported(other, tmp_path, data)
        [attempt] = other.runs.view(run_id).jobs[0].attempts
        assert [one.label for one in attempt.comparisons] == ["output [1].0", "input x as written"]
        assert exported(other) == data


def test_a_sample_of_an_export_is_json_that_any_tool_reads(sqlite_store: Store, make: type[Make]) -> None:
    run_ids = everything(sqlite_store, make)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in exported(sqlite_store).splitlines()]

    assert (lines[0]["kind"], lines[0]["layout"]) == ("farm-export", 4)
    kinds = [line["kind"] for line in lines[1:]]
    assert kinds == ["run", *["job"] * 3, *["attempt"] * 4, "run", *["job"] * 2, "attempt"]
    assert [line["id"] for line in lines if line["kind"] == "run"] == run_ids
    (numbers,) = [line for line in lines if line.get("known_issue")]
    latency, size = numbers["measurements"][:2]
    assert latency["samples"][:6] == [3.0, 0.1, -0.0, "inf", "-inf", "nan"]
    assert size["samples"] == [2**53 + 1, 2**53 - 1, 2**63 - 1, -(2**63)]
    assert numbers["comparisons"][0]["sqnr_db"] == "inf"
    assert numbers["comparisons"][0]["mismatch"] is None
    assert lines[1]["devices"][numbers["device"]]["build"] == "google/x:14"


def test_an_import_twice_adds_nothing(store: Store, other: Store, make: type[Make], tmp_path: Path) -> None:
    first, second = everything(other, make)
    imported(store, tmp_path, exported(other, first))
    before = exported(store)

    added, present = imported(store, tmp_path, exported(other), exported(other, second))

    assert ([run.id for run in added], [run.id for run in present]) == ([second], [first])
    assert exported(store, first) == before
    again = imported(store, tmp_path, exported(other) + exported(other))
    assert ([], [first, second]) == (again[0], [run.id for run in again[1]])
    assert len(store.runs.view(first).jobs[1].attempts) == 3


def test_how_the_lines_are_written_does_not_matter(
    sqlite_store: Store, other: Store, make: type[Make], tmp_path: Path
) -> None:
    everything(other, make)
    data = exported(other)

    def rewritten(line: bytes) -> bytes:
        members = list(json.loads(line).items())
        return json.dumps(dict(reversed(members)), indent=None, separators=(" , ", " : ")).encode() + b"\r\n"

    imported(sqlite_store, tmp_path, b"".join(map(rewritten, data.splitlines())))

    assert exported(sqlite_store) == data


def test_a_run_that_is_another_than_the_one_of_its_id_is_refused(
    store: Store, other: Store, make: type[Make], tmp_path: Path
) -> None:
    _, second = everything(other, make)
    data = exported(other, second)
    imported(store, tmp_path, data)
    before = exported(store)
    changed = data.replace(b'"reason":"crash"', b'"reason":"hang"')

    with pytest.raises(
        UsageError, match=rf"export-0.jsonl:2: run {second}: the store has another.*nothing was"
    ) as caught:
        imported(store, tmp_path, changed)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="occurs twice with different content"):
        imported(other, tmp_path, data, changed)

    assert exported(store) == before


def test_an_unfinished_run_goes_over_as_it_stands(store: Store, other: Store, make: type[Make], tmp_path: Path) -> None:
    job = make.job()
    run_id = make.begin(other, job)
    imported(store, tmp_path, exported(other))
    assert (store.runs.view(run_id).finished_ms, store.runs.view(run_id).jobs[0].attempts) == (None, ())
    other.record_attempt(run_id, make.attempt(job))
    with pytest.raises(UsageError, match="or another state of this one: not imported"):
        imported(store, tmp_path, exported(other))


@pytest.mark.parametrize("address", ["postgresql"], indirect=True)
def test_a_transaction_does_not_stand_still_while_lines_are_made_or_read(
    address: str, other: Store, make: type[Make], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(0.2)
            return function(*arguments)

        return call

    run_id, _ = everything(other, make)
    path = tmp_path / "export.jsonl"
    path.write_bytes(exported(other, run_id))
    with (
        open_store(f"{address}&options=-c idle_in_transaction_session_timeout%3D500ms") as store,
        LineFile(str(path)) as file,
    ):
        [found] = runs_in([file])
        monkeypatch.setattr("farm.store.transfer.runs.encode", slowly(encode))
        assert store.transfer.add(lambda: map(slowly(lambda line: line), found.lines()), found.digest)
        assert exported(store, run_id) == path.read_bytes()


def test_the_newest_result_is_that_of_the_newest_run_not_of_the_last_import(
    store: Store, other: Store, make: type[Make], tmp_path: Path
) -> None:
    job, facts = make.job(), {"device_kind": "virtual"}

    def run(into: Store, day: int, verdict: Verdict) -> str:
        run_id = into.begin_run(RunRecord("farm run", "ada", "bench", facts, NIGHT + day * DAY))
        into.plan_jobs(run_id, [job])
        attempt = make.attempt(job, verdict=verdict, started_ms=NIGHT + day * DAY, seconds=float(day))
        into.record_attempt(run_id, attempt, make.device())
        return run_id

    older = run(other, 0, Verdict.FAILED)
    newer = run(store, 1, Verdict.PASSED)

    imported(store, tmp_path, exported(other))

    assert store.runs.latest_id() == newer
    assert [point.run_id for point in store.history.points(job.id)] == [older, newer]
    assert [found.result.run_id for found in store.status.job_results([job.id])] == [newer]
    assert store.selection.failed_last([job.id], "virtual", "ada") == set()
    assert store.selection.expected([job.id], "virtual")[job.id].last.run_id == newer


@pytest.fixture(scope="module")
def two_runs(make: type[Make], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Export of two runs."""
    path = tmp_path_factory.mktemp("two_runs") / "farm.db"
    place_store(path)
    with open_store(path) as store:
        everything(store, make)
        return exported(store)


@pytest.fixture
def lines(two_runs: bytes) -> list[dict[str, Any]]:
    """Lines of the export of two runs, to be changed."""
    return [json.loads(line) for line in two_runs.splitlines()]


def written(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def change(line: int, *path: str | int, to: Any) -> Callable[[list[dict[str, Any]]], None]:
    """Return a function that changes one place of one line."""

    def apply(lines: list[dict[str, Any]]) -> None:
        place: Any = lines[line - 1]
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = to

    return apply


def drop(line: int) -> Callable[[list[dict[str, Any]]], None]:
    def apply(lines: list[dict[str, Any]]) -> None:
        del lines[line - 1]

    return apply


# Lines: 1 the head, 2 a run, 3 to 5 its jobs (conv2d, relu, softmax), 6 to 9 its attempts, 10 the second run.
@pytest.mark.parametrize(
    ("edit", "line", "problem"),
    [
        (change(1, "layout", to=5), 1, r"of a newer farm \(layout 5, this one knows 4\): update farm"),
        (change(1, "layout", to=0), 1, "Expected `int` >= 1"),
        (change(1, "kind", to="pizza"), 1, "Invalid value 'pizza'"),
        (drop(1), 1, "is no export of farm"),
        (drop(2), 2, "belongs to no run"),
        (drop(3), 5, "is another line: run .* has 3 jobs, the file 2 of them"),
        (drop(9), 9, "is another line: run .* has 4 attempts, the file 3 of them"),
        (drop(13), 12, "is the last line: run .* has 1 attempts, the file 0 of them"),
        (change(2, "id", to="../../etc"), 2, "matching regex"),
        (change(2, "id", to="20000101-000000-abcdef"), 2, "does not name the time"),
        (change(2, "user", to="ada\x1b[2J"), 2, r"'ada\\x1b\[2J' has characters that cannot be printed"),
        (change(2, "priority", to="\u202e"), 2, "matching regex"),
        (change(2, "fingerprint", "qnn", to="2\0"), 2, "matching regex"),
        (change(2, "fingerprint", "qnn", to=2.51), 2, "Expected `str`, got `float`"),
        (change(2, "started_ms", to=10**15), 2, "Expected `int` <="),
        (change(2, "jobs", to=-1), 2, "Expected `int` >= 0"),
        (change(2, "devices", 0, "kind", to="phone"), 2, "Invalid enum value 'phone'"),
        (change(2, "devices", 0, "serial", to="x" * 300), 2, "length <= 256"),
        (change(2, "surprise", to=1), 2, "unknown field `surprise`"),
        (change(3, "id", to="quantized_ops/conv2d[SM8750-htp-16a16w]"), 3, "suite, case and target make the job"),
        (change(3, "soc", to="SM8750"), 3, "suite, case and target make the job"),
        (change(3, "version", to="v"), 3, "matching regex"),
        (change(3, "bundle_key", to="../../x"), 3, "matching regex"),
        (change(4, "build_seconds", to=-1.0), 4, "Expected `float` >= 0"),
        (change(4, "operators", "aten.relu.default", to=2**31), 4, "Expected `int` <="),
        (change(5, "skipped", "reason", to=None), 5, "Expected `str`, got `null`"),
        (change(6, "job", to="quantized_ops/gone[SM8650-htp-8a8w]"), 6, "which is no job of run"),
        (change(6, "device", to=4), 6, "names device 4, and run .* has 4, from 0"),
        (change(6, "device", to=-1), 6, "Expected `int` >= 0"),
        (change(6, "verdict", to="maybe"), 6, "Invalid enum value 'maybe'"),
        (change(6, "seconds", to="nan"), 6, "Expected `float`, got `str`"),
        (change(6, "log", to="\0"), 6, "matching regex"),
        (change(6, "reason", to="x" * 5000), 6, "length <= 4000"),
        (change(6, "digest", to="x"), 6, "matching regex"),
        (change(2, "fingerprint", to={str(fact): "" for fact in range(10_001)}), 2, "length <= 10000"),
        (change(7, "measurements", 0, "samples", to=[0] * 2**22), 7, "more than 4,194,304 values"),
        (change(7, "measurements", 0, "samples", 0, to="NaN"), 7, "Invalid enum value 'NaN'"),
        (change(7, "measurements", 0, "samples", 0, to=None), 7, "got `null`"),
        (change(7, "measurements", 1, "samples", 0, to=2**63), 7, "Expected `int` <="),
        (change(7, "measurements", 0, "metric", to="\x9b31m"), 7, "cannot be printed"),
        (change(7, "comparisons", 0, "output", to=2**31), 7, "Expected `int` <="),
        (change(7, "operators", 0, "node", to="a\nb"), 7, "cannot be printed"),
        (change(7, "layers", 0, "step", to="none"), 7, "Invalid enum value"),
        (change(7, "artifacts", 0, "sha256", to="/" * 64), 7, "matching regex"),
        (change(7, "artifacts", 0, "size", to=-5), 7, "Expected `int` >= 0"),
    ],
)
def test_a_line_that_cannot_be_is_refused_with_its_number_and_changes_nothing(
    sqlite_store: Store, lines: list[dict[str, Any]], tmp_path: Path, edit: Any, line: int, problem: str
) -> None:
    edit(lines)
    with pytest.raises(UsageError, match=rf"export-0.jsonl:{line}: .*{problem}.*; nothing was imported") as caught:
        imported(sqlite_store, tmp_path, written(lines))
    assert str(caught.value).isprintable()
    assert sqlite_store.transfer.runs() == []


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "is no export of farm"),
        (b"\n", "Input data was truncated"),
        (b"\xff\xfe", "malformed"),
        (b"[" * 100_000, ":1: "),
        (b'{"kind":"farm-export","layout":1,"farm":"1"}\n{"kind":"run"', ":2: Input data was truncated"),
        (b'{"kind":"farm-export","layout":1,"farm":"1"}\n[]', "Expected `object`, got `array`"),
        (b'{"kind":"farm-export","layout":7,"farm":"9","more":[]}', "of a newer farm"),
    ],
)
def test_what_is_no_export_is_refused(sqlite_store: Store, tmp_path: Path, data: bytes, problem: str) -> None:
    with pytest.raises(UsageError, match=problem) as caught:
        imported(sqlite_store, tmp_path, data)
    assert len(str(caught.value)) < 1000


def test_an_export_of_no_run_holds_no_run(sqlite_store: Store, tmp_path: Path) -> None:
    assert imported(sqlite_store, tmp_path, exported(sqlite_store)) == ([], [])


@pytest.mark.parametrize(
    "edit",
    [
        change(4, "module", to="other:Case"),
        change(7, "artifacts", 1, to={"sha256": "e" * 64, "size": 2**40, "kind": "etdump"}),
        change(8, "digest", to="f" * 64),
        change(4, "position", to=9),
    ],
    ids=["a case that is known otherwise", "a file twice", "an attempt twice", "jobs in another order"],
)
def test_what_the_store_would_keep_otherwise_is_not_imported(
    store: Store, lines: list[dict[str, Any]], make: type[Make], tmp_path: Path, edit: Any
) -> None:
    make.begin(store, make.job())
    before = exported(store)
    lines[8]["digest"], lines[8]["job"] = "f" * 64, lines[7]["job"]
    edit(lines)
    with pytest.raises(UsageError, match="otherwise: not imported"):
        imported(store, tmp_path, written(lines))
    assert exported(store) == before


def test_the_longest_texts_that_a_store_keeps_can_be_imported(
    store: Store, other: Store, make: type[Make], tmp_path: Path
) -> None:
    job = make.job()
    run_id = make.begin(other, job)
    attempt = make.attempt(
        job, verdict=Verdict.FAILED, reason="r\0" * 10**5, log="\udcff" * 10**6, known_issue="k" * 10**5,
        notes=("n\0" * 10**5,) * 300, device="\udcff" * 1000,
        comparisons=(make.comparison(violations=("v" * 10**5,) * 300),),
        measurements=(Measurement("m\0" * 1000, "\udcff" * 100, Direction.LOWER, (1.0,)),),
        operators=(OperatorProfile("n" * 1000, "\udcff" * 1000, "u" * 100, 1, 1.0, 1.0, 1.0, 1.0),),
    )  # fmt: skip
    other.record_attempt(run_id, attempt)
    imported(store, tmp_path, exported(other))
    assert said(store, run_id) == said(other, run_id)


def test_a_counter_that_an_older_farm_took_for_better_one_way_or_for_exact_goes_on_in_its_series(
    sqlite_store: Store, other: Store, make: type[Make], tmp_path: Path
) -> None:
    job = make.job()
    for store in (sqlite_store, other):
        run_id = make.begin(store, job)
        measured = (counted("delegated_ops", 72), counted("dsp_heap_difference", 4096))
        store.record_attempt(run_id, make.attempt(job, measurements=measured))
    data = exported(other)
    older = data.replace(b'"direction":"none"', b'"direction":"higher"').replace(b'"exact":false', b'"exact":true')
    assert older.count(b'"exact":true') == 2
    imported(sqlite_store, tmp_path, older)
    [now, before] = [point.direction for point in sqlite_store.history.points(job.id, "delegated_ops")]
    assert (now, before) == ("none", "none")
    heap = sqlite_store.history.points(job.id, "dsp_heap_difference")
    assert [(point.exact, point.value) for point in heap] == [(False, 4096.0)] * 2


def test_numbers_may_be_written_in_other_ways(
    sqlite_store: Store, other: Store, make: type[Make], tmp_path: Path
) -> None:
    job = make.job()
    run_id = make.begin(other, job)
    rows = (make.latency(3.0), Measurement("size", "bytes", Direction.LOWER, (7, 9), exact=True))
    halves = Measurement("half", "1", Direction.LOWER, (7.0, 0.5), exact=True)
    other.record_attempt(run_id, make.attempt(job, measurements=(*rows, halves), seconds=2.0))
    data = exported(other)
    ways = data.replace(b"[3.0]", b"[3]").replace(b"[7,9]", b"[7.0,9e0]").replace(b"[7.0,0.5]", b"[7,5e-1]")
    ways = ways.replace(b'"seconds":2.0', b'"seconds":2')
    assert ways.count(b"[3]") == ways.count(b"9e0") == ways.count(b"5e-1") == ways.count(b'"seconds":2,') == 1
    imported(sqlite_store, tmp_path, ways)
    assert exported(sqlite_store) == data


def test_every_number_comes_over_to_its_last_bit(
    sqlite_store: Store, other: Store, make: type[Make], tmp_path: Path
) -> None:
    job = make.job()
    run_id = make.begin(other, job)
    samples = [
        math.nextafter(1.0, 2.0),
        2**-1074,
        1e23,
        9007199254740993.0,
        0.1 + 0.2,
        -1 / 3,
        1e-7,
        123456789.123456789,
    ]
    other.record_attempt(run_id, make.attempt(job, measurements=(make.latency(*samples),), seconds=samples[4]))
    imported(sqlite_store, tmp_path, exported(other))
    (attempt,) = sqlite_store.runs.view(run_id).jobs[0].attempts
    assert attempt.measurements[0].samples == tuple(samples)
    assert attempt.seconds == samples[4]
    assert msgspec.json.encode(sqlite_store.history.points("*")) == msgspec.json.encode(other.history.points("*"))
