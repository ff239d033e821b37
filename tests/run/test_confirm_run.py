"""A worse compiler on the real simulator: the size of a program raises an alert."""

from __future__ import annotations

import pytest
from farm_home import FarmHome
from planted import JOB, Planted, write_suite

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
_LARGER = 48


@pytest.mark.whole
def test_a_nightly_run_whose_program_grew_exits_with_3(home: FarmHome) -> None:
    planted = Planted(home, home.cwd, write_suite(home.cwd / "planted"))
    night = home.cwd / "nightly.toml"
    night.write_text(_NIGHT)
    _, second = (
        home.json("nightly", str(night), timeout_s=400, env=planted.env(layers), code=code)
        for layers, code in ((0, 0), (_LARGER, 3))
    )
    [cell] = second["nightly_run"]["cells"]
    assert [one["job_id"] for one in cell["findings"]["regressions"]] == [JOB]
    assert "pte_size worse" in cell["findings"]["regressions"][0]["reason"]
    assert cell["code"] == 3
