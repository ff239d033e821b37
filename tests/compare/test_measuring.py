"""Measurement of jobs in turns, and its end, also by failed devices or Ctrl-C. The benches are stubs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from log_lines import LogLines

from farm.base.errors import InfraError, NeedsDeviceError, NoDeviceError
from farm.numbers.compare import measuring
from farm.numbers.compare.compare import run_differently
from farm.numbers.compare.measuring import (
    FIRST_PAIRS,
    JobOutcome,
    JobToRun,
    MeasuringPool,
    inferences_of,
    paired,
    run_job,
    times_of,
)
from farm.numbers.compare.sides import ComparisonRequest, SideRequest
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
from farm.results.analysis.confirmation import Pair
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.suites.suite import Target

# Measurement of one job on one bench, and its end. The bench is a stub with known true values.


MOST = 12


def side(name: str, qnn: str = "2.51", fallback_ops: dict[str, int] | None = None) -> Side:
    job = SimpleNamespace(id=name)
    manifest = SimpleNamespace(key=name, versions={"qnn": qnn}, fallback_ops=fallback_ops or {})
    return Side(cast("Any", job), cast("Any", SimpleNamespace(manifest=manifest)))


def attempt(
    cycles: float = 1e6, sqnr: float = 40.0, verdict: Verdict = Verdict.PASSED, known_issue: str = ""
) -> Attempt:
    measured = (
        Measurement("htp_cycles", "cycles", Direction.LOWER, (cycles,)),
        Measurement("latency", "ns", Direction.LOWER, (cycles * 10,)),
        Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (sqnr,)),
        Measurement("sqnr_quantized[0]", "dB", Direction.HIGHER, (sqnr,)),
        Measurement("pte_size", "bytes", Direction.LOWER, (1000.0,), exact=True),
    )
    reason = "" if verdict is Verdict.PASSED else "output 0 is off"
    return Attempt("x", verdict, Stage.NUMERICS, reason, "phone", 1, measurements=measured, known_issue=known_issue)


class BenchStub:
    """Stub of a bench: returns attempts of both sides with noise, and keeps the requests."""

    def __init__(self, a: Attempt, b: Attempt, *, noise: float = 0.0, kind: str = "hardware") -> None:
        self._attempts, self._noise, self._random = {"a": a, "b": b}, noise, np.random.default_rng(1)
        self.device = SimpleNamespace(serial="phone", kind=kind)
        self.judged: dict[tuple[str, ...], Attempt] = {}
        self.outputs: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.turns: list[object] = []
        self.asked: list[tuple[int, bool]] = []
        self.failing: tuple[str, ...] = ()

    def measure(
        self, good: Side, new: Side, pairs: int, inferences: int = 5, *, numerics: bool = False, begin: int = 0
    ) -> dict[str, list[Pair]]:
        del begin
        for one in (good, new):
            self.judged[one.key] = self._attempts[one.job.id]
        if not pairs:
            return {}
        self.asked.append((pairs, numerics))
        return {
            metric: [
                (self._value(good, metric, inferences), self._value(new, metric, inferences)) for _ in range(pairs)
            ]
            for metric in ("htp_cycles", "latency", *(("sqnr_fp32[0]", "sqnr_quantized[0]") if numerics else ()))
        }

    def problems(self, good: Side, new: Side, *, since: int = 0) -> tuple[str, ...]:
        del good, new, since
        return self.failing

    def _value(self, side: Side, metric: str, inferences: int) -> list[float]:
        [level] = next(one.samples for one in self._attempts[side.job.id].measurements if one.metric == metric)
        noise = self._noise if metric in ("htp_cycles", "latency") else 0.0
        return list(level * (1 + noise * self._random.standard_normal(inferences)))


def raising(error: Exception) -> Any:
    def measure(*_: Any, **__: Any) -> None:
        raise error

    return measure


def run(
    bench: BenchStub, *, a: bool = True, b: bool = True, qnn: str = "2.51", left_by_a: dict[str, int] | None = None
) -> JobOutcome:
    sides = [made if there else None for made, there in ((side("a", "2.51", left_by_a), a), (side("b", qnn), b))]
    return run_job(cast("InterleavedBench", bench), *sides, MOST, threading.Event())


def test_what_no_virtual_device_runs_is_left_out_with_the_reason() -> None:
    bench = BenchStub(attempt(), attempt(), kind="virtual")
    bench.measure = raising(NeedsDeviceError("its graph is made by the device", "SM8650"))  # type: ignore[method-assign]
    for sides in ({}, {"a": False}):
        outcome = run(bench, **sides)
        assert outcome.problem == "no virtual device runs it: its graph is made by the device; attach a SM8650"
        assert (outcome.a, outcome.b, outcome.metrics) == (None, None, ())


def answers(outcome: JobOutcome) -> dict[str, str]:
    return {one.metric: one.answer for one in paired({"job": outcome}).get("job", ())}


def test_equal_programs_are_left_alone_after_the_first_pairs() -> None:
    bench = BenchStub(attempt(), attempt(), noise=0.001)
    found = answers(run(bench))
    assert bench.asked == [(FIRST_PAIRS, False)]
    assert found == dict.fromkeys(("htp_cycles", "latency", "sqnr_fp32[0]", "sqnr_quantized[0]"), "same")


@pytest.mark.parametrize(
    ("a", "b", "metric", "answer"),
    [
        (attempt(), attempt(cycles=0.9e6), "htp_cycles", "better"),
        (attempt(), attempt(sqnr=45.0), "sqnr_fp32[0]", "better"),
        # A known issue on both sides is measured all the same.
        (*[attempt(verdict=Verdict.FAILED, known_issue="#12")] * 2, "htp_cycles", "same"),
    ],
)
def test_both_sides_are_measured(a: Attempt, b: Attempt, metric: str, answer: str) -> None:
    assert answers(run(BenchStub(a, b)))[metric] == answer


def test_a_slower_program_is_confirmed_by_no_fewer_pairs_than_were_asked_for() -> None:
    bench = BenchStub(attempt(), attempt(cycles=1.05e6), noise=0.005)
    found = answers(run(bench))
    assert sum(pairs for pairs, _ in bench.asked) == MOST
    assert (found["htp_cycles"], found["latency"]) == ("worse", "worse")


def test_what_stays_unknown_and_may_be_worse_gets_as_many_pairs_again() -> None:
    bench = BenchStub(attempt(), attempt(cycles=1.06e6), noise=0.3)
    run(bench)
    assert [pairs for pairs, _ in bench.asked] == [FIRST_PAIRS, MOST - FIRST_PAIRS, MOST]


def test_worse_numerics_are_measured_in_every_turn_and_confirmed() -> None:
    bench = BenchStub(attempt(), attempt(sqnr=37.0))
    outcome = run(bench)
    assert all(numerics for _, numerics in bench.asked)
    [one] = [one for one in paired({"job": outcome})["job"] if one.metric == "sqnr_fp32[0]"]
    assert (one.answer, one.a, one.b, one.pairs) == ("worse", 40.0, 37.0, MOST)


@pytest.mark.parametrize("lost", ["sqnr_fp32[0]", "sqnr_quantized[0]"])
def test_a_figure_that_b_alone_lacks_is_no_silence(lost: str) -> None:
    """An output that is not finite has no figure, and passes where no limit is against FP32."""
    a, b = attempt(), attempt()
    b = msgspec.structs.replace(b, measurements=tuple(one for one in b.measurements if one.metric != lost))
    assert run(BenchStub(a, b)).problem == ("B has no finite sqnr_fp32[0]" if "fp32" in lost else "")
    assert run(BenchStub(b, a)).problem == ""


@pytest.mark.parametrize("virtual", [False, True])
def test_of_text_the_steps_and_the_prompts_decide_on_devices(virtual: bool) -> None:
    text = Attempt(
        "x", Verdict.PASSED, Stage.DONE, "",
        measurements=(
            Measurement("latency", "ns", Direction.LOWER, (4e7,)),
            Measurement("prefill_rate", "tokens/s", Direction.HIGHER, (4000.0,)),
            Measurement("decode_rate", "tokens/s", Direction.HIGHER, (25.0,)),
        ),
    )  # fmt: skip
    found = {series.metric: decides for series, decides in times_of(text, text, virtual=virtual, same_share=False)}
    assert found == {"latency": not virtual, "prefill_rate": not virtual}


@pytest.mark.parametrize(
    ("kind", "more", "deciding"),
    [
        # A figure against a quantized module of its own decides nothing, nor does the clock of a simulator's host.
        ("hardware", {}, {"htp_cycles", "latency", "sqnr_fp32[0]"}),
        ("virtual", {}, {"htp_cycles", "sqnr_fp32[0]"}),
        # Cycles of two simulators.
        ("virtual", {"qnn": "2.49"}, {"sqnr_fp32[0]"}),
        ("hardware", {"qnn": "2.49"}, {"htp_cycles", "latency", "sqnr_fp32[0]"}),
        # B delegates more.
        ("virtual", {"left_by_a": {"aten.sort.default": 1}}, {"sqnr_fp32[0]"}),
        ("hardware", {"left_by_a": {"aten.sort.default": 1}}, {"latency", "sqnr_fp32[0]"}),
    ],
)
def test_metrics_that_decide(kind: str, more: dict[str, Any], deciding: set[str]) -> None:
    outcome = run(BenchStub(attempt(), attempt(cycles=1.3e6), kind=kind), **more)
    assert {one.metric for one in paired({"job": outcome})["job"] if one.decides} == deciding


@pytest.mark.parametrize(("a", "b"), [(True, False), (False, True)])
def test_a_side_that_alone_was_compiled_is_run_alone(a: bool, b: bool) -> None:
    bench = BenchStub(attempt(), attempt())
    outcome = run(bench, a=a, b=b)
    assert not bench.asked
    assert ((outcome.a is not None), (outcome.b is not None)) == (a, b)


def test_a_side_that_fails_always_has_no_pairs_and_one_that_fails_sometimes_is_a_problem() -> None:
    bench = BenchStub(attempt(), attempt(verdict=Verdict.FAILED))
    outcome = run(bench)
    assert (bench.asked, outcome.metrics, outcome.b and outcome.b.verdict) == ([], (), Verdict.FAILED)
    bench = BenchStub(attempt(), attempt())
    bench.failing = ("new: execute: crashed",)
    assert run(bench).problem == "not in every turn: new: execute: crashed"


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        (("x", "y"), ("x", "y"), (2, 2)),
        (("x", "y"), ("x", "z"), (1, 2)),
        (("x",), ("x", "y"), (1, 2)),
        (("x",), (), None),
    ],
)
def test_outputs_of_both_sides_are_compared_byte_for_byte(
    a: tuple[str, ...], b: tuple[str, ...], found: tuple[int, int] | None
) -> None:
    bench = BenchStub(attempt(), attempt())
    bench.outputs = {side("a").key: a, side("b").key: b}
    assert run(bench).outputs == found


def test_chance_among_many_jobs_is_taken_back() -> None:
    """A change that is significant alone is not among 300 equal jobs, where chance moves some job as much."""
    equal = run(BenchStub(attempt(), attempt(), kind="virtual"))
    slower = run(BenchStub(attempt(), attempt(cycles=1.05e6), noise=0.001, kind="virtual"))
    alone = paired({"slow": slower})["slow"][0]
    among = paired({"slow": slower, **{f"equal {number}": equal for number in range(300)}})["slow"][0]
    assert (alone.answer, among.answer) == ("worse", "unknown")


@pytest.mark.parametrize(("latency_ms", "inferences"), [(0.1, 100), (1, 20), (5, 10), (2000, 1)])
def test_short_programs_get_more_inferences_and_long_ones_fewer(latency_ms: float, inferences: int) -> None:
    latency = Measurement("latency", "ns", Direction.LOWER, (latency_ms * 1e6,) * 3)
    assert inferences_of([latency]) == inferences


def test_sides_of_two_runtimes_share_no_process() -> None:
    one, other = (
        msgspec.structs.replace(side("a"), runtime=cast("Any", SimpleNamespace(digest=digest))) for digest in "ab"
    )
    assert (side("a").place, one.place, other.place) == ("", "a", "b")
    assert len({side("a").key, one.key, other.key}) == 3


# Result of a comparison after failed devices or Ctrl-C. The benches are stubs.


NAMES = [f"job {number}" for number in range(6)]
# The name of a job stands for the program of a side.
JOBS = [JobToRun(name=name, target=Target("SM8650", "htp", "8a8w"), a=None, b=cast("Any", name)) for name in NAMES]


class BenchStubs:
    """Benches that know which jobs take the device with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices, self.opened = 2, 0
        self.broken: set[str] = set()
        self.ran: list[str] = []
        self.stop, self.stop_at = threading.Event(), ""
        self.said = LogLines()
        monkeypatch.setattr(measuring, "InterleavedBench", lambda *_, **__: self._bench())
        monkeypatch.setattr(measuring, "other_runtime", lambda *_: None)
        monkeypatch.setattr(measuring, "run_job", self._run)

    def run(self, virtual: int = 1) -> MeasuringPool:
        sides = SideRequest(toolchain="a"), SideRequest(toolchain="b")
        request = ComparisonRequest(sides=sides, socs=("SM8650",), suites=("s",), virtual=virtual)
        nothing = cast("Any", None)
        pool = MeasuringPool((nothing, nothing), nothing, request, self.stop)
        pool.run(JOBS)
        return pool

    @contextmanager
    def _bench(self) -> Iterator[object]:
        self.opened += 1
        if self.opened > self.devices:
            raise NoDeviceError("no SM8650 became free in time")
        yield SimpleNamespace(device=SimpleNamespace(serial="one"), runtime=None)

    def _run(self, bench: Any, _a: object, name: str, *_: object) -> JobOutcome:
        self.ran.append(name)
        if name == self.stop_at:
            self.stop.set()
        if name in self.broken:
            raise InfraError("the device is gone")
        return JobOutcome(device=bench.device.serial)


