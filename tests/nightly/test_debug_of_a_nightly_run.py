"""Nightly run with a wrong operator: `farm debug` runs once by itself, and the page shows the first wrong layer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from farm_home import FarmHome
from wrong_operator import FIRST_WRONG, write_wrong_suite

JOB = "wrong/broken[SM8650-htp-8a8w]"
NIGHT = """
[nightly]
name = "debug"
[[run]]
name = "wrong"
socs = ["SM8650"]
suites = ["./wrong"]
virtual = 1
"""
LIMIT = "\n[suite.tolerance.8a8w]\nfp32 = { sqnr_db = 20.0 }\n"


def nightly_run(home: FarmHome) -> dict[str, Any]:
    done = home.farm("nightly", "nightly.toml", "--json", timeout_s=580, code=1)
    answer: dict[str, Any] = json.loads(done.stdout)["nightly_run"]
    return answer


@pytest.mark.whole
def test_a_new_numeric_failure_is_debugged_in_its_first_nightly_run_alone(home: FarmHome) -> None:
    suite = write_wrong_suite(home.cwd / "wrong")
    with (suite / "suite.toml").open("a") as file:
        file.write(LIMIT)
    (home.cwd / "nightly.toml").write_text(NIGHT)
    first = nightly_run(home)
    [cell] = first["cells"]
    [debugged] = cell["debugged"]
    assert (debugged["job_id"], debugged["layer"]) == (JOB, FIRST_WRONG)
    assert debugged["reason"].startswith(f"first divergence: {FIRST_WRONG} (aten.convolution.default), likely cause: ")
    assert "; in module two, wrong/models.py:" in debugged["reason"]
    reports = home.state / "nightly" / "debug"
    folder = reports / first["id"]
    picture = (folder / debugged["picture"]).read_text()
    assert FIRST_WRONG in picture
    assert "✗ compiler" in picture
    assert FIRST_WRONG in (folder / debugged["report"]).read_text()
    for page in (folder / "index.html", reports / "index.html"):
        text = page.read_text()
        section = text[text.index('<section id="layers"') :].partition("</section>")[0]
        assert debugged["reason"].split(" (")[0] in section
        assert 'src="data:image/svg+xml;base64,' in section
        assert f'{debugged["report"]}"' in section
    second = nightly_run(home)
    [cell] = second["cells"]
    assert cell["debugged"] == []
    assert [one["job_id"] for one in cell["still_failing"]] == [JOB]
    assert 'id="layers"' not in (reports / "index.html").read_text()
