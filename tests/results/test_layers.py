"""Choice of the named layer and of its likely cause, for given figures."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.builds.program.layers import INPUT, Gap, Layer, LayerStep
from farm.results.layers import DROP_DB, FLOOR_DB, ROUNDING_STEPS, SUSPECT_DB, diagnose, layer_comparisons


def gap(db: float | None, *, steps: float | None = 50.0, problem: str = "") -> Gap:
    return Gap(mse=0.1, sqnr_db=db, cosine=0.9, steps=steps, problem=problem)


def chain(*rows: dict[LayerStep, Gap]) -> list[Layer]:
    """Return layers that each read the previous one."""
    return [Layer(f"layer_{n}", "aten.op.default", (f"layer_{n - 1}",) if n else (), row) for n, row in enumerate(rows)]


def of(step: LayerStep, *levels: float | None) -> list[Layer]:
    return chain(*({step: gap(level)} for level in levels))


@pytest.mark.parametrize("step", list(LayerStep))
def test_the_layer_that_breaks_is_named_and_not_those_that_hand_it_on(step: LayerStep) -> None:
    floor, suspect = FLOOR_DB[step], SUSPECT_DB[step]
    for levels, named in (
        ([42.0, 41.0, 8.0, 8.5, 7.0], "layer_2: SQNR 8.0 dB, its inputs 41.0 dB"),
        # A quantized model in order.
        ([math.inf, 42.5, 41.2, 37.8, 34.0, 36.9, 33.0], None),
        ([floor + 20, floor + 14, floor + 8, floor + 2, floor - 1, floor - 6], "layer_4: little by little"),
        # A drop counts only below the suspect level.
        ([90.0, suspect], None),
        ([suspect - 1 + DROP_DB, suspect - 1], "layer_1: "),
    ):
        diagnosis = diagnose(of(step, *levels))
        assert (diagnosis.first is None) == (named is None)
        if diagnosis.first is not None and named is not None:
            layer, why = named.split(": ")
            assert (diagnosis.first.layer, diagnosis.first.step) == (layer, step)
            assert why in diagnosis.first.why
            assert list(diagnosis.steps) == [step]


def test_the_worst_input_is_what_a_layer_is_measured_by() -> None:
    layers = [
        Layer("good", "a", (), {LayerStep.COMPILER: gap(45.0)}),
        Layer("bad", "b", (), {LayerStep.COMPILER: gap(33.0)}),
        Layer("sum", "c", ("good", "bad"), {LayerStep.COMPILER: gap(28.0)}),
    ]
    assert diagnose(layers).first is None


def test_through_a_layer_of_which_nothing_was_written_its_own_inputs_are_looked_at() -> None:
    layers = [
        Layer("x", INPUT, (), {}),
        Layer("before", "a", ("x",), {LayerStep.COMPILER: gap(33.0)}),
        Layer("fused", "b", ("before",), {}),
        Layer("after", "c", ("fused",), {LayerStep.COMPILER: gap(28.0)}),
    ]
    assert diagnose(layers).first is None
    assert diagnose([layer for layer in layers if layer.name != "before"]).first is not None


def test_a_difference_of_one_step_is_rounding_between_compiler_and_device_and_not_in_quantization() -> None:
    coarse = gap(3.0, steps=ROUNDING_STEPS)
    assert diagnose(chain({LayerStep.COMPILER: coarse, LayerStep.DEVICE: coarse})).first is None
    assert diagnose(chain({LayerStep.COMPILER: gap(3.0, steps=2.0)})).first is not None
    assert diagnose(chain({LayerStep.QUANTIZATION: coarse})).first is not None


@pytest.mark.parametrize(
    "problem", ["has 3 NaN and 0 infinite elements where there are numbers before", "is the constant 0"]
)
def test_a_value_that_cannot_be_compared_diverges_whatever_its_figures(problem: str) -> None:
    layers = chain({LayerStep.DEVICE: gap(40.0)}, {LayerStep.DEVICE: gap(-math.inf, steps=None, problem=problem)})
    first = diagnose(layers).first
    assert first is not None
    assert (first.layer, first.step, first.why) == ("layer_1", LayerStep.DEVICE, problem)


def test_every_step_has_its_own_first_and_the_earliest_layer_is_the_answer() -> None:
    fine, bad = gap(40.0), gap(5.0)
    layers = chain(
        {LayerStep.QUANTIZATION: fine, LayerStep.COMPILER: fine, LayerStep.DEVICE: fine},
        {LayerStep.QUANTIZATION: fine, LayerStep.COMPILER: bad, LayerStep.DEVICE: fine},
        {LayerStep.QUANTIZATION: bad, LayerStep.COMPILER: bad, LayerStep.DEVICE: bad},
    )
    diagnosis = diagnose(layers)
    assert {step: found.layer for step, found in diagnosis.steps.items()} == {
        LayerStep.COMPILER: "layer_1",
        LayerStep.QUANTIZATION: "layer_2",
        LayerStep.DEVICE: "layer_2",
    }
    assert diagnosis.first == diagnosis.steps[LayerStep.COMPILER]


def test_of_two_steps_at_one_layer_the_one_that_is_taken_earlier_is_the_cause() -> None:
    first = diagnose(chain({LayerStep.COMPILER: gap(5.0), LayerStep.QUANTIZATION: gap(5.0)})).first
    assert first is not None
    assert first.step is LayerStep.QUANTIZATION


def test_what_is_recorded_has_a_row_for_every_known_step_and_marks_only_the_first() -> None:
    layers = chain({LayerStep.QUANTIZATION: gap(40.0), LayerStep.COMPILER: gap(5.0)}, {LayerStep.COMPILER: gap(4.0)})
    rows = layer_comparisons(layers, diagnose(layers))
    assert [(row.layer, row.step, row.diverges) for row in rows] == [
        ("layer_0", LayerStep.QUANTIZATION, False),
        ("layer_0", LayerStep.COMPILER, True),
        ("layer_1", LayerStep.COMPILER, False),
    ]
    assert (rows[0].mse, rows[0].sqnr_db, rows[0].cosine) == (0.1, 40.0, 0.9)


def test_nothing_known_is_no_divergence() -> None:
    assert diagnose([]).first is None
    assert diagnose(chain({}, {LayerStep.COMPILER: gap(None)})).first is None


levels = st.none() | st.floats(allow_nan=False)
gaps = st.builds(Gap, levels, levels, levels, levels, st.sampled_from(["", "is the constant 1"]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(list(LayerStep)), gaps), max_size=8))
def test_whatever_the_figures_the_answer_is_among_the_layers_and_the_first_of_its_step(
    rows: list[dict[LayerStep, Gap]],
) -> None:
    layers = chain(*rows)
    diagnosis = diagnose(layers)
    names = [layer.name for layer in layers]
    positions = [names.index(found.layer) for found in diagnosis.steps.values()]
    assert (diagnosis.first is None) == (not positions)
    if diagnosis.first is not None:
        assert names.index(diagnosis.first.layer) == min(positions)
        assert diagnosis.first.why
    recorded = layer_comparisons(layers, diagnosis)
    assert sum(row.diverges for row in recorded) == len(diagnosis.steps)
