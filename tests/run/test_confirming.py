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
            raise UsageError(f"the bundle {key} is not in the cache any more")
        return self.bundles[key]

    def measure(
        self,
        good: StubSide,
        new: StubSide,
        pairs: int,
        inferences: int,
        *,
        numerics: bool,
        begin: int = 0,
        renew: bool = False,
        fresh: bool = False,
    ) -> dict[str, list[Pair]]:
        del numerics
        self.measured.append((good, new))
        self.asked.append((begin, pairs, renew, fresh))
        if not fresh:
            good, new = (msgspec.structs.replace(one, factor=one.factor * one.luck) for one in (good, new))
        if good.failure or new.failure:
            return {}
        self.pairs += pairs
        return {"htp_cycles": [(self._samples(good, inferences), self._samples(new, inferences)) for _ in range(pairs)]}

    def problems(self, good: StubSide, new: StubSide, *, since: int) -> tuple[str, ...]:
        del since
        answer = {"good": good.failure, "new": new.failure}
        return tuple(f"{role}: {failure}" for role, failure in answer.items() if failure)

    def _samples(self, side: StubSide, count: int) -> tuple[float, ...]:
        return tuple(1e6 * side.factor * np.exp(self.noise * self._random.standard_normal(count)))


def bench_of(stub: StubBench) -> InterleavedBench:
    return cast("InterleavedBench", stub)


def past(
    number: int, key: str, *, kind: str = "virtual", version: str = "v1", facts: dict[str, str] | None = None
) -> StoredResult:
    """The result of run `number`."""
    attempt = Attempt(
        JOB, Verdict.PASSED, Stage.DONE, "", device="d", bundle_key=key,
        measurements=(
            Measurement("latency", "ns", Direction.LOWER, (1.0,)),
            Measurement("htp_cycles", "cycles", Direction.LOWER, (1.0,)),
            Measurement("pte_size", "bytes", Direction.LOWER, (1.0,), exact=True),
        ),
    )  # fmt: skip
    view = JobView(JOB, "suite", "case", "SM8650", "htp", "8a8w", (attempt,), case_version=version, decisive_attempt=1)
    run = RunView(f"run-{number:02}", "farm run", number, None, None, "", "", facts or {}, (), (view,))
    return StoredResult(run, view, attempt, 1, kind, {})


def confirm_keys(stub: StubBench, good: str, new: str, **more: Any) -> Confirmation:
    return compare(bench_of(stub), [Claim(CYCLES, True)], past(0, good), past(1, new), **more)[0].confirmation


def test_a_bundle_that_was_compiled_anew_to_another_program_is_no_proof_that_it_was_the_night() -> None:
    def compiled(number: int, program: str) -> StoredResult:
        one = past(number, "a")
        return msgspec.structs.replace(one, view=msgspec.structs.replace(one.view, program=program))

    assert of_one_bundle(past(0, "a"), past(1, "a")).answer is Answer.REFUTED
    assert of_one_bundle(compiled(0, "x"), compiled(1, "x")).reason == "the program is that of run-00: it was the night"
    other = of_one_bundle(compiled(0, "x"), compiled(1, "y"))
    assert (other.answer, other.reason) == (
        Answer.UNKNOWN, "the bundle of run-00 was compiled anew since, to another program",
    )  # fmt: skip


def test_ten_pairs_are_enough_where_they_tell() -> None:
    stub = StubBench({"a": StubSide(1.0), "b": StubSide(1.08)})
    output = confirm_keys(stub, "a", "b")
    assert (output.answer, stub.pairs) == (Answer.CONFIRMED, 20), "ten, and ten in new processes"
    assert output.low < math.log(1.08) < output.high
    assert confirm_keys(stub, "a", "a").answer is Answer.REFUTED
    assert confirm_keys(stub, "b", "a").answer is Answer.REFUTED
    assert stub.pairs == 40


def test_what_is_clearly_not_so_is_not_measured_any_longer() -> None:
    stub = StubBench({"a": StubSide(1.0), "b": StubSide(1.001)})
    runs = past(0, "a"), past(1, "b")
    [one] = compare(bench_of(stub), [Claim(CYCLES, up=True)], *runs, early=True)
    assert (one.confirmation.answer, stub.pairs) == (Answer.REFUTED, 4)
    assert "% in 4 pairs" in one.confirmation.reason
    [one] = compare(bench_of(stub), [Claim(CYCLES, up=True)], *runs)
    assert (one.confirmation.answer, stub.pairs) == (Answer.REFUTED, 14), "who asks for ten pairs gets them"


