"""Commands that read find the files of a run on a machine that has run nothing of it, through a place of S3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_hosts import SMOKE, AgentHosts, agent_hosts
from chaos_store import PostgresStore, postgres_cluster
from farm_home import FarmHome
from s3_server import KEYS, S3Server

from farm.base.processes import Supervisor

BUCKET = "farm-readers"

pytestmark = pytest.mark.whole


@pytest.fixture
def hosts(farm_cache: Path, toolchain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentHosts]:
    import s3fs

    home = FarmHome(farm_cache, tmp_path / "compiled", tmp_path)
    assert home.farm("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1", timeout_s=600).returncode == 0
    with Supervisor() as supervisor, postgres_cluster() as cluster:
        if isinstance(cluster, str):
            pytest.skip(cluster)
        server = S3Server(supervisor, tmp_path).start()
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        s3fs.S3FileSystem(endpoint_url=server.url, skip_instance_cache=True).mkdir(BUCKET)
        (tmp_path / "hosts").mkdir()
        with agent_hosts(tmp_path / "hosts", PostgresStore(cluster, "farm").url, toolchain, farm_cache) as made:
            for file in (tmp_path / "hosts").glob("*/farm.toml"):
                use_bucket(file, server)
            made.home("attic")
            made.home("desk")
            for name in ("attic", "desk"):
                use_bucket(tmp_path / "hosts" / name / "farm.toml", server)
            yield made


def use_bucket(file: Path, server: S3Server) -> None:
    lines = file.read_text().splitlines()
    lines = [f'artifacts = "{server.address(BUCKET)}"' if line.startswith("artifacts") else line for line in lines]
    file.write_text("\n".join(lines) + "\n")


def test_files_and_bundles_of_a_run_are_found_on_any_machine(hosts: AgentHosts, tmp_path: Path) -> None:
    hosts.host("attic")
    hosts.registered("attic")
    done = hosts.you(*SMOKE, "--profile", "detailed", "--json", timeout_s=150, code=0)
    jobs = json.loads(done.stdout)["jobs"]
    job = jobs[0]["id"]
    # Nothing of it stays on the host that ran it.
    assert not [path for path in (hosts.folder / "attic/state/artifacts").rglob("*") if path.is_file()]
    shown = hosts.farm("desk", "show", job, "--json", code=0)
    [etdump] = [one for one in json.loads(shown.stdout)["files"] if one["kind"] == "etdump"]
    assert Path(etdump["path"]).stat().st_size == etdump["size"]
    assert Path(etdump["path"]).is_relative_to(hosts.folder / "desk")
    hosts.farm("desk", "jobs", "profile", job, "--artifacts", str(tmp_path / "out"), code=0)
    assert [path.stat().st_size for path in (tmp_path / "out").iterdir()] == [etdump["size"]]
    page = tmp_path / "report.html"
    assert hosts.farm("desk", "report", "--html", str(page)).returncode == 0
    # The files behind the report's links are on this machine: a file for each job.
    assert len({path.parent.name for path in (hosts.folder / "desk/cache/objects").glob("*/*/content")}) >= len(jobs)
    # The bundle that was executed comes from where the farm keeps it: nothing is compiled for it.
    repro = hosts.farm("desk", "jobs", "rerun", job, "--virtual", "1", timeout_s=300, code=0)
    assert "building it again" not in repro.stdout + repro.stderr
    assert len(list((hosts.folder / "desk/cache/bundles").glob("*/*/manifest.json"))) >= 1
    for text in (done.stdout + done.stderr, hosts.logs(), page.read_text()):
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in text
