"""Displays of a figure have the value that decides: the worst sample, or the mean where the limit is for that."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from farm.numbers.compare.pairing import figures_of
from farm.numbers.regressions import bisect
from farm.replay.repro import rows
from farm.report.html.page_of_run import render_html
from farm.report.model.diff import diff_runs
from farm.report.model.history import tables
from farm.report.model.summary import spread_of, summarize
from farm.report.terminal.history import history_lines
from farm.report.terminal.job import job_lines
from farm.results.analysis.confirmation import Answer
from farm.results.analysis.scale import Series
from farm.results.attempt import Attempt, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.records import HistoryPoint

from .conftest import run_of


def attempt(*sqnr: float, top1: tuple[float, ...] = (), verdict: Verdict = Verdict.PASSED) -> Attempt:
    measured = [
        Measurement("latency", "ns", Direction.LOWER, (2e6, 1e6, 9e6)),
        Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, sqnr),
    ]
    if top1:
        measured.append(Measurement("top1[0]", "1", Direction.HIGHER, top1))
    compared = (Comparison(0, "fp32", min(sqnr), 0.9, 0.1, None),)
    return Attempt("j", verdict, Stage.DONE, "", "virtual-SM8650-0", comparisons=compared, measurements=tuple(measured))


def test_one_place_names_the_value_that_decides() -> None:
    sqnr = Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (38.65, 38.70, 38.35))
    mean = Measurement("top1[0]", "1", Direction.HIGHER, (1.0, 1.0, 0.0, 0.0, 0.0))
    latency = Measurement("latency", "ns", Direction.LOWER, (2e6, 1e6, 9e6))
    assert [one.value for one in (sqnr, mean, latency)] == [38.35, 0.4, 2e6]
    spreads = [spread_of(one) for one in (sqnr, mean, latency)]
    assert [(one.value, one.p50) for one in spreads if one] == [(38.35, 38.65), (0.4, 0.0), (2e6, 2e6)]
    past: Any = SimpleNamespace(attempt=attempt(38.65, 38.70, 38.35))
    assert bisect._value(past, Series("", "sqnr_fp32[0]", "dB", Direction.HIGHER)) == 38.35


def test_show_and_page_have_the_value_that_decides() -> None:
    view = run_of((attempt(38.65, 38.70, 38.35, top1=(1.0, 1.0, 0.0, 0.0, 0.0), verdict=Verdict.FAILED),))
    lines = job_lines(summarize(view), summarize(view).jobs[0], (), {})
    words = [line.split() for line in lines if re.match(r"  (latency|sqnr_fp32|top1)\b", line)]
    assert [line[1] for line in words] == ["2.000", "38.4", "0.4"]
    page = render_html(view)
    cells = re.findall(r'<tr><th scope="row">(latency|sqnr_fp32\[0\]|top1\[0\]).*?</th><td>(.*?)</td>', page)
    assert dict(cells) == {"latency": "2.000 ms", "sqnr_fp32[0]": "38.4 dB", "top1[0]": "0.4"}


def test_two_runs_differ_by_the_value_that_decides() -> None:
    before, after = run_of((attempt(38.65, 38.70, 38.35),)), run_of((attempt(38.65, 38.70, 30.0),))
    [change] = diff_runs(before, after).jobs[0].changes
    assert (change.metric, change.before, change.after, change.worse) == ("sqnr_fp32[0]", 38.35, 30.0, True)
    [lost] = diff_runs(before, run_of((attempt(38.65, math.nan, 38.35),))).jobs[0].changes
    assert lost.worse
    assert math.isnan(lost.after)
    same = run_of((attempt(38.35, 45.0, 45.0),))
    assert diff_runs(before, same).jobs[0].changes == ()


def test_a_result_run_again_is_compared_by_the_value_that_decides() -> None:
    then, now = attempt(30.0, top1=(1.0, 1.0, 1.0, 0.0)), attempt(30.0, top1=(1.0, 1.0, 0.0, 0.0, 0.0))
    found = {one.name: (one.then, one.now) for one in rows(then, now)}
    assert found["top1[0]"] == (0.75, 0.4)
    assert found["latency"] == (2e6, 2e6)


def test_two_sides_are_compared_by_the_value_that_decides() -> None:
    [sqnr] = figures_of(attempt(38.65, 38.70, 38.35), attempt(38.65, 38.70, 30.0))
    assert sqnr.pairs == (((38.35,), (30.0,)),)
    assert sqnr.worse.change == pytest.approx(-8.35)
    number, none = attempt(38.65), attempt(math.nan)
    for sides in ((number, none), (none, number)):
        [sqnr] = figures_of(*sides)
        assert sqnr.worse.answer is sqnr.better.answer is Answer.UNKNOWN, "no number is not the same"
    [same] = figures_of(number, number)
    assert same.worse.answer is Answer.REFUTED


def test_a_history_shows_the_digits_that_decide() -> None:
    # With two decimals, a cosine that passes 0.9995 and a cosine that fails would both be 1.00.
    points = [
        HistoryPoint(
            "s/c[x]", f"run-{number}", number, "f", "v", "d", "hardware", "passed", "", "cosine_fp32[0]", "1",
            "higher", exact=False, value=value, n=3,
        )
        for number, value in enumerate((0.99961, 0.99912))
    ]  # fmt: skip
    text = "\n".join(history_lines(tables(points, ["cosine_fp32[0]"], {}), {}, ()))
    assert "0.99961" in text
    assert "0.99912" in text
