"""Metrics beyond closeness."""

from __future__ import annotations

import math

import numpy as np
import pytest

from farm.results.measurements import measure
from farm.suites.figures import psnr_db, top1_agreement
from farm.suites.suite import Metric

LOGITS = np.array([[0.1, 2.0, -1.0], [3.0, 0.0, 1.0], [0.0, 0.5, 4.0], [1.0, 0.9, 0.8]], np.float32)


def test_top1_counts_positions_with_the_same_greatest_element() -> None:
    other = LOGITS * 0.5
    assert top1_agreement(other, LOGITS) == 1.0
    other[3] = 0.0, 1.0, 0.0
    assert top1_agreement(other, LOGITS) == 0.75
    assert top1_agreement(other.reshape(2, 2, 3), LOGITS.reshape(2, 2, 3)) == 0.75
    other[0] = np.nan
    assert top1_agreement(other, LOGITS) == 0.5


def test_psnr_is_against_the_range_of_the_reference() -> None:
    image = np.linspace(0.0, 1.0, 256, dtype=np.float32)
    assert psnr_db(image + np.float32(0.01), image) == pytest.approx(40.0, abs=0.01)
    assert psnr_db(image, image) == math.inf
    assert psnr_db(np.full_like(image, np.nan), image) == -math.inf


def test_a_metric_decides_where_it_has_a_limit() -> None:
    wrong = LOGITS[:, ::-1].copy()
    measured, problem = measure(Metric("top1"), [(LOGITS, LOGITS), (wrong, LOGITS)])
    assert (measured.metric, measured.unit, problem) == ("top1[0]", "1", "")
    assert measured.samples[0] == 1.0
    share = sum(measured.samples) / 2
    assert measure(Metric("tokens", output=2, least=1.0), [(LOGITS, LOGITS), (wrong, LOGITS)]) == (
        type(measured)("tokens[2]", "1", measured.direction, measured.samples),
        f"tokens {share:.4g} < 1",
    )
    _, problem = measure(Metric("psnr_db", least=30.0), [(LOGITS + 1, LOGITS)])
    assert problem.startswith("psnr ")
    assert problem.endswith(" < 30 dB")
