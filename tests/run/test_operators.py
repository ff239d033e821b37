"""Operator suites on the simulator: half of the operators, coverage, and errors caught by the limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome
from mutations import check_mutations

from farm.suites.manifests import find_suites, resolve_suite

TABLE = Path(__file__).parents[2] / "test_suites" / "quantized_ops" / "operators.json"
ALL = ("--suite", "quantized_ops", "--suite", "fp_ops")


def cases_of_operators() -> list[str]:
    """Return the first case of each operator that the backend builds; a case stands for its rarest operator.

    As in the table of `farm jobs coverage`: a second case of an operator takes the same path through compiler and
    simulator.
    """
    operators = json.loads(TABLE.read_text())["cases"]
    names = [case.name for case in resolve_suite("quantized_ops", find_suites()).cases if case.name in operators]
    often = Counter(operator for name in names for operator in set(operators[name]))
    found: dict[str, str] = {}
    for name in names:
        fewest = min(often[operator] for operator in operators[name])
        about = [operator for operator in operators[name] if often[operator] == fewest]
        found |= {operator: name for operator in about if operator not in found}
    return sorted(set(found.values()))


def half_of_operators() -> tuple[str, ...]:
    """Return words of `farm run` for the first of every two cases; tests/run/test_run.py has others."""
    names = " or ".join(f"/{name}[" for name in cases_of_operators()[::2])
    return "--suite", "quantized_ops", "-k", f"8a8w and ({names})"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(half_of_operators, marks=pytest.mark.whole),
        pytest.param(lambda: ALL, marks=pytest.mark.soak),
    ],
    ids=["half of the operators in 8a8w", "all"],
)
def ran(
    request: pytest.FixtureRequest, farm_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[FarmHome, dict[str, Any]]:
    """Half of the operators; before a release the main job, with all that it has."""
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("operators"))
    done = home.farm("run", "--soc", "SM8650", *request.param(), "--virtual", "2", "--json", timeout_s=3000)
    view = json.loads(done.stdout) if done.stdout else {"jobs": []}
    assert done.returncode == 0, (done.returncode, _red(view), done.stderr[-2000:])
    return home, view


def _red(view: dict[str, Any]) -> list[tuple[str, list[Any]]]:
    """Return the jobs with an unexpected result, with the facts of each of their attempts."""
    wanted = ("device", "verdict", "stage", "cause", "reason", "notes", "log")
    return [
        (job["id"], [[attempt[name][-600:] for name in wanted] for attempt in job["attempts"]])
        for job in view["jobs"]
        if not job["attempts"] or not (job["attempts"][-1]["verdict"] == "passed" or job["attempts"][-1]["known_issue"])
    ]


def _in_all_precisions(jobs: list[dict[str, Any]]) -> bool:
    return len({job["precision"] for job in jobs}) > 1


def test_every_job_passes_or_is_a_known_issue(ran: tuple[FarmHome, dict[str, Any]]) -> None:
    jobs = ran[1]["jobs"]
    assert len(jobs) >= (400 if _in_all_precisions(jobs) else 50)
    for job in jobs:
        attempt = job["attempts"][-1]
        assert attempt["verdict"] == "passed" or attempt["known_issue"], (job["id"], attempt["reason"])
        assert attempt["device"].startswith("virtual-SM8650-") or attempt["stage"] == "build", job["id"]
    assert sum(job["attempts"][-1]["verdict"] == "passed" for job in jobs) >= (400 if _in_all_precisions(jobs) else 45)


@pytest.mark.parametrize("ran", [pytest.param(lambda: ALL, marks=pytest.mark.soak, id="all")], indirect=True)
def test_every_builder_has_a_job_that_used_it(ran: tuple[FarmHome, dict[str, Any]]) -> None:
    home, _ = ran
    table = home.json("jobs", "coverage", "--soc", "SM8650")
    assert len(table["builders"]) > 100
    assert [row["name"] for row in table["builders"] if not row["cells"] and not row["without"]] == []


@pytest.mark.parametrize("ran", [pytest.param(lambda: ALL, marks=pytest.mark.soak, id="all")], indirect=True)
def test_the_table_of_operators_is_up_to_date(ran: tuple[FarmHome, dict[str, Any]], tmp_path: Path) -> None:
    home, view = ran
    (tmp_path / "run.json").write_text(json.dumps(view))
    script = Path(__file__).parents[2] / "tools" / "generate_operators.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "run.json"), "--check"], check=True, env=home.env)


def test_what_is_broken_is_caught_by_the_limits(ran: tuple[FarmHome, dict[str, Any]], tmp_path: Path) -> None:
    home, view = ran
    tried = check_mutations(view, home.cache, tmp_path)
    assert sum(tried.values()) >= (1500 if _in_all_precisions(view["jobs"]) else 200), tried
