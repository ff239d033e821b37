"""Real processes that compete for devices and are killed meanwhile; bench/leases.py runs 200 of them.

tests/test_bench.py has the same on SQLite.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import run_program


@pytest.mark.whole
def test_no_two_processes_hold_a_device_at_once(shared_address: str) -> None:
    bench = Path(__file__).parents[2] / "bench" / "leases.py"
    words = ["--processes", "12", "--devices", "4", "--seconds", "6", "--store", shared_address]
    done = run_program([sys.executable, bench, *words], timeout_s=120)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["double"], found["left"]) == (0, 0), found
    # All living processes got devices in spite of the killed ones.
    assert found["grants"] >= 8, found
    assert found["person_grants"] >= 1, found
    assert found["killed"] >= 1, found
