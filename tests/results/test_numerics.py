from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from farm.results.numerics import Figures, compare, is_decided, is_equal, signal_problem, violations, with_loss, worst
from farm.suites.suite import Limits

from .conftest import PATIENT

SHAPES = hnp.array_shapes(max_dims=3, max_side=6)
ORDINARY = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    shape = draw(SHAPES)
    arrays = hnp.arrays(np.float32, shape, elements=ORDINARY)
    return draw(arrays), draw(arrays)


@PATIENT
@given(pairs())
def test_figures_are_their_definitions(pair: tuple[np.ndarray, np.ndarray]) -> None:
    actual, reference = pair
    figures = compare(actual, reference)
    r, a = [float(x) for x in reference.flat], [float(x) for x in actual.flat]
    signal, noise = sum(x * x for x in r), sum((x - y) ** 2 for x, y in zip(r, a, strict=True))
    norms = math.sqrt(signal) * math.sqrt(sum(x * x for x in a))
    assert figures.max_abs == max(abs(x - y) for x, y in zip(r, a, strict=True))
    if noise == 0:
        assert (figures.sqnr_db, figures.cosine) == (math.inf, 1.0)
    else:
        expected = 10 * math.log10(signal / noise) if signal else -math.inf
        assert figures.sqnr_db == pytest.approx(expected, abs=1e-6)
        expected = sum(x * y for x, y in zip(r, a, strict=True)) / norms if norms else 0.0
        assert figures.cosine == pytest.approx(expected, abs=1e-9)
    assert figures.mismatch is None


@PATIENT
@given(
    hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32)),
    hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32)),
)
def test_no_value_whatever_gives_nan_or_a_false_equal(actual: np.ndarray, reference: np.ndarray) -> None:
    if actual.shape != reference.shape:
        with pytest.raises(ValueError, match="the reference is"):
            compare(actual, reference)
        return
    figures = compare(actual, reference)
    equal = bool(np.array_equal(actual, reference, equal_nan=True))
    assert (figures.sqnr_db == math.inf) == equal
    assert not any(
        value is not None and math.isnan(value) for value in (figures.sqnr_db, figures.cosine, figures.max_abs)
    )
    assert equal or violations(figures, Limits(max_abs=0.0))


@PATIENT
@given(hnp.arrays(np.int32, (7,), elements=st.integers(-2, 2)), hnp.arrays(np.int32, (7,), elements=st.integers(-2, 2)))
def test_integers_are_counted_not_averaged(actual: np.ndarray, reference: np.ndarray) -> None:
    figures = compare(actual, reference)
    differing = sum(x != y for x, y in zip(actual.tolist(), reference.tolist(), strict=True))
    assert figures == Figures(mismatch=differing / 7)


def test_booleans_and_wide_integers_do_not_overflow() -> None:
    assert compare(np.array([True, False]), np.array([True, True])).mismatch == 0.5
    least, greatest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    assert compare(np.array([least, least]), np.array([greatest, least])).mismatch == 0.5


def test_noise_of_a_hundredth_is_forty_decibels() -> None:
    reference = np.array([3.0, -4.0, 12.0])
    figures = compare(reference * 1.01, reference)
    assert figures.sqnr_db == pytest.approx(40.0)
    assert figures.cosine == pytest.approx(1.0)
    assert figures.max_abs == pytest.approx(0.12)


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_sqnr_does_not_depend_on_the_scale(scale: float) -> None:
    reference = np.array([1.0, 2.0, -3.0])
    assert compare(reference * scale * 1.1, reference * scale).sqnr_db == pytest.approx(20.0)


def test_a_difference_too_small_to_square_is_not_equality() -> None:
    figures = compare(np.array([1.0, 2e-200]), np.array([1.0, 1e-200]))
    assert figures.sqnr_db is not None
    assert 2000 < figures.sqnr_db < math.inf


def test_nan_where_the_reference_has_a_number_breaks_even_without_limits() -> None:
    figures = compare(np.array([1.0, math.nan, math.nan]), np.array([1.0, 2.0, math.inf]))
    assert figures.nan == 2
    assert [v.text for v in violations(figures, Limits())] == ["2 elements are NaN where the reference has numbers"]


def test_equal_infinities_are_equal_and_stay_out_of_the_sums() -> None:
    figures = compare(np.array([math.inf, -math.inf, 1.1]), np.array([math.inf, -math.inf, 1.0]))
    assert figures.sqnr_db == pytest.approx(20.0)
    assert figures.infinite == 0
    assert compare(np.array([math.nan]), np.array([math.nan])).sqnr_db == math.inf


