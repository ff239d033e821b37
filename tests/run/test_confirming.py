"""How long pairs are measured, which old runs are run again, and which factors are swapped: without a device."""

from __future__ import annotations

import math
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest

from farm.base.errors import UnknownNameError, UsageError
from farm.numbers.regressions.confirm_job import require_comparable
from farm.numbers.regressions.factor_swap import Swaps, swap_factors
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
from farm.numbers.regressions.paired_test import (
    Claim,
    MeasuredPairs,
    Probe,
    compare,
    first_bad,
    series_of,
    worse,
)
from farm.numbers.regressions.remeasure import of_one_bundle
from farm.replay.stored_result import StoredResult
from farm.results.analysis.confirmation import Answer, Confirmation, Pair
from farm.results.analysis.factors import AttributionKind, Factor
from farm.results.analysis.first_bad import MOST_PROBES, Bracket
from farm.results.analysis.scale import Series
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.view import JobView, RunView

JOB = "suite/case[SM8650-htp-8a8w]"
CYCLES = Series(JOB, "htp_cycles", "cycles", Direction.LOWER)


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
    attempt = Attempt(JOB, Verdict.PASSED, Stage.DONE, "", device="d", bundle_key=key, measurements=tuple(measured))
    view = JobView(JOB, "suite", "case", "SM8650", "htp", "8a8w", (attempt,), case_version=version, decisive_attempt=1)
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


def test_bad_luck_of_the_new_program_hides_nothing_for_long() -> None:
    stub = stub_of(luck=1 / 1.06, noise=0.1, a=1.0, b=1.08)
    confirm_keys(stub, "a", "b")
    # The second ten are of another process, in which the new program is loaded first.
    assert stub.asked[1] == (11, 10, True, False)


def test_an_unknown_change_is_measured_once_more_and_all_pairs_count() -> None:
    stub = stub_of(noise=0.2, seed=3, a=1.0, b=1.03)
    output = confirm_keys(stub, "a", "b", pairs=6)
    assert (output.answer, output.pairs, stub.pairs) == (Answer.UNKNOWN, 12, 12)


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
        series = Series(JOB, "htp_cycles", "dB", Direction.HIGHER)
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
