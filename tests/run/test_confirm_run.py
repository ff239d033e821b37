"""A worse compiler on the real simulator: times of its host raise no alert, and the size of a program does."""

from __future__ import annotations

import json

import pytest
from farm_home import FarmHome
from planted import JOB, Planted, write_suite

from farm.results.analysis.suspected import LEAST_BASELINE

_NIGHT = """
[nightly]
name = "planted"
report_dir = "reports"

[[run]]
name = "layers"
socs = ["SM8650"]
suites = ["./planted"]
virtual = 1
"""

# A dozen more layers with the same weights leave the size of a program as it is.
_LARGER = 100


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


@pytest.mark.whole
def test_a_nightly_run_whose_program_grew_exits_with_3(home: FarmHome) -> None:
    planted = Planted(home, home.cwd, write_suite(home.cwd / "planted"))
    night = home.cwd / "nightly.toml"
    night.write_text(_NIGHT)
    first, second = (
        home.farm("nightly", str(night), "--json", timeout_s=400, env=planted.env(layers)) for layers in (0, _LARGER)
    )
    assert first.returncode == 0, first.stderr
    assert second.returncode == 3, second.stderr
    [cell] = json.loads(second.stdout)["night"]["cells"]
    assert [one["job_id"] for one in cell["findings"]["regressions"]] == [JOB]
    assert "pte_size worse" in cell["findings"]["regressions"][0]["said"]
    assert cell["code"] == 3