@pytest.mark.parametrize(("actual", "reference"), [(math.inf, 1.0), (1.0, math.inf), (math.inf, -math.inf)])
def test_a_stray_infinity_breaks_any_limit_and_only_then(actual: float, reference: float) -> None:
    figures = compare(np.array([actual, 1.0]), np.array([reference, 1.0]))
    assert (figures.infinite, figures.sqnr_db, figures.max_abs) == (1, -math.inf, math.inf)
    assert violations(figures, Limits()) == ()
    for limits in (Limits(sqnr_db=-300.0), Limits(cosine=-1.0), Limits(max_abs=1e300)):
        assert [v.text for v in violations(figures, limits)] == ["1 elements are not finite as in the reference"]


def test_dtypes_must_agree_and_be_comparable() -> None:
    with pytest.raises(ValueError, match=r"is float32\[2\], the reference is float64\[2\]"):
        compare(np.zeros(2, np.float32), np.zeros(2, np.float64))
    with pytest.raises(ValueError, match="complex64 outputs cannot be compared"):
        compare(np.zeros(2, np.complex64), np.zeros(2, np.complex64))


FIGURES = Figures(sqnr_db=12.34567, cosine=0.9, max_abs=0.5)


@pytest.mark.parametrize(
    ("figures", "limits", "texts"),
    [
        (FIGURES, Limits(sqnr_db=12.0, cosine=0.9, max_abs=0.5), []),
        (FIGURES, Limits(sqnr_db=20.0), ["sqnr 12.35 dB < 20 dB"]),
        (FIGURES, Limits(cosine=0.99), ["cosine 0.9 < 0.99"]),
        (FIGURES, Limits(max_abs=0.1), ["max_abs 0.5 > 0.1"]),
        (FIGURES, Limits(mismatch=0.0), []),
        (Figures(mismatch=0.25), Limits(sqnr_db=99.0, mismatch=0.2), ["mismatch 0.25 > 0.2"]),
        (Figures(sqnr_db=19.99999), Limits(sqnr_db=20.0), ["sqnr 19.99999 dB < 20 dB"]),
        (FIGURES, Limits(sqnr_db=13.0, max_abs=0.005), ["max_abs 0.5 > 0.005", "sqnr 12.35 dB < 13 dB"]),
        (Figures(peak=0.2), Limits(peak=0.1), ["peak 0.2 > 0.1"]),
        (Figures(steps=3.0), Limits(steps=2.0), ["steps 3 > 2"]),
        (Figures(max_abs=1.0), Limits(steps=2.0), []),
        (Figures(loss_db=4.5), Limits(loss_db=3.0), ["loss 4.5 dB > 3 dB"]),
        (Figures(sqnr_db=math.inf, cosine=1.0, max_abs=0.0), Limits(sqnr_db=1e9, cosine=1.0, max_abs=0.0), []),
    ],
)
def test_violations_say_value_and_limit_worst_first(figures: Figures, limits: Limits, texts: list[str]) -> None:
    assert [violation.text for violation in violations(figures, limits)] == texts


def test_excess_compares_kinds_of_limits() -> None:
    # 6.02 dB too little is twice the noise amplitude, as is twice the greatest difference.
    sqnr = violations(Figures(sqnr_db=20 - 20 * math.log10(2)), Limits(sqnr_db=20.0))[0]
    max_abs = violations(Figures(max_abs=0.2), Limits(max_abs=0.1))[0]
    cosine = violations(Figures(cosine=0.96), Limits(cosine=0.99))[0]
    assert sqnr.excess == pytest.approx(2.0)
    assert max_abs.excess == pytest.approx(2.0)
    assert cosine.excess == pytest.approx(2.0)


def test_a_difference_is_counted_in_steps_of_the_output_and_as_a_share_of_the_peak() -> None:
    step = np.float32(0.1)
    reference = np.array([-4, 0, 10, 20], np.float32) * step
    moved = reference + np.array([0, 2, 0, -1], np.float32) * step
    figures = compare(moved, reference, float(step))
    assert figures.steps == 2.0
    assert figures.peak == pytest.approx(0.1, rel=1e-6)
    assert compare(reference, reference, float(step)).steps == 0.0
    assert compare(moved, reference).steps is None
    assert compare(np.zeros(4, np.int64), np.ones(4, np.int64), float(step)).steps is None


