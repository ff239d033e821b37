"""A slower compiler on the real simulator: its host's times raise no alert, and are compared on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from planted import JOB, Planted, write_suite

from farm.results.analysis.suspected import LEAST_BASELINE

if TYPE_CHECKING:
    from farm_home import FarmHome


@pytest.mark.whole
def test_a_slower_compiler_is_no_alert_of_a_simulator_and_is_confirmed_on_request(home: FarmHome) -> None:
    planted = Planted(home, home.cwd, write_suite(home.cwd / "planted"))
    for _ in range(LEAST_BASELINE):
        planted.run()
    # Twice the layers: seen on a busy machine as well.
    slower = planted.run(12)
    found = planted.json("perf", "confirm", code=None)["findings"]
    assert found["run_id"] == slower
    assert not {"htp_cycles", "latency"} & {one["metric"] for one in found["alerts"]}
    [asked] = planted.json("perf", "confirm", JOB, code=3)["metrics"]
    assert (asked["metric"], asked["confirmation"]["answer"]) == ("htp_cycles", "confirmed")
    assert 0.2 < asked["confirmation"]["low"] < asked["confirmation"]["change"]
