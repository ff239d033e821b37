"""A shared farm whose server and hosts sign in as themselves, with passwords, over TLS, with the rights of a role."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from agent_hosts import SMOKE, agent_hosts
from farm_home import FarmHome
from postgresql_server import running_cluster
from receivers import LOOPBACK, make_certificate
from waiting import free_port

from farm.base.resources import data_folder
from farm.store.accounts import Role
from farm.store.store import open_store

PASSWORD = "correct-horse-7f3a"
LOGINS = {"web": "server", "host1": "agent", "vic": "reader"}

_WARM = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "add")

pytestmark = pytest.mark.whole


class Lab:
    """A server that lets in over TLS and with a password alone; `lab` owns the database, groups and logins are made."""

    def __init__(self, socket_folder: str, port: int, authority: Path, passwords: Path) -> None:
        self.folder, self.port, self.authority = socket_folder, port, authority
        passwords.write_text(f"{LOOPBACK}:{port}:lab:*:{PASSWORD}\n")
        passwords.chmod(0o600)
        self.sql("CREATE ROLE lab LOGIN", "CREATE DATABASE lab OWNER lab", database="postgres")
        local = f"postgresql://{{}}@/lab?host={socket_folder}&port={port}"
        with open_store(local.format("lab")) as store:
            store.messages.require()
        with open_store(local.format("farm")) as store:
            store.roles.apply()
        for name, group in LOGINS.items():
            self.sql(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}' IN ROLE farm_{group}")

    def sql(self, *statements: str, database: str = "lab") -> list[tuple[object, ...]]:
        where = f"host={self.folder} port={self.port} user=farm dbname={database}"
        with closing(psycopg.connect(where, autocommit=True)) as connection:
            for statement in statements:
                done = connection.execute(statement)  # type: ignore[arg-type]
            return done.fetchall() if done.description else []

    def url(self, user: str) -> str:
        return f"postgresql://{user}@{LOOPBACK}:{self.port}/lab?sslmode=verify-full&sslrootcert={self.authority}"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("tls")
    certificate = make_certificate(folder)
    port = free_port()
    settings = (f"listen_addresses={LOOPBACK}", f"port={port}", "ssl=on", "ssl_cert_file={folder}/loopback.pem",
                "ssl_key_file={folder}/loopback.pem")  # fmt: skip
    hba = f"local all all trust\nhostssl all all {LOOPBACK}/32 scram-sha-256\n"
    with (
        running_cluster(*settings, hba=hba, files=[certificate]) as socket_folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("PGPASSFILE", str(folder / "pgpass"))
        yield Lab(socket_folder, port, certificate, folder / "pgpass")


def test_a_run_over_tls_by_the_server_and_hosts_that_have_their_roles(
    lab: Lab, farm_cache: Path, toolchain: Path, tmp_path: Path
) -> None:
    compiled = FarmHome(farm_cache, tmp_path / "state", tmp_path)
    done = compiled.farm("run", "--soc", "SM8650", "--suite", "smoke", "--virtual", "1", timeout_s=300)
    assert done.returncode == 0, done.stderr
    with agent_hosts(tmp_path, lab.url("web"), toolchain, farm_cache) as hosts:
        hosts.url = lab.url("host1")
        hosts.host("left")
        hosts.registered("left")
        hosts.url = lab.url("web")

        done = hosts.you(*SMOKE, "-k", "add or gelu", code=0)
        assert "2 passed, 0 failed" in done.stdout
        assert lab.sql("SELECT DISTINCT user_name FROM run") == [("web",)]

        # Procrastinate's connections as well.
        query = "SELECT usename, application_name, ssl FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)"
        found = lab.sql(f"{query} WHERE datname = 'lab' AND usename <> 'farm'")
        assert ("host1", "farm messages", True) in found
        assert {row[2] for row in found} == {True}
        assert len([row for row in found if row[0] == "host1"]) <= 8

        shown = subprocess.run(["ps", "axeww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        for place in (shown, hosts.logs(), done.stdout, done.stderr):
            assert PASSWORD not in place

        # A user without a login of the database: a token, and a suite of her own with the content of farm's.
        with open_store(lab.url("web")) as store:
            token = store.accounts.add("ada", Role.DEVELOPER)
        laptop = FarmHome(tmp_path / "no-cache", tmp_path / "laptop-state", tmp_path / "laptop")
        for suite in ("smoke", "quantized_ops"):
            shutil.copytree(data_folder("test_suites") / suite, laptop.cwd / suite)
        with hosts.running("serve", "--port", "0", "--json") as server:
            assert server.stdout is not None
            there = {"FARM_SERVER": json.loads(server.stdout.readline())["url"], "FARM_TOKEN": token}
            own = ("run", "--soc", "SM8650", "--suite", "./smoke", "-k", "add or gelu", "--iterations", "2")
            followed = laptop.farm(*own, env=there, code=0)
            assert "2 passed, 0 failed" in followed.stdout
            watched = laptop.farm("runs", "watch", "latest", "--json", env=there, code=0)
            again = json.loads(watched.stdout)
            assert (again["user"], again["summary"]["counts"]["passed"]) == ("ada", 2)
            assert "2 passed, 0 failed" in laptop.farm("run", "--resume", again["id"], env=there, code=0).stdout
            assert "unknown suite" in laptop.farm(*own[:4], "none", "--detach", env=there, code=2).stderr
        assert not (tmp_path / "laptop-state").exists()

        # Long enough for others to try and end it.
        submitted = hosts.you(*_WARM, "--iterations", "3000", "--detach", "--json", code=0)
        run_id = str(json.loads(submitted.stdout)["run"])
        hosts.url = lab.url("vic")
        hosts.home("vic")
        assert hosts.farm("vic", "status").returncode == 0
        assert hosts.farm("vic", "lab", "queue").returncode == 0
        for command in (("runs", "cancel", run_id, "--force"), _WARM):
            assert "set FARM_SERVER" in hosts.farm("vic", *command, code=8).stderr
        hosts.url = lab.url("host1")
        assert hosts.finished(run_id).exit_code == 0
        assert hosts.stop_agents() == {"left": 0}
        assert "permission denied" not in (tmp_path / "left" / "agent.log").read_text()
