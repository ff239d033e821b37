from __future__ import annotations

import math
from collections.abc import Callable
from html import unescape

import msgspec
import pytest

from farm.builds.program.layers import LayerStep
from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import render_html
from farm.report.model.profile_tables import ROW_LIMITS, SHOWN_JOBS, layer_table, operator_tables, row_limit
from farm.results.attempt import Attempt, LayerComparison, OperatorProfile, Stage, Verdict
from farm.store.view import RunView


def node(name: str, p50: float, unit: str = "cycles", share: float = 0.0) -> OperatorProfile:
    return OperatorProfile(name, "QnnBackend[0]", unit, 3, p50, p50, p50, share)


def test_tables_are_by_unit_the_greatest_first_and_say_what_they_leave_out() -> None:
    rows = [node("a", 1), node("b", 60), node("c", 39), node("call", 5, "ns"), node("whole call: x", 1e9)]
    cycles, ns = operator_tables(rows, 2)
    assert ([row.node for row in cycles.rows], cycles.total, cycles.count) == (["b", "c"], 100, 3)
    assert (cycles.left_out, cycles.left_out_total, cycles.left_out_share) == (1, 1, 0.01)
    assert (ns.unit, ns.total, ns.left_out) == ("ns", 5, 0)
    assert operator_tables([node("whole call: x", 1)], 2) == ()


def test_many_profiles_have_short_tables() -> None:
    assert row_limit(1) == ROW_LIMITS[1]
    assert ROW_LIMITS[0] < row_limit(300) == row_limit(100_000) <= ROW_LIMITS[1]


def compared(layer: str, step: LayerStep, *, diverges: bool = False) -> LayerComparison:
    return LayerComparison(layer, "aten.x.default", step, 0.1, 3.0, 0.5, diverges=diverges)


def test_the_first_divergence_is_that_of_the_first_layer_and_there_of_the_first_step() -> None:
    q, c = LayerStep.QUANTIZATION, LayerStep.COMPILER
    late_first = [compared("a", q), compared("a", c, diverges=True), compared("b", q, diverges=True), compared("b", c)]
    table = layer_table(late_first)
    assert table.steps == (q, c)
    assert table.first is not None
    assert (table.first.layer, table.first.step) == ("a", c)
    both = layer_table([compared("a", c, diverges=True), compared("a", q, diverges=True)])
    assert both.first is not None
    assert both.first.step is q
    assert layer_table([compared("a", q)]).first is None


def test_a_layer_that_a_step_does_not_have_leaves_its_place_empty() -> None:
    table = layer_table([compared("a", LayerStep.QUANTIZATION), compared("b", LayerStep.DEVICE)])
    assert [[one is not None for one in row.steps] for row in table.rows] == [[True, False], [False, True]]


def test_heap_counters_are_shown_with_their_unit(inside_run: RunView) -> None:
    html = render_html(inside_run)
    assert "dsp_heap_before" in html
    assert "928,212 bytes" in html


def test_a_page_without_profiles_has_no_empty_section(example_run: RunView, inside_run: RunView) -> None:
    assert "profiles-h" not in render_html(example_run)
    html = unescape(render_html(inside_run))
    assert "382,800 cycles in 8 rows" in html
    assert "in 5 of 6 inferences" in html
    assert "host time of a simulator: not comparable with hardware" in html
    assert "QNN (execute) time in QnnBackend[0]" in html


def test_profiles_and_layers_come_back_from_json(inside_run: RunView, hostile_run: RunView) -> None:
    assert parse_json(render_json(inside_run)) == inside_run
    back = parse_json(render_json(hostile_run))
    (row, _) = back.jobs[0].attempts[0].operators
    assert math.isnan(row.p50)
    assert row.least == -math.inf


@pytest.mark.parametrize("jobs", [SHOWN_JOBS + 7])
def test_a_large_run_of_profiles_stays_small_and_says_what_is_missing(
    run_of: Callable[..., RunView], jobs: int
) -> None:
    operators = tuple(node(f"aten_convolution_default_{n}:OpId_{n}", 1000.0 - n, share=0.005) for n in range(400))
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", "virtual-SM8650-0", operators=operators)
    html = render_html(run_of(*[(msgspec.structs.replace(attempt, job_id=f"{n}"),) for n in range(jobs)]))
    assert "7 more are not here" in unescape(html)
    assert html.count('class="card inside') == SHOWN_JOBS
    assert len(html) < 6_000_000
