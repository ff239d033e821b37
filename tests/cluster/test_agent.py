"""Whole shared farms: PostgreSQL, virtual devices, agents as processes, a build host, TLS and roles."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import yaml
from farm_home import FarmHome
from forked_command import command
from postgresql_server import running_cluster
from programs import require_code, run_program
from receivers import LOOPBACK
from three_hosts import SMOKE, AgentHosts, agent_hosts
from waiting import free_port

from farm.base.paths import data_folder
from farm.results.attempt import Verdict
from farm.store.accounts import Role
from farm.store.records import PROTOCOL
from farm.store.store import open_store

# `farm lab agent` on real parts: PostgreSQL, virtual devices, slots and agents as processes.


pytestmark = pytest.mark.whole


@pytest.fixture
def hosts(address: str, compiled: Path, toolchain: Path, tmp_path: Path) -> Iterator[AgentHosts]:
    """Yield the host `left`, whose agent runs."""
    with agent_hosts(tmp_path, address, toolchain, compiled) as hosts:
        hosts.host("left")
        hosts.registered("left")
        yield hosts


def held_leases(hosts: AgentHosts) -> list[tuple[str, ...]]:
    return hosts.rows("select device from lease where token <> ''")


def test_an_agent_runs_what_is_submitted_and_ends_when_it_is_told_to(hosts: AgentHosts) -> None:
    done = hosts.you(*SMOKE, "-k", "add or gelu", code=0)
    assert "2 passed, 0 failed" in done.stdout
    assert "virtual-left-0" in hosts.you("lab", "agent", "list").stdout
    # A cancelled run, whose jobs would take minutes, is broken off.
    run_id = hosts.detached("--iterations", "100000")
    hosts.until(lambda: hosts.sessions("left"), "the job runs")
    hosts.you("runs", "cancel", run_id, code=0)
    hosts.until(lambda: not held_leases(hosts), "the device is free")
    count = "select count(*) from attempt join run_job on run_job.id = run_job_id where run_id = %s"
    assert hosts.rows(count, run_id) == [(0,)]
    assert hosts.stop_agents() == {"left": 0}
    # Nothing of ours is left on the device, nor in the farm.
    assert not hosts.sessions("left")
    assert held_leases(hosts) == []
    assert "no agent" in hosts.you("lab", "agent", "list").stdout


def test_a_host_that_is_drained_finishes_its_job_and_leaves_the_rest_to_others(hosts: AgentHosts) -> None:
    hosts.you("lab", "agent", "drain", "nobody", code=2)
    run_id = hosts.detached("--iterations", "300")
    verdicts = "select run_job_id, verdict from attempt join run_job on run_job.id = run_job_id where run_id = %s"
    hosts.until(lambda: hosts.rows(verdicts, run_id), "the first result")
    hosts.you("lab", "agent", "drain", "left", code=0)
    assert hosts.agents["left"].wait(30) == 0
    assert held_leases(hosts) == []
    [(left,)] = hosts.rows("select sum(remaining) from shard where state = 'waiting'")
    assert left > 0
    hosts.host("right")
    hosts.until(lambda: hosts.rows("select 1 from run where id = %s and exit_code = 0", run_id), "its end", 90)
    found = hosts.rows(verdicts, run_id)
    assert len(found) == len(dict(found)) == 8
    assert set(dict(found).values()) == {Verdict.PASSED}


def test_a_second_agent_of_a_host_is_refused_and_one_of_another_version(hosts: AgentHosts) -> None:
    again = hosts.farm("left", "lab", "agent", "--name", "left", code=11)
    assert "runs on this host already" in again.stderr
    hosts.attach("right", ["SM8650"])
    changed = "update agent set facts = replace(facts, %s, %s) returning name"
    assert hosts.rows(changed, f'"protocol":{PROTOCOL}', f'"protocol":{PROTOCOL + 1}') == [("left",)]
    newer = hosts.farm("right", "lab", "agent", "--name", "right", code=11)
    assert "update farm on this host" in newer.stderr


# A shared farm as docs/guides/three_hosts.md sets it up: TLS, passwords, and the rights of a role for each login.


PASSWORD = "correct-horse-7f3a"
_FILES = Path(__file__).resolve().parents[2] / "examples" / "shared_farm"


class Lab:
    """Server of the page: settings of its compose file, pg_hba.conf, farm.toml and logins."""

    def __init__(self, socket_folder: str, port: int, folder: Path) -> None:
        self._socket_folder, self._port, self._folder = socket_folder, port, folder
        self.sql(f"CREATE ROLE lab LOGIN PASSWORD '{PASSWORD}'", "CREATE DATABASE farm OWNER lab", dbname="postgres")
        (folder / "pgpass").write_text(f"*:*:*:*:{PASSWORD}\n")
        (folder / "pgpass").chmod(0o600)
        shutil.copy(_FILES / "farm.toml", folder)
        shutil.copy(folder / "server.crt", folder / "lab-ca.pem")
        with open_store(self.url("lab")) as store:
            store.messages.require()
        self.sql(self.farm("lab", "lab", "roles").stdout, (_FILES / "logins.sql").read_text())
        self.sql(*(f"ALTER ROLE {name} PASSWORD '{PASSWORD}'" for name in ("web", "host_a", "wall")))

    def sql(self, *statements: str, dbname: str = "farm") -> list[tuple[object, ...]]:
        """Ask as the superuser, who signs in by the socket without a password: here the user of this test."""
        place = {"host": self._socket_folder, "port": self._port, "user": "farm", "dbname": dbname}
        with psycopg.connect(**place, autocommit=True) as connection:  # type: ignore[arg-type]
            for statement in statements:
                done = connection.execute(statement)  # type: ignore[arg-type]
            return done.fetchall() if done.description else []

    def url(self, user: str, more: str = "verify-full", dbname: str = "farm") -> str:
        crt = self._folder / "server.crt"
        return f"postgresql://{user}@{LOOPBACK}:{self._port}/{dbname}?sslmode={more}&sslrootcert={crt}"

    def farm(self, user: str, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run `farm` as a login, with the page's farm.toml; its server has no name in this machine's network."""
        own = {"PGHOSTADDR": LOOPBACK, "PGPORT": str(self._port), "PGUSER": user, "COLUMNS": "80"}
        done = command(arguments, env={**os.environ, **own}, cwd=self._folder)
        require_code(done, code)
        return done


