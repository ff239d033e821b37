"""A slower compiler is found the same night, by what `farm run` and `farm confirm` do, on the real simulator."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from planted import JOB, Planted, write_suite

from farm.store.store import open_store

if TYPE_CHECKING:
    from farm_home import FarmHome

NIGHTS = 9


@pytest.mark.whole
def test_eight_per_cent_more_cycles_are_found_the_same_night(home: FarmHome) -> None:
    planted = Planted(home, home.cwd, write_suite(home.cwd / "planted"))
    nights = [planted.run() for _ in range(NIGHTS)]
    # One layer more, of twelve.
    slower = planted.run(1)
    with open_store(home.state / "farm.db") as store:
        [alert] = [one for one in store.alerts.of_run(slower) if one.metric == "htp_cycles"]
        assert (alert.finding, alert.state) == ("regression", "candidate")
    told = planted.json("confirm", code=3)["findings"]
    assert told["run_id"] == slower
    found = {one["metric"]: one for one in told["alerts"]}
    cycles = found["htp_cycles"]
    assert cycles["state"] == "confirmed"
    assert 0.02 < cycles["low"] < cycles["change"] < cycles["high"] < 0.2
    assert (cycles["last_good"], cycles["first_bad"]) == (nights[-1], slower)
    assert "torchao" in cycles["guilt"]
    # The next night, on the same level, says nothing new, and what is known is told again.
    same = planted.run(1)
    with open_store(home.state / "farm.db") as store:
        assert "htp_cycles" not in {one.metric for one in store.alerts.of_run(same)}
        assert "htp_cycles" in {one.metric for one in store.alerts.open()}
    status = json.loads(home.farm("status", "--json").stdout)["status"]
    assert "htp_cycles" in {one["metric"] for one in status["regressions"]}
    assert JOB in home.farm("status").stdout