def test_loss_is_what_comes_on_top_of_the_quantized_reference() -> None:
    assert with_loss(Figures(sqnr_db=36.0), Figures(sqnr_db=40.0)).loss_db == 4.0
    assert with_loss(Figures(sqnr_db=41.0), Figures(sqnr_db=40.0)).loss_db == -1.0
    assert with_loss(Figures(sqnr_db=-math.inf), Figures(sqnr_db=40.0)).loss_db == math.inf
    assert with_loss(Figures(sqnr_db=36.0), Figures(sqnr_db=math.inf)).loss_db is None
    assert with_loss(Figures(mismatch=0.0), Figures(mismatch=0.0)).loss_db is None


def test_worst_takes_the_worst_of_each() -> None:
    rows = [Figures(sqnr_db=30.0, cosine=0.8, max_abs=0.1), Figures(sqnr_db=20.0, cosine=0.9, max_abs=0.2, nan=1)]
    assert worst(rows) == Figures(sqnr_db=20.0, cosine=0.8, max_abs=0.2, nan=1)
    assert worst([Figures(mismatch=0.1), Figures(mismatch=0.3)]) == Figures(mismatch=0.3)


@pytest.mark.parametrize("values", [(0.1, math.nan), (math.nan, 0.1)])
def test_a_figure_that_is_no_number_is_the_worst_whatever_its_place(values: tuple[float, float]) -> None:
    found = worst(Figures(sqnr_db=one, kl=one) for one in values)
    assert [violation.text for violation in violations(found, Limits(sqnr_db=-300.0, kl=1e300))] == [
        "sqnr nan dB < -300 dB",
        "kl nan > 1e+300",
    ]


def test_a_limit_decides_only_the_dtypes_it_applies_to() -> None:
    numbers, counts = Figures(sqnr_db=1.0, cosine=1.0, max_abs=0.0), Figures(mismatch=0.0)
    assert is_decided(numbers, Limits(cosine=0.9))
    assert not is_decided(numbers, Limits(mismatch=0.0))
    assert not is_decided(numbers, Limits(steps=1.0, loss_db=1.0))
    assert is_decided(Figures(steps=0.0), Limits(steps=1.0))
    assert is_decided(counts, Limits(mismatch=0.0))
    assert not is_decided(counts, Limits(sqnr_db=20.0, cosine=0.9, max_abs=0.1))


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        (np.zeros((2, 2), np.float32), "is zero everywhere"),
        (np.full((3,), -0.0), "is zero everywhere"),
        (np.full((2, 2), 0.5, np.float32), "is the constant 0.5"),
        (np.array([1.0, math.nan]), "has NaN in sample 0"),
        (np.full((2,), math.inf), "is the constant inf"),
        (np.array([True, True]), "is the constant True"),
        (np.zeros((0, 3)), "is empty"),
        (np.array([0], np.int64), "is zero everywhere"),
        (np.array([3], np.int64), None),
        (np.array(2.5), None),
        (np.array([1.0, math.inf]), None),
        (np.array([1.0, 1.0, 1.0001]), None),
    ],
)
def test_references_without_signal(reference: np.ndarray, problem: str | None) -> None:
    assert signal_problem([reference]) == problem


@pytest.mark.parametrize(
    ("references", "problem"),
    [
        ([[0], [1], [0]], None),
        ([[0], [0], [0]], "is zero everywhere in all 3 samples"),
        ([[3], [3]], None),
        ([[0.0, 0.0], [0.5, 0.0]], None),
        ([[0.5, 0.5], [0.25, 0.25]], None),
        ([[0.5, 0.5], [0.5, 0.5]], "is the constant 0.5 in all 2 samples"),
        ([[1.0, 2.0], [math.nan, 1.0]], "has NaN in sample 1"),
        ([[], []], "is empty"),
        ([[True], [False]], None),
    ],
)
def test_the_signal_of_a_reference_is_that_of_all_samples(references: list[list[float]], problem: str | None) -> None:
    assert signal_problem([np.array(one) for one in references]) == problem


def test_equal_elements_include_nan_and_are_rounded_to_half_precision() -> None:
    third = np.array([1 / 3, math.nan, -math.inf, 0.1], np.float32)
    in_half = third.astype(np.float16).astype(np.float32)
    assert is_equal(third, third)
    assert not is_equal(in_half, third)
    assert is_equal(in_half, third, half=True)
    # As the simulator of QNN 2.51 gives torch.ones.
    almost = np.nextafter(np.ones(2, np.float32), 0, dtype=np.float32)
    assert is_equal(almost, np.ones(2, np.float32), half=True)
    assert not is_equal(np.nextafter(in_half.astype(np.float16), np.float16(0)), in_half.astype(np.float16), half=True)
    assert not is_equal(np.array([1, 2]), np.array([1, 3]), half=True)
