"""Files of docs/guides/three_hosts.md: farm, systemd and a real PostgreSQL take them as they are."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from chaos_store import Cluster, postgres_cluster
from command_words import called_command, fault

from farm.base.config.settings import load_config
from farm.cli.main import cli

_ROOT = Path(__file__).resolve().parents[2]
_FILES = _ROOT / "examples" / "shared_farm"
_PAGE = _ROOT / "docs/guides/three_hosts.md"
_TESTS_OF_FAULTS = (
    "test_faults.py", "test_build_hosts.py", "test_client.py", "test_following.py", "test_lost_answers.py",
    "test_nightly_starts.py", "test_notices.py", "../store/test_cluster_races.py",
)  # fmt: skip
_ROW = re.compile(r"^\| ([^|]+) \| [^|]+ \| (`test_\w+`(?:, `test_\w+`)*) \|$", re.MULTILINE)


def test_everybody_has_one_farm_toml(tmp_path: Path) -> None:
    text = (_FILES / "farm.toml").read_text()
    (tmp_path / "lab-ca.pem").touch()
    others = re.findall(r"^# (artifacts = .*)$", text, re.MULTILINE)
    assert len(others) == 2
    for line in ("", *others):
        again = re.sub(r"^artifacts = .*$", line, text, flags=re.MULTILINE) if line else text
        (tmp_path / "farm.toml").write_text(again)
        config = load_config(folder=tmp_path)
        assert config.is_shared
        assert config.store_url.startswith("postgresql://labserver/farm?sslmode=verify-full")


def test_every_row_of_what_happens_when_x_dies_is_a_test() -> None:
    rows = dict(_ROW.findall(_PAGE.read_text().partition("## What happens when X dies")[2]))
    texts = [Path(__file__).parent.joinpath(name).read_text() for name in _TESTS_OF_FAULTS]
    tests = set(re.findall(r"^ *def (test_\w+)", "\n".join(texts), re.MULTILINE))
    assert len(rows) >= 18
    assert {name: cell for name, cell in rows.items() if not set(re.findall(r"\w+", cell)) <= tests} == {}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_understands_its_units(tmp_path: Path) -> None:
    for path in _FILES.glob("*.service"):
        # The program is not installed here.
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/farm/.venv/bin/farm", "/bin/true"))
    units = [str(path) for path in sorted(tmp_path.iterdir())]
    assert len(units) == 3
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="no systemd")
def test_systemd_makes_the_user_of_the_units(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    argv = ["systemd-sysusers", f"--root={tmp_path}", str(_FILES / "farm.sysusers.conf")]
    subprocess.run(argv, check=True, capture_output=True)
    assert re.search(r"^farm:.*:/var/lib/farm:", (tmp_path / "etc/passwd").read_text(), re.MULTILINE)
    assert re.search(r"^plugdev:.*:farm$", (tmp_path / "etc/group").read_text(), re.MULTILINE)


def test_units_and_images_call_commands_with_their_options() -> None:
    texts = [path.read_text() for path in (*_FILES.glob("*.service"), _FILES / "Dockerfile")]
    calls = [found.split() for text in texts for found in re.findall(r"^ExecStart=\S+ (.*)$", text, re.MULTILINE)]
    calls += [json.loads(found) for text in texts for found in re.findall(r"^CMD (.*)$", text, re.MULTILINE)]
    assert len(calls) == 5
    for words in calls:
        assert called_command(words)[0] is not cli
        assert fault(["farm", *words]) == ""


def test_the_units_come_back_unless_they_were_drained() -> None:
    for path in _FILES.glob("*.service"):
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read(path)
        service = unit["Service"]
        if service["ExecStart"].split()[1:3] == ["lab", "agent"]:
            assert service["KillMode"] == "mixed"
        assert service["User"] == "farm"
        # Drained, an agent ends with 0 and stays down; killed, it is started again.
        assert service["Restart"] == "on-failure"
        assert "2" in service["RestartPreventExitStatus"].split()
        assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.whole
def test_the_page_sets_up_a_farm(tmp_path: Path) -> None:
    """PostgreSQL runs with the compose file's settings and pg_hba.conf, without docker; commands come from the page."""
    import psycopg

    service = yaml.safe_load((_FILES / "compose.yml").read_text())["services"]["postgres"]
    settings = _settings(service)
    _certificate(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    settings += ["listen_addresses=127.0.0.1", f"port={port}"]
    with postgres_cluster(hba="local all all trust\n") as cluster:
        if isinstance(cluster, str):
            pytest.skip(cluster)
        where = {"host": str(cluster.folder), "user": "farm"}
        with psycopg.connect(**where, dbname="postgres", autocommit=True) as connection:
            connection.execute("CREATE ROLE lab LOGIN PASSWORD 'lab''s'")
            connection.execute("CREATE DATABASE farm OWNER lab")
        _use_files(cluster, tmp_path)
        cluster.start([value.format(folder=cluster.folder) for value in settings])
        you = _machine(tmp_path, port)
        script = you("lab", "lab", "roles").stdout
        # Over the socket only the user of the server signs in without a password (peer): here the user of this test.
        _sql(cluster, port, script)
        _sql(cluster, port, (_FILES / "logins.sql").read_text())
        for name in ("host_a", "web", "wall"):
            _sql(cluster, port, f"ALTER ROLE {name} PASSWORD '{name}''s'")
        there = {"host": "labserver", "hostaddr": "127.0.0.1", "port": str(port), "dbname": "farm", "user": "web"}
        safe = {"sslmode": "verify-full", "sslrootcert": str(tmp_path / "server.crt")}
        with psycopg.connect(**there, **safe, password="web's") as connection:
            assert connection.execute("SELECT session_user").fetchone() == ("web",)
        for wrong in ({"sslmode": "disable", "password": "web's"}, {**safe, "password": "eve's"}):
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(**{**there, **wrong})
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(**{**there, **safe, "dbname": "postgres", "password": "web's"})
        assert you("web", "lab", "queue").stdout == "nothing waits and nothing runs\n"
        assert "no agent" in you("wall", "lab", "agent", "list").stdout
        refused = you("wall", "lab", "quota", "user:ada", "4", code=None)
        assert refused.returncode not in (0, 70)
        assert "Traceback" not in refused.stderr


def _settings(service: dict[str, Any]) -> list[str]:
    command = service["command"]
    assert command[0] == "postgres"
    settings = [value for name, value in zip(command[1::2], command[2::2], strict=True) if name == "-c"]
    for volume in service["volumes"]:
        source, path, *_ = volume.split(":")
        settings = [value.replace(path, f"{{folder}}/{Path(source).name}") for value in settings]
    return [value for value in settings if not value.startswith("hba_file")]


def _use_files(cluster: Cluster, folder: Path) -> None:
    cluster.stop()
    for name in ("server.crt", "server.key"):
        copy = cluster.folder / name
        shutil.copy(folder / name, copy)
        shutil.chown(copy, cluster.folder.owner(), cluster.folder.group())
        copy.chmod(0o600)
    hba = (_FILES / "pg_hba.conf").read_text()
    (cluster.folder / "data/pg_hba.conf").write_text(hba.replace("postgres       peer", "farm           trust"))


def _sql(cluster: Cluster, port: int, script: str) -> None:
    import psycopg

    with psycopg.connect(
        host=str(cluster.folder), port=port, user="farm", dbname="farm", autocommit=True
    ) as connection:
        connection.execute(script)  # type: ignore[call-overload]


def _machine(folder: Path, port: int) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs `farm` as a login, with the example's farm.toml and a file of passwords."""
    home = folder / "you"
    home.mkdir()
    shutil.copy(_FILES / "farm.toml", home)
    shutil.copy(folder / "server.crt", home / "lab-ca.pem")
    names = ("lab", "host_a", "web", "wall")
    (home / "pgpass").write_text("".join(f"labserver:*:farm:{name}:{name}'s\n" for name in names))
    (home / "pgpass").chmod(0o600)
    # There is no such name in this machine's network.
    own = {"PGHOSTADDR": "127.0.0.1", "PGPORT": str(port), "PGPASSFILE": str(home / "pgpass"), "COLUMNS": "80"}

    def run(user: str, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "farm.cli.main", *arguments]
        env = {**os.environ, **own, "PGUSER": user}
        done = subprocess.run(argv, cwd=home, env=env, capture_output=True, text=True, check=False)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        assert "'s" not in done.stdout + done.stderr or arguments[:2] == ("lab", "roles")
        return done

    return run


def _certificate(folder: Path) -> None:
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=labserver"]
    argv += ["-addext", "subjectAltName=DNS:labserver", "-keyout", "server.key", "-out", "server.crt"]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True, env={"PATH": os.environ["PATH"]})
