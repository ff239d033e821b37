"""A slower compiler is found in the same nightly run, by `farm run` and `farm perf confirm`, on the real simulator."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from planted import JOB, Planted, write_suite

from farm.results.analysis.suspected import LEAST_BASELINE
from farm.store.store import open_store

if TYPE_CHECKING:
    from farm_home import FarmHome


@pytest.mark.whole
def test_a_slower_compiler_is_found_the_same_night(home: FarmHome) -> None:
    planted = Planted(home, home.cwd, write_suite(home.cwd / "planted"))
    nights = [planted.run() for _ in range(LEAST_BASELINE)]
    # Twice the layers: seen on a busy machine as well.
    slower = planted.run(12)
    with open_store(home.state / "farm.db") as store:
        [alert] = [one for one in store.alerts.of_run(slower) if one.metric == "htp_cycles"]
        assert (alert.finding, alert.state) == ("regression", "suspected")
    told = planted.json("perf", "confirm", code=3)["findings"]
    assert told["run_id"] == slower
    [cycles] = [one for one in told["alerts"] if one["metric"] == "htp_cycles"]
    assert cycles["state"] == "confirmed"
    assert 0.2 < cycles["low"] < cycles["change"] < cycles["high"]
    assert (cycles["last_good"], cycles["first_bad"]) == (nights[-1], slower)
    assert "torchao" in cycles["guilt"]
    assert "htp_cycles" in (home.state / "runs" / slower / "report.html").read_text()
    # The next nightly run has the same level: it reports the known alert again, and with any noise no new one.
    same = planted.run(12)
    assert planted.json("perf", "confirm", "--run", same, code=0)["findings"]["run_id"] == same
    with open_store(home.state / "farm.db") as store:
        assert {one.state for one in store.alerts.of_run(same) if one.metric == "htp_cycles"} <= {"refuted"}
        assert [one.run_id for one in store.alerts.open() if one.metric == "htp_cycles"] == [slower]
    status = json.loads(home.farm("status", "--json").stdout)["status"]
    assert "htp_cycles" in {one["metric"] for one in status["regressions"]}
    assert JOB in home.farm("status").stdout
    # An even slower nightly run exits with 3, with the reason on its page.
    (home.cwd / "nightly.toml").write_text(_NIGHT)
    night = planted.json("nightly", "nightly.toml", code=3, layers=36)
    [cell] = night["night"]["cells"]
    assert {one["job_id"] for one in cell["findings"]["regressions"]} == {JOB}


_NIGHT = """
[nightly]
name = "planted"

[[run]]
name = "layers"
socs = ["SM8650"]
suites = ["./planted"]
virtual = 1
"""