@pytest.fixture
def benches(monkeypatch: pytest.MonkeyPatch) -> BenchStubs:
    return BenchStubs(monkeypatch)


@pytest.mark.parametrize("devices", [2, 1])
def test_every_job_is_run_once_also_where_one_device_of_two_is_there(benches: BenchStubs, devices: int) -> None:
    benches.devices = devices
    pool = benches.run(virtual=2)
    assert sorted(benches.ran) == NAMES
    assert (sorted(pool.outcomes), pool.left_out) == (NAMES, {})


def test_a_job_that_takes_the_device_with_it_twice_counts_against_nobody_and_the_others_are_run(
    benches: BenchStubs,
) -> None:
    benches.devices, benches.broken = 10, {"job 2"}
    pool = benches.run()
    assert benches.ran.count("job 2") == 2
    assert sorted(pool.outcomes) == NAMES
    assert pool.outcomes["job 2"].problem == "the device is gone"
    assert not pool.outcomes["job 3"].problem


def test_without_a_device_no_job_is_run_and_each_says_why(benches: BenchStubs) -> None:
    benches.devices = 0
    pool = benches.run()
    assert pool.outcomes == {}
    assert pool.left_out == dict.fromkeys(NAMES, "no SM8650 became free in time")
    assert benches.said == ["no SM8650 became free in time"]


def test_after_an_interrupt_no_job_begins(benches: BenchStubs) -> None:
    benches.stop_at = "job 1"
    pool = benches.run()
    assert sorted(pool.outcomes) == ["job 0", "job 1"]
    assert pool.left_out == dict.fromkeys(NAMES[2:], "interrupted")


def test_the_same_program_is_measured_where_another_runner_or_other_options_run_it() -> None:
    plain, direct, burst = (
        Target("SM8650", "htp", "fp16", options)
        for options in ((), (("direct_mode", "true"),), (("htp_performance_mode", "burst"),))
    )
    assert run_differently(plain, direct)
    assert run_differently(plain, burst)
    assert not run_differently(direct, direct)
    # The option is printed, and needs no other runner.
    assert not run_differently(plain, msgspec.structs.replace(plain, options=(("direct_mode", "false"),)))