def _settings() -> list[str]:
    """Return the settings of PostgreSQL in the compose file, with the paths of the test's server."""
    service = yaml.safe_load((_FILES / "compose.yml").read_text())["services"]["postgres"]
    words = service["command"]
    settings = [value for name, value in zip(words[1::2], words[2::2], strict=True) if name == "-c"]
    for volume in service["volumes"]:
        source, path, *_ = volume.split(":")
        settings = [value.replace(path, f"{{folder}}/{Path(source).name}") for value in settings]
    return [value for value in settings if not value.startswith("hba_file")]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder, port = tmp_path_factory.mktemp("lab"), free_port()
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=labserver"]
    argv += ["-addext", f"subjectAltName=DNS:labserver,IP:{LOOPBACK}", "-keyout", "server.key", "-out", "server.crt"]
    run_program(argv, cwd=folder)
    settings = (*_settings(), f"listen_addresses={LOOPBACK}", f"port={port}")
    hba = (_FILES / "pg_hba.conf").read_text().replace("postgres       peer", "farm           trust")
    files = [folder / "server.crt", folder / "server.key"]
    with running_cluster(*settings, hba=hba, files=files) as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PGPASSFILE", str(folder / "pgpass"))
        yield Lab(place, port, folder)


def test_logins_need_tls_and_a_password_and_have_their_rights(lab: Lab) -> None:
    for wrong in (lab.url("web", "disable"), lab.url("web", dbname="postgres"), lab.url("web:eve")):
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(wrong)
    assert lab.farm("web", "lab", "queue").stdout == "nothing waits and nothing runs\n"
    assert "no agent" in lab.farm("wall", "lab", "agent", "list").stdout
    assert "Traceback" not in lab.farm("wall", "lab", "quota", "user:ada", "4", code=8).stderr


def test_a_run_over_tls_under_roles(lab: Lab, compiled: Path, toolchain: Path, tmp_path: Path) -> None:
    with agent_hosts(tmp_path, lab.url("web"), toolchain, compiled) as hosts:
        hosts.url = lab.url("host_a")
        hosts.host("left")
        hosts.registered("left")
        hosts.url = lab.url("web")

        done = hosts.you(*SMOKE, "-k", "add or gelu", code=0)
        assert "2 passed, 0 failed" in done.stdout
        assert lab.sql("SELECT DISTINCT user_name FROM run") == [("web",)]

        # Procrastinate's connections as well.
        query = "SELECT usename, application_name, ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)"
        found = lab.sql(f"{query} WHERE datname = 'farm' AND usename <> 'farm'")
        assert ("host_a", "farm messages", True) in found
        assert {row[2] for row in found} == {True}
        assert len([row for row in found if row[0] == "host_a"]) <= 8

        shown = subprocess.run(["ps", "axeww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        for place in (shown, hosts.logs(), done.stdout, done.stderr):
            assert PASSWORD not in place

        # A user without a login of the database: a token, and a suite of her own with the content of farm's.
        with open_store(lab.url("web")) as store:
            token = store.accounts.add("ada", Role.DEVELOPER)
        laptop = FarmHome(tmp_path / "no-cache", tmp_path / "laptop-state", tmp_path / "laptop")
        for suite in ("smoke", "quantized_ops"):
            shutil.copytree(data_folder("test_suites") / suite, laptop.cwd / suite)
        web = FarmHome(hosts.cache, tmp_path / "you" / "state", tmp_path / "you")
        with web.running("serve", "--port", "0", "--json", env=hosts.env("you")) as server:
            assert server.stdout is not None
            there = {"FARM_SERVER": json.loads(server.stdout.readline())["url"], "FARM_TOKEN": token}
            own = ("run", "--soc", "SM8650", "--suite", "./smoke", "-k", "add or gelu", "--iterations", "2")
            followed = laptop.farm(*own, env=there, code=0)
            assert "2 passed, 0 failed" in followed.stdout
            watched = laptop.farm("runs", "watch", "latest", "--json", env=there, code=0)
            again = json.loads(watched.stdout)
            assert (again["user"], again["summary"]["counts"]["passed"]) == ("ada", 2)
            assert "2 passed, 0 failed" in laptop.farm("run", "--resume", again["id"], env=there, code=0).stdout
        assert not (tmp_path / "laptop-state").exists()

        # Long enough for others to try and end it.
        run_id = hosts.detached("-k", "add", "--iterations", "3000")
        hosts.url = lab.url("wall")
        hosts.home("wall")
        hosts.farm("wall", "status", code=0)
        for words in (("runs", "cancel", run_id, "--force"), (*SMOKE, "-k", "add")):
            assert "set FARM_SERVER" in hosts.farm("wall", *words, code=8).stderr
        hosts.url = lab.url("host_a")
        hosts.until(lambda: hosts.rows("select 1 from run where id = %s and exit_code = 0", run_id), "its end", 90)
        assert hosts.stop_agents() == {"left": 0}
        assert "permission denied" not in (tmp_path / "left" / "agent.log").read_text()
