"""Statistics agree with numpy; packed samples are unpacked without loss."""

from __future__ import annotations

import math
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farm.store import values
from farm.suites.suite import Case, InputSpec

_FINITE = st.floats(-1e15, 1e15)


@given(st.lists(_FINITE, min_size=1, max_size=50))
def test_statistics_are_those_of_numpy(samples: list[float]) -> None:
    found = values.statistics_of(samples)
    array = np.array(samples)
    expected = {
        "min": array.min(),
        "p10": np.percentile(array, 10),
        "p50": np.median(array),
        "p90": np.percentile(array, 90),
        "p99": np.percentile(array, 99),
        "mean": array.mean(),
        "mad": np.median(np.abs(array - np.median(array))),
    }
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-3 * math.ulp(1e15) + 1e-9 * float(np.abs(array).max()))


@given(st.lists(st.floats(), max_size=20))
@example([sys.float_info.max] * 3)
@example([-sys.float_info.max] * 3)
def test_statistics_are_never_nan(samples: list[float]) -> None:
    assert not any(value is not None and math.isnan(value) for value in values.statistics_of(samples).values())


@given(st.lists(st.floats(), max_size=20))
def test_floats_come_back_bit_by_bit(samples: list[float]) -> None:
    back = values.unpack_floats(values.pack_floats(samples))
    assert values.pack_floats(back) == values.pack_floats(samples)
    assert str(list(back)) == str(samples)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_integers_come_back_and_other_numbers_are_stored_as_none(samples: list[int]) -> None:
    assert values.as_integers(samples) == samples
    assert values.unpack_integers(values.pack_integers(samples)) == tuple(samples)
    for other in ((), (0.5,), (1.0, math.inf), (math.nan,), (2**63,), (1e300,)):
        assert values.as_integers(other) is None


@given(st.text(st.characters(), max_size=300), st.integers(3, 100))
def test_clean_text_is_bounded_and_storable(text: str, limit: int) -> None:
    cleaned = values.clean(text, limit)
    assert len(cleaned) <= limit
    assert "\0" not in cleaned
    cleaned.encode()


def test_a_case_that_has_to_repeat_itself_is_another_one() -> None:
    # A program with a state is executed warm then, so that its latency begins another series.
    case = Case("mine", "one", ".nets:Last", (InputSpec((8,)),))
    versions = [
        values.case_version(msgspec.structs.replace(case, deterministic=one), "source") for one in (None, False, True)
    ]
    assert versions[0] == versions[1] != versions[2]
