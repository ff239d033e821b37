"""The real thing: agents, a build host and virtual devices give the verdicts that one machine gives."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos_store import PostgresStore, postgres_cluster
from three_hosts import SOCS, run_json, selection, three_hosts

# A few jobs a SoC; the whole suite: tests/three_hosts.py.
_KEYWORD = "relu6 or addmm"


@pytest.mark.whole
def test_three_hosts_give_the_verdicts_of_one_machine(toolchain: Path, farm_cache: Path, tmp_path: Path) -> None:
    chosen = selection("quantized_ops", _KEYWORD, SOCS)
    with postgres_cluster() as cluster:
        if isinstance(cluster, str):
            pytest.skip(cluster)
        url, hashes = PostgresStore(cluster, "farm").url, farm_cache / "hashes"
        with three_hosts(tmp_path, url, toolchain, hashes=hashes) as hosts:
            done = run_json(hosts.farm("you", "run", *chosen, "--json"))
            shared = hosts.verdicts(done, shared=True)
            assert {job.partition("[")[2].partition("-")[0] for job in shared} == set(SOCS)
            # The person's machine compiled nothing, and no bundle was made twice.
            assert not list((tmp_path / "you" / "cache").glob("bundles/*"))
            again = hosts.verdicts(run_json(hosts.farm("you", "run", *chosen, "--json")), shared=True)
            assert again == shared
            assert hosts.stop_agents() == {"builder": 0, "left": 0, "right": 0}
            alone = hosts.farm("alone", "run", *chosen, "--virtual", "2", "--json")
            assert hosts.verdicts(run_json(alone), shared=False) == shared
