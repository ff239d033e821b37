"""`farm perf confirm`: measured pairs, runs and factors without a device, and as a user calls it on the simulator."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest
from attached import attach
from farm_home import FarmHome, wait_for_no_process
from planted import JOB, Planted, write_suite

from farm.base.errors import UnknownNameError, UsageError
from farm.devices.virtual.faults import Fault, inject
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
from farm.numbers.regressions.paired_test import (
    Claim,
    MeasuredPairs,
    Probe,
    Swaps,
    compare,
    first_bad,
    series_of,
    swap_factors,
    worse,
)
from farm.numbers.regressions.remeasure import of_one_bundle
from farm.numbers.regressions.stored_pairs import require_comparable
from farm.replay.stored_result import StoredResult
from farm.results.analysis.attribution import MOST_PROBES, AttributionKind, Bracket, Factor
from farm.results.analysis.confirmation import Answer, Confirmation, Pair
from farm.results.analysis.statistics import GATES, Scale, Series
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.records import JobView, RunView
from farm.store.store import Store, open_store

# How long pairs are measured, which old runs are run again, and which factors are swapped: without a device.


CASE = "suite/case[SM8650-htp-8a8w]"
CYCLES = Series(CASE, "htp_cycles", "cycles", Direction.LOWER)


class StubSide(msgspec.Struct, frozen=True):
    """Side of a comparison with its time on the stub."""

    factor: float
    failure: str = ""
    place: str = ""
    runtime: None = None
    is_whole: bool = True
    heap: bool = False
    luck: float = 1.0
    """Factor of its time in a process shared with other programs."""
    key: str = ""


class StubBench:
    """Stub of a device: bundles take a given time with some noise, and requests are counted."""

    def __init__(self, bundles: dict[str, StubSide], noise: float = 0.005, seed: int = 0) -> None:
        self.bundles, self.noise = bundles, noise
        self.turns: list[object] = []
        self.pairs = 0
        self.measured: list[tuple[StubSide, StubSide]] = []
        self.asked: list[tuple[int, int, bool, bool]] = []
        """For each call: number of the first pair, number of pairs, a new process, a new process per pair."""
        self._random = np.random.default_rng(seed)

    def side(self, past: StoredResult) -> StubSide:
        key = past.attempt.bundle_key
        if key not in self.bundles:
            raise UsageError(f"the bundle {key} is no longer in the cache")
        return self.bundles[key]

    def measure(self, good: StubSide, new: StubSide, pairs: int, inferences: int, **how: Any) -> dict[str, list[Pair]]:
        fresh = how.get("fresh", False)
        self.measured.append((good, new))
        self.asked.append((how.get("begin", 0), pairs, how.get("renew", False), fresh))
        if good.failure or new.failure:
            return {}
        self.pairs += pairs
        times = [one.factor * (1.0 if fresh else one.luck) for one in (good, new)]
        was, now = ([self._samples(time, inferences) for _ in range(pairs)] for time in times)
        return {"htp_cycles": list(zip(was, now, strict=True))}

    def problems(self, good: StubSide, new: StubSide, **_: object) -> tuple[str, ...]:
        sides = {"good": good.failure, "new": new.failure}
        return tuple(f"{role}: {failure}" for role, failure in sides.items() if failure)

    def _samples(self, factor: float, count: int) -> tuple[float, ...]:
        return tuple(1e6 * factor * np.exp(self.noise * self._random.standard_normal(count)))


def bench_of(stub: StubBench) -> InterleavedBench:
    return cast("InterleavedBench", stub)


def past(number: int, key: str, *, kind: str = "virtual", version: str = "v1") -> StoredResult:
    """The result of run `number`."""
    measured = [
        Measurement(metric, unit, Direction.LOWER, (1.0,), exact=unit == "bytes")
        for metric, unit in (("latency", "ns"), ("htp_cycles", "cycles"), ("pte_size", "bytes"))
    ]
    attempt = Attempt(CASE, Verdict.PASSED, Stage.DONE, "", device="d", bundle_key=key, measurements=tuple(measured))
    view = JobView(CASE, "suite", "case", "SM8650", "htp", "8a8w", (attempt,), case_version=version, decisive_attempt=1)
    run = RunView(f"run-{number:02}", "farm run", number, None, None, "", "", {}, (), (view,))
    return StoredResult(run, view, attempt, 1, kind, {})


def confirm_keys(stub: StubBench, good: str, new: str, **more: Any) -> Confirmation:
    return compare(bench_of(stub), [Claim(CYCLES, True)], past(0, good), past(1, new), **more)[0].confirmation


def stub_of(luck: float = 1.0, noise: float = 0.005, seed: int = 0, **factors: float) -> StubBench:
    """Return a bench of bundles by their factors; `luck` is of b."""
    sides = {key: StubSide(factor, luck=luck if key == "b" else 1.0) for key, factor in factors.items()}
    return StubBench(sides, noise, seed)


def test_a_bundle_that_was_compiled_anew_to_another_program_is_no_proof_that_it_was_the_night() -> None:
    def compiled(number: int, program: str) -> StoredResult:
        one = past(number, "a")
        return msgspec.structs.replace(one, view=msgspec.structs.replace(one.view, program=program))

    assert of_one_bundle(past(0, "a"), past(1, "a")).answer is Answer.REFUTED
    same, other = (of_one_bundle(compiled(0, "x"), compiled(1, program)) for program in "xy")
    assert (same.answer, same.reason.partition(":")[0]) == (Answer.REFUTED, "the program equals that of run-00")
    assert (other.answer, "compiled anew since, to another program" in other.reason) == (Answer.UNKNOWN, True)


def test_ten_pairs_are_enough_where_they_tell() -> None:
    stub = stub_of(a=1.0, b=1.08)
    output = confirm_keys(stub, "a", "b")
    assert (output.answer, stub.pairs) == (Answer.CONFIRMED, 20), "ten, and ten in new processes"
    assert output.low < math.log(1.08) < output.high
    assert {confirm_keys(stub, good, "a").answer for good in "ab"} == {Answer.REFUTED}
    assert stub.pairs == 40


@pytest.mark.parametrize(("early", "pairs"), [(True, 4), (False, 10)])
def test_a_clearly_refuted_change_is_measured_no_longer(early: bool, pairs: int) -> None:
    stub = stub_of(a=1.0, b=1.001)
    output = confirm_keys(stub, "a", "b", early=early)
    assert (output.answer, stub.pairs) == (Answer.REFUTED, pairs)
    assert f" in {pairs} pairs" in output.reason


def test_luck_that_stays_with_a_process_is_not_confirmed() -> None:
    stub = stub_of(luck=1.06, a=1.0, b=1.0)
    output = confirm_keys(stub, "a", "b")
    assert output.answer is Answer.REFUTED
    assert "in one process, but" in output.reason
    assert "in new ones" in output.reason
    assert abs(output.change) < 0.01
    assert stub.asked == [(0, 10, False, False), (0, 10, False, True)]


def test_an_unknown_change_is_measured_once_more_and_all_pairs_count() -> None:
    stub = stub_of(noise=0.2, seed=3, a=1.0, b=1.03)
    output = confirm_keys(stub, "a", "b", pairs=6)
    assert (output.answer, output.pairs, stub.pairs) == (Answer.UNKNOWN, 12, 12)
    # The second six are of another process, in which the new program is loaded first.
    assert stub.asked == [(0, 6, False, False), (7, 6, True, False)]


def test_a_side_that_fails_is_told_and_not_asked_again() -> None:
    stub = StubBench({"a": StubSide(1.0), "b": StubSide(1.0, "execute: it crashed: SIGSEGV")})
    [one] = compare(bench_of(stub), [Claim(CYCLES, up=True)], past(0, "a"), past(1, "b"))
    assert (one.confirmation.answer, one.pairs, len(stub.measured)) == (Answer.UNKNOWN, (), 1)
    assert one.confirmation.reason == "new: execute: it crashed: SIGSEGV"


class TestFirstBad:
    KEYS = ("a", "a", "b", "c", "d", "d", "e", "e")
    FACTORS: ClassVar = {"a": 1.0, "b": 1.001, "c": 1.002, "d": 1.081, "e": 1.08}

    def find(
        self, runs: list[StoredResult | None], stub: StubBench, values: list[float] | None = None
    ) -> tuple[Bracket, list[Probe]]:
        answer: list[Probe] = []
        values = values or [1e6] * 4 + [1.08e6] * (len(runs) - 4)
        bracket = Bracket(0, len(runs) - 1)
        change = math.log(1.08)
        return first_bad(bench_of(stub), CYCLES, runs, values, bracket, change, on_probe=answer.append), answer

    def test_it_is_found_with_few_measurements(self) -> None:
        stub = stub_of(**self.FACTORS)
        bracket, answer = self.find([past(n, key) for n, key in enumerate(self.KEYS)], stub)
        assert (bracket.good, bracket.bad, bracket.exact) == (3, 4, True)
        assert [begin for begin, *_ in stub.asked].count(0) == len([one for one in answer if one.confirmation]) == 2
        assert all(fresh for *_, fresh in stub.asked), "luck of a process would name another run"

    def test_a_bundle_that_is_known_is_not_measured(self) -> None:
        stub = stub_of(a=1.0, e=1.08)
        bracket, answer = self.find([past(n, "aaaaeeee"[n]) for n in range(8)], stub)
        assert (bracket.good, bracket.bad, stub.measured) == (3, 4, [])
        assert {probe.reason for probe in answer} == {"the same bundle as in a measured run"}

    def test_a_bundle_that_is_gone_leaves_a_range(self) -> None:
        stub = StubBench({key: StubSide(self.FACTORS[key]) for key in "abe"})
        runs = [past(n, key) if n != 3 else None for n, key in enumerate(self.KEYS)]
        bracket, answer = self.find(runs, stub)
        assert (bracket.good, bracket.bad, bracket.open) == (2, 6, {3, 4, 5})
        reasons = {probe.number: probe.reason for probe in answer}
        assert reasons[3] == "its bundle is gone"
        assert "the bundle d is no longer in the cache" in reasons[4]

    def test_equal_outputs_that_differ_later_are_found_by_halves(self) -> None:
        series = Series(CASE, "htp_cycles", "dB", Direction.HIGHER)
        stub = StubBench({key: StubSide(math.inf if key in "abcd" else 60.0) for key in "abcdefgh"})
        values = [math.inf] * 4 + [60.0] * 4
        runs = [past(n, key) for n, key in enumerate("abcdefgh")]
        bracket = first_bad(bench_of(stub), series, runs, values, Bracket(0, 7), -math.inf)
        assert (bracket.good, bracket.bad, bracket.exact) == (3, 4, True)

    def test_there_is_an_end_to_it(self) -> None:
        keys = [f"k{number}" for number in range(40)]
        ends = {"k0": StubSide(1.0), "k39": StubSide(1.08)}
        stub = StubBench({key: StubSide(1.08, "execute: it crashed") for key in keys} | ends)
        bracket, answer = self.find([past(n, key) for n, key in enumerate(keys)], stub, [1e6] * 40)
        assert (bracket.exact, sum(bool(probe.confirmation) for probe in answer)) == (False, MOST_PROBES)

    def test_without_the_good_bundle_there_is_nothing_to_compare_with(self) -> None:
        with pytest.raises(UsageError, match="the good run's bundle is gone"):
            self.find([None, past(1, "a")], StubBench({}), [1.0, 1.0])


class TestFactors:
    def swap(self, whole: float, alone: dict[Factor, float]) -> Any:
        swaps = Swaps(
            cast("Side", StubSide(1.0)),
            cast("Side", StubSide(whole)),
            {factor: cast("Side", StubSide(level)) for factor, level in alone.items()},
            {},
        )
        stub = StubBench({})
        output = swap_factors(bench_of(stub), Claim(CYCLES, True), swaps)
        return output, stub

    def test_the_cause_is_named_with_its_size(self) -> None:
        output, stub = self.swap(1.1, {Factor.PROGRAM: 1.0, Factor.RUNTIME: 1.1})
        assert (output.explanation.kind, output.explanation.causes) == (AttributionKind.FACTOR, (Factor.RUNTIME,))
        assert output.alone[Factor.RUNTIME].low < math.log(1.1) < output.alone[Factor.RUNTIME].high
        assert len(stub.measured) == 3

    def test_one_factor_alone_is_the_whole_and_measured_once(self) -> None:
        output, stub = self.swap(1.1, {Factor.SDK: 1.1})
        assert (output.explanation.causes, len(stub.measured)) == ((Factor.SDK,), 1)


def test_only_numbers_of_one_test_on_one_kind_are_compared() -> None:
    require_comparable(past(1, "a"), past(2, "b"))
    for good, new, output in (
        (past(2, "a"), past(1, "b"), "run run-02 is newer than run run-01"),
        (past(1, "a", kind="hardware"), past(2, "b"), "was on a hardware device and run run-02 on a virtual one"),
        (past(1, "a", version="v0"), past(2, "b"), r"another test in run run-02 .* \(version v0, now v1\)"),
    ):
        with pytest.raises(UsageError, match=output):
            require_comparable(good, new)


def test_metrics_that_need_pairs() -> None:
    assert [one.metric for one in series_of(past(0, "a"), past(1, "b"))] == ["htp_cycles"]
    assert [one.metric for one in series_of(past(0, "a"), past(1, "b"), ["latency", "latency"])] == ["latency"]
    with pytest.raises(UnknownNameError, match="did you mean 'latency'"):
        series_of(past(0, "a"), past(1, "b"), ["latenzy"])
    with pytest.raises(UsageError, match="is deterministic"):
        series_of(past(0, "a"), past(1, "b"), ["pte_size"])
    assert worse(Series("", "sqnr", "dB", Direction.HIGHER)).up is False


def test_numbers_of_one_program_are_measured_by_the_same_pairs() -> None:
    stub = StubBench({"a": StubSide(1.0, key="a"), "b": StubSide(1.08, key="b")})
    measured: MeasuredPairs = {}
    for series in (CYCLES, CYCLES):
        [one] = compare(
            bench_of(stub), [Claim(series, True)], past(0, "a"), past(1, "b"), early=True, measured=measured
        )
        assert one.confirmation.answer is Answer.CONFIRMED
    assert stub.pairs == 20
    # A number that these pairs have not is measured by others.
    latency = Claim(msgspec.structs.replace(CYCLES, metric="latency", unit="ns"), True)
    compare(bench_of(stub), [latency], past(0, "a"), past(1, "b"), early=True, measured=measured)
    assert stub.pairs > 20


# `farm perf confirm` as a user calls it: a slower compiler is found, on the real simulator.


@pytest.fixture(scope="module")
def planted(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Planted:
    """Home with the planted suite, before its first run."""
    folder = tmp_path_factory.mktemp("planted")
    return Planted(FarmHome.make(farm_cache, folder), folder, write_suite(folder / "planted"))


@pytest.fixture(scope="module")
def good(planted: Planted) -> str:
    return planted.run()


@pytest.fixture(scope="module")
def again(planted: Planted, good: str) -> str:
    """Run of programs by the same release."""
    del good
    return planted.run()


@pytest.fixture(scope="module")
def twice(planted: Planted, again: str) -> str:
    """Run of programs by a release that does twice the work, a difference visible on a busy machine as well."""
    del again
    return planted.run(12)


@pytest.fixture
def store(planted: Planted, good: str) -> Iterator[Store]:
    assert good
    with open_store(f"sqlite:///{planted.home.state / 'farm.db'}", readonly=True) as store:
        yield store


@pytest.mark.whole
def test_a_slower_compiler_is_confirmed(planted: Planted, again: str, twice: str, store: Store) -> None:
    before = store.history.points(JOB)
    answer = planted.json("perf", "confirm", "planted/*", code=3)
    assert (answer["job"], answer["good"]["run"], answer["new"]["run"]) == (JOB, again, twice)
    assert answer["differences"].pop("torchao") == ["0.18.0", "0.18.12"]
    # Python imports the hook that plants the layers at its start.
    assert set(answer["differences"]) == {"packages_content"}
    [one] = answer["metrics"]
    output = one["confirmation"]
    assert (one["metric"], output["answer"]) == ("htp_cycles", "confirmed")
    # A second ten pairs are measured if the first ten give no answer, on a very busy machine.
    assert output["pairs"] in (10, 20)
    assert GATES[Scale.RATIO].confirmed < output["change"]
    assert output["low"] < output["change"] < output["high"]
    # The simulator's cycles are wall time: beside other work the longer program loses the processor more often, and the
    # least times alone have the ratio of the programs.
    good, new = (min(cycles for pair in one["pairs"] for cycles in pair[side]) for side in (0, 1))
    assert math.log(new / good) == pytest.approx(math.log(2.0), abs=0.2)
    inferences = [(len(was), len(now)) for was, now in one["pairs"]]
    # The number of inferences in added pairs follows from the noise of the first pairs.
    assert len(inferences) == output["pairs"]
    assert inferences[:10] == [(5, 5)] * 10
    assert all(was == now >= 5 for was, now in inferences)
    assert (answer["attribution"]["guilt"], answer["attribution"]["axes"]) == ("axis", ["program"])
    roles = [turn["role"] for turn in answer["turns"] if turn["pair"] >= 0]
    assert roles[:8] == ["good", "new", "new", "good"] * 2
    assert store.history.points(JOB) == before
    assert store.leases.all() == []
    assert wait_for_no_process(planted.home) == {}


# Enough pairs to make the gate of 2 % several times the chance error of the estimate, also on a busy machine.
MANY = ("--pairs", "16", "--inferences", "20")


@pytest.mark.whole
def test_a_side_whose_numbers_are_wrong_has_no_pairs(planted: Planted, good: str, twice: str) -> None:
    plan = planted.home.state / "runs" / twice / "intent.json"
    kept = plan.read_text()
    assert '"sqnr_db":20.0' in kept
    plan.write_text(kept.replace('"sqnr_db":20.0', '"sqnr_db":200.0'))
    done = planted.home.farm("perf", "confirm", JOB, "--good", good, "--bad", twice, code=0)
    plan.write_text(kept)
    assert "htp_cycles: new: numerics: " in done.stdout
    assert "unknown" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


@pytest.mark.whole
def test_ctrl_c_leaves_nothing(planted: Planted, good: str, twice: str) -> None:
    with planted.home.running("perf", "confirm", JOB, "--good", good, "--bad", twice, "--pairs", "1000") as process:
        assert process.stdout is not None
        while "measuring 1000 pairs" not in (line := process.stdout.readline()):
            assert line
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    assert wait_for_no_process(planted.home) == {}


@pytest.mark.whole
def test_the_first_bad_run_and_its_changes_are_found(planted: Planted, good: str, again: str, twice: str) -> None:
    done = planted.home.farm("perf", "bisect", JOB, "--good", good, "--bad", twice, code=3)
    lines = done.stdout.splitlines()
    assert lines[0] == f"{again} good: the same bundle as in a measured run"
    assert lines[lines.index(f"last good: {again}") + 1] == f"first bad: {twice}"
    assert "exact: there is no other result between them" in lines
    assert "differs: torchao: 0.18.0 -> 0.18.12" in lines
    assert not any("executorch" in line for line in lines)
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.usefixtures("twice")
@pytest.mark.whole
def test_where_there_is_no_step_none_is_looked_for(planted: Planted, good: str, again: str) -> None:
    answer = planted.json("perf", "bisect", JOB, "--good", good, "--bad", again, *MANY, code=0)
    assert (answer["found"], answer["probes"], answer["first_bad"]) == (False, [], None)
    assert [one["run"] for one in answer["runs"]] == [good, again]
    assert "is both ends" in planted.home.farm("perf", "bisect", JOB, "--good", good, "--bad", good, code=2).stderr
    assert "has no result before run" in planted.home.farm("perf", "confirm", JOB, "--bad", good, code=7).stderr


@pytest.mark.whole
def test_without_a_bundle_the_nearest_run_with_one_is_named(planted: Planted, twice: str, tmp_path: Path) -> None:
    home = planted.home.without("bundles", folder=tmp_path / "cache")
    later = planted.run(12)
    asked = ("perf", "confirm", JOB, "--good", twice, "--bad", later, "--pairs", "5")
    key = planted.json(*asked, code=None)["good"]["bundle"]
    found = next(path for path in (planted.home.cache / "bundles").rglob("*") if path.name == key)
    place = home.cache / found.relative_to(planted.home.cache)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(found, place)
    code = planted.suite / "nets.py"
    before = code.read_text()
    code.write_text(before + "# changed\n")
    done = home.farm("perf", "confirm", JOB, "--bad", later, code=7)
    code.write_text(before)
    assert "is no longer in the cache" in done.stderr
    assert "the nearest run whose bundle is here is " in done.stderr


@pytest.mark.whole
class TestAxes:
    def test_a_kept_runner_is_swapped_and_a_gone_one_named(
        self, planted: Planted, good: str, twice: str, tmp_path: Path
    ) -> None:
        """Both runs are of one bundle; the earlier one had another build of the runner."""
        del twice
        state = tmp_path / "state"
        shutil.copytree(planted.home.state, state)
        own = planted.home.without("runtimes", folder=tmp_path / "cache")
        cache = own.cache
        shutil.copytree(planted.home.cache / "runtimes", cache / "runtimes")
        with contextlib.closing(sqlite3.connect(state / "farm.db")) as database:
            [[text]] = database.execute("SELECT runtime FROM run_device WHERE run_id = ?", [good])
            had = json.loads(text)
            older = {**had, "runner": "feedface" * 2}
            database.execute("UPDATE run_device SET runtime = ? WHERE run_id = ?", [json.dumps(older), good])
            database.commit()
        home = dataclasses.replace(own, state=state)
        new = dataclasses.replace(planted, home=dataclasses.replace(home, cache=planted.home.cache)).run()
        asked = ("perf", "confirm", JOB, "--good", good, "--bad", new, "--pairs", "5")
        gone = dataclasses.replace(planted, home=home).json(*asked, code=0)
        answer = gone["metrics"][0]["confirmation"]
        assert answer["answer"] == "unknown"
        assert answer["reason"].endswith("was not measured") == ("not the program" in answer["reason"])
        # The runner of the earlier run: a copy of today's with another digest.
        # Other tests leave runtimes in this cache, and files that no version names may differ.
        records = sorted((cache / "runtimes").glob("*/runtime.json"), key=lambda path: path.parent.stat().st_mtime)
        kept = next(path for path in reversed(records) if had == json.loads(path.read_text())["runtime"]["versions"])
        folder = shutil.copytree(kept.parent, cache / "runtimes" / ("feedface" * 8))
        record = json.loads((folder / "runtime.json").read_text())
        record["runtime"] |= {"versions": older, "digest": "feedface" * 8}
        (folder / "runtime.json").write_text(json.dumps(record))
        facts = dataclasses.replace(planted, home=home).json(*asked, code=None)
        output = facts["attribution"]
        assert (facts["same_bundle"], output["differing"], list(output["alone"])) == (True, ["runtime"], ["runtime"])
        assert len({turn["runtime"] for turn in facts["turns"]}) >= 2


@pytest.mark.whole
def test_trouble_of_the_device_costs_a_pair_at_most(planted: Planted, again: str, twice: str, tmp_path: Path) -> None:
    with attach(planted.home, tmp_path, ["SM8650"]) as attached:
        inject(attached.root(0), Fault("reset", match="farm_runner", times=1))
        inject(attached.root(0), Fault("kill_runner"))
        serial = attached.devices[0].serial
        asked = ("perf", "confirm", JOB, "--good", again, "--bad", twice, "--device", serial, "--json")
        done = attached.farm(*asked, code=3)
        assert "once more: " in done.stderr
        answer = json.loads(done.stdout)
        assert answer["metrics"][0]["confirmation"]["pairs"] >= 9
        assert any(turn["failure"] for turn in answer["turns"])


# A worse compiler on the real simulator: the size of a program raises an alert.


_NIGHT = """
[nightly]
name = "planted"
report_dir = "reports"

[[run]]
name = "layers"
socs = ["SM8650"]
suites = ["./planted"]
virtual = 1
"""

# A dozen more layers with the same weights leave the size of a program as it is.
_LARGER = 48


@pytest.mark.whole
def test_a_nightly_run_whose_program_grew_exits_with_3(home: FarmHome) -> None:
    planted = Planted(home, home.cwd, write_suite(home.cwd / "planted"))
    night = home.cwd / "nightly.toml"
    night.write_text(_NIGHT)
    _, second = (
        home.json("nightly", str(night), timeout_s=400, env=planted.env(layers), code=code)
        for layers, code in ((0, 0), (_LARGER, 3))
    )
    [cell] = second["nightly_run"]["cells"]
    assert [one["job_id"] for one in cell["findings"]["regressions"]] == [JOB]
    assert "pte_size worse" in cell["findings"]["regressions"][0]["reason"]
    assert cell["code"] == 3
