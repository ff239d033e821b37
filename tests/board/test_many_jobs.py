"""A booted board for half an hour: `-m soak`. `-m whole` runs the suite `smoke` on it."""

from __future__ import annotations

import json

import pytest
from farm_home import FarmHome

pytestmark = pytest.mark.soak


def test_of_two_hundred_jobs_none_is_infra(board_home: FarmHome) -> None:
    words = ("run", "--soc", "QCS9100", "--suite", "quantized_ops", "--backend", "xnnpack", "--json")
    done = board_home.farm(*words, timeout_s=3600)
    jobs = json.loads(done.stdout)["jobs"]
    verdicts = [attempt["verdict"] for job in jobs for attempt in job["attempts"]]
    assert len(jobs) >= 200
    assert "infra" not in verdicts, done.stderr[-4000:]
