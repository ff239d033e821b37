"""Real processes that compete for devices and are killed meanwhile; bench/leases.py is the same with 200 of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import run_program


@pytest.mark.whole
def test_nobody_ever_shares_a_device(address: str) -> None:
    bench = Path(__file__).parents[2] / "bench" / "leases.py"
    words = ["--processes", "12", "--devices", "4", "--seconds", "6", "--store", address]
    done = run_program([sys.executable, bench, *words], timeout_s=120)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["double"], said["left"]) == (0, 0), said
    # All living processes got devices in spite of the killed ones.
    assert said["grants"] >= 8, said
    assert said["person_grants"] >= 1, said
    assert said["killed"] >= 1, said
