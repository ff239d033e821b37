"""The real thing: agents, a build host and virtual devices give the verdicts that one machine gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from three_hosts import SOCS, run_json, selection, three_hosts

# A few jobs a SoC; the whole suite: tests/three_hosts.py.
_KEYWORD = "relu6 or addmm"


@pytest.mark.whole
def test_three_hosts_give_the_verdicts_of_one_machine(
    new_store: Callable[[str], str], toolchain: Path, farm_cache: Path, tmp_path: Path
) -> None:
    chosen = selection("quantized_ops", _KEYWORD, SOCS)
    with three_hosts(tmp_path, new_store("three_hosts"), toolchain, hashes=farm_cache / "hashes") as hosts:
        done = run_json(hosts.farm("you", "run", *chosen, "--profile", "detailed", "--json"))
        shared = hosts.verdicts(done, shared=True)
        assert {job.partition("[")[2].partition("-")[0] for job in shared} == set(SOCS)
        # The person's machine compiled nothing.
        assert not list((tmp_path / "you" / "cache").glob("bundles/*"))
        # Files and bundles of the run are found on a machine that has run nothing of it.
        job = done["jobs"][0]["id"]
        shown = json.loads(hosts.farm("desk", "show", job, "--json", code=0).stdout)
        [etdump] = [one for one in shown["files"] if one["kind"] == "etdump"]
        assert Path(etdump["path"]).is_relative_to(tmp_path / "desk")
        assert Path(etdump["path"]).stat().st_size == etdump["size"]
        hosts.farm("desk", "report", "--html", "report.html", code=0)
        rerun = hosts.farm("desk", "jobs", "rerun", job, "--virtual", "1", code=0)
        assert "building it again" not in rerun.stdout + rerun.stderr
        assert hosts.stop_agents() == {"builder": 0, "left": 0, "right": 0}
        alone = hosts.farm("alone", "run", *chosen, "--virtual", "2", "--json")
        assert hosts.verdicts(run_json(alone), shared=False) == shared