def test_luck_that_stays_with_a_process_is_not_confirmed() -> None:
    stub = StubBench({"a": StubSide(1.0), "b": StubSide(1.0, luck=1.06)})
    output = confirm_keys(stub, "a", "b")
    assert output.answer is Answer.REFUTED
    assert "in one process, but" in output.reason
    assert "in new ones" in output.reason
    assert abs(output.change) < 0.01
    assert stub.asked == [(0, 10, False, False), (0, 10, False, True)]


def test_bad_luck_of_the_good_program_hides_nothing_for_long() -> None:
    stub = StubBench({"a": StubSide(1.0, luck=1.06), "b": StubSide(1.08)}, noise=0.1)
    compare(bench_of(stub), [Claim(CYCLES, up=True)], past(0, "a"), past(1, "b"))
    # The second ten are of another process, in which the new program is loaded first.
    assert stub.asked[1] == (11, 10, True, False)


def test_what_is_unknown_is_measured_once_more_and_all_pairs_count() -> None:
    stub = StubBench({"a": StubSide(1.0), "b": StubSide(1.03)}, noise=0.2, seed=3)
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
        stub = StubBench({key: StubSide(factor) for key, factor in self.FACTORS.items()})
        bracket, answer = self.find([past(n, key) for n, key in enumerate(self.KEYS)], stub)
        assert (bracket.good, bracket.bad, bracket.exact) == (3, 4, True)
        assert [begin for begin, *_ in stub.asked].count(0) == len([one for one in answer if one.confirmation]) == 2
        assert all(fresh for *_, fresh in stub.asked), "luck of a process would name another run"

    def test_equal_outputs_that_are_not_any_more_are_found_by_halves(self) -> None:
        figure = Series(JOB, "htp_cycles", "dB", Direction.HIGHER)
        stub = StubBench({key: StubSide(math.inf if key in "abcd" else 60.0) for key in "abcdefgh"})
        runs = [past(n, key) for n, key in enumerate("abcdefgh")]
        values = [math.inf] * 4 + [60.0] * 4
        bracket = first_bad(bench_of(stub), figure, runs, values, Bracket(0, 7), -math.inf)
        assert (bracket.good, bracket.bad, bracket.exact) == (3, 4, True)

    def test_a_bundle_that_is_known_is_not_measured(self) -> None:
        stub = StubBench({"a": StubSide(1.0), "e": StubSide(1.08)})
        bracket, answer = self.find([past(n, "aaaaeeee"[n]) for n in range(8)], stub)
        assert (bracket.good, bracket.bad, stub.measured) == (3, 4, [])
        assert {probe.reason for probe in answer} == {"the same bundle as one that is known"}

    def test_a_bundle_that_is_gone_leaves_a_range(self) -> None:
        stub = StubBench({key: StubSide(self.FACTORS[key]) for key in "abe"})
        runs = [past(n, key) if n != 3 else None for n, key in enumerate(self.KEYS)]
        bracket, answer = self.find(runs, stub)
        assert (bracket.good, bracket.bad, bracket.open) == (2, 6, {3, 4, 5})
        reasons = {probe.number: probe.reason for probe in answer}
        assert reasons[3] == "its bundle is gone"
        assert "the bundle d is not in the cache any more" in reasons[4]

    def test_there_is_an_end_to_it(self) -> None:
        keys = [f"k{number}" for number in range(40)]
        ends = {"k0": StubSide(1.0), "k39": StubSide(1.08)}
        stub = StubBench({key: StubSide(1.08, "execute: it crashed") for key in keys} | ends)
        bracket, answer = self.find([past(n, key) for n, key in enumerate(keys)], stub, [1e6] * 40)
        assert not bracket.exact
        assert len([probe for probe in answer if probe.confirmation]) == MOST_PROBES

    def test_without_the_good_bundle_there_is_nothing_to_compare_with(self) -> None:
        with pytest.raises(UsageError, match="the good run's bundle is gone"):
            self.find([None, past(1, "a")], StubBench({}), [1.0, 1.0])


class TestFactors:
    def swap(self, whole: float, alone: dict[Factor, float], refused: dict[Factor, str] | None = None) -> Any:
        swaps = Swaps(
            cast("Side", StubSide(1.0)),
            cast("Side", StubSide(whole)),
            {factor: cast("Side", StubSide(level)) for factor, level in alone.items()},
            refused or {},
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

    def test_what_could_not_be_swapped_may_be_at_fault(self) -> None:
        output, _ = self.swap(1.1, {Factor.PROGRAM: 1.0, Factor.RUNTIME: 1.0}, {Factor.SDK: "it is gone"})
        assert output.explanation.kind is AttributionKind.UNEXPLAINED
        assert output.differing == (Factor.PROGRAM, Factor.RUNTIME, Factor.SDK)
        assert output.not_swapped == {Factor.SDK: "it is gone"}


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
