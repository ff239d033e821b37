"""A compiler that makes larger programs is found in the same nightly run, on the real simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from planted import JOB, Planted, write_suite

from farm.results.analysis.suspected import LEAST_BASELINE
from farm.store.store import open_store

if TYPE_CHECKING:
    from farm_home import FarmHome


@pytest.mark.whole
def test_a_compiler_that_adds_layers_is_found_the_same_night(home: FarmHome) -> None:
    planted = Planted(home, home.cwd, write_suite(home.cwd / "planted"))
    nights = [planted.run() for _ in range(LEAST_BASELINE)]
    slower = planted.run(12)
    told = planted.json("perf", "confirm", code=3)["findings"]
    assert told["run_id"] == slower
    # Times and cycles of the simulator are those of its host.
    assert not {"htp_cycles", "latency"} & {one["metric"] for one in told["alerts"]}
    [size] = [one for one in told["alerts"] if one["metric"] == "pte_size"]
    assert (size["finding"], size["state"]) == ("regression", "exact")
    assert (size["last_good"], size["first_bad"]) == (nights[-1], slower)
    assert "pte_size" in (home.state / "runs" / slower / "report.html").read_text()
    # The next nightly run has the same level, and no new finding.
    same = planted.run(12)
    assert planted.json("perf", "confirm", "--run", same, code=0)["findings"]["alerts"] == []
    with open_store(home.state / "farm.db") as store:
        assert [one.run_id for one in store.alerts.open() if one.metric == "pte_size"] == [slower]
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
