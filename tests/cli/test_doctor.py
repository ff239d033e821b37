"""`farm doctor` as a user calls it, and the archive of `--bundle`, which has no secret."""

from __future__ import annotations

import json
import resource
import stat
import zipfile
from pathlib import Path

import pytest
from attached import rack
from farm_home import FarmHome

from farm.base.config.settings import Config, load_config
from farm.base.errors import UsageError
from farm.builds.runtime.inventory import Tool
from farm.cli.setup.doctor import write_bundle

# `farm doctor` as a user calls it.


NOTHING = {
    **dict.fromkeys(("QNN_SDK_ROOT", "ANDROID_NDK_ROOT", "HEXAGON_SDK_ROOT", "HEXAGON_TOOLS_ROOT"), ""),
    # No server listens on this port.
    "ANDROID_ADB_SERVER_PORT": "9",
}


def test_it_fits_on_a_screen_and_says_what_to_do(home: FarmHome, tmp_path: Path) -> None:
    done = home.farm("doctor", env={**NOTHING, "FARM_CACHE_DIR": str(tmp_path / "empty-cache")}, code=0)
    table, missing, direct, tools = done.stdout.split("\n\n")
    # Paths stand alone, to be copied.
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if not line.strip().startswith("/"))
    rows = table.splitlines()
    assert [row.split()[0] for row in rows[::2][:1] + rows[1::2]] == ["backend", "htp", "lpai", "gpu", "xnnpack"]
    assert [rows[2].strip(), rows[4].strip()] == ["all 21 SoCs", "SAR2230P, SM8850"]
    for variable in ("ANDROID_NDK_ROOT", "FARM_EXECUTORCH_BUILD", "QNN_SDK_ROOT", "FARM_EXECUTORCH_LINUX_BUILD"):
        assert f"    set {variable} to " in missing
    assert "--option direct_mode=true" in " ".join(direct.split())
    assert "no server on port 9" in tools
    remembered = {path.name for path in (tmp_path / "empty-cache").glob("*")}
    assert remembered <= {"hashes"}, "hashes of the files that it looked at, and nothing else"


@pytest.mark.parametrize(
    ("soc", "backend", "code"), [("SM8650", "htp", 0), ("SM8650", "gpu", 6), ("SM8850", "lpai", 6)]
)
def test_asked_for_one_the_exit_code_says_whether_it_runs(home: FarmHome, soc: str, backend: str, code: int) -> None:
    answer = home.json("doctor", "--soc", soc.lower(), "--backend", backend, env=NOTHING, code=code)
    (ability,) = answer["abilities"]
    assert (ability["soc"], ability["backend"]) == (soc, backend)
    assert ability["run"]["where"] == (["simulator"] if code == 0 else [])
    assert all(gap["repair"] for gap in ability["run"]["gaps"])
    assert {"QNN SDK", "Hexagon SDK", "adb", "torch"} <= {tool["name"] for tool in answer["tools"]}


def test_it_tells_which_devices_are_attached(home: FarmHome, tmp_path: Path) -> None:
    with rack(tmp_path / "rack", "SM8650") as one:
        answer = home.json("doctor", env={**NOTHING, **one.env})
    assert answer["adb"] == f"attached: {one.device.serial} (SM8650)"
    # A virtual device is none that GPU programs run on.
    [gpu] = [one for one in answer["abilities"] if (one["soc"], one["backend"]) == ("SM8650", "gpu")]
    assert gpu["run"]["where"] == []


# `farm doctor --bundle`: content of the archive, and no secret in it.


IN_ADDRESS, IN_QUERY = "w0rd in @ddress", "of-the-tls-key"
SECRETS = {
    "PGPASSWORD": "pgp4ss",
    "AWS_SECRET_ACCESS_KEY": "s3cret+of/S3",
    "AWS_SESSION_TOKEN": "session-of-S3",
    "FARM_TOKEN": "token-of-the-page",
    "HOOK": "https://hooks.example.com/T0/of-the-variable",
    "HOOK_AUTH": "bearer-of-the-hook",
}
IN_FILES = ("mail-p4ss", "of-pgpass", "of-aws-credentials", IN_ADDRESS, "w0rd%20in%20%40ddress", IN_QUERY)
FILE = """
store = "postgresql://farm:w0rd%20in%20%40ddress@db.example.com/farm?sslpassword=of-the-tls-key"
[paths]
state = "state"
cache = "cache"
[[notify.webhook]]
url_env = "HOOK"
token_env = "HOOK_AUTH"
[[notify.webhook]]
url = "https://hooks.example.com/address-in-the-file"
[notify.mail]
host = "mail.example.com"
from = "farm@example.com"
to = ["team@example.com"]
user_env = "MAIL_USER"
password_file = "mail-password"
[[device]]
serial = "R5CT1"
name = "left"
power = ["curl", "--user", "power-argument", "http://plug.example.com"]
[[device]]
address = {type = "relay", key = "relay-key"}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Configuration with every kind of secret, and logs in its state folder that have them all."""
    (tmp_path / "farm.toml").write_text(FILE)
    (tmp_path / "mail-password").write_text("mail-p4ss\n")
    (tmp_path / "pgpass").write_text("db.example.com:5432:*:farm:of-pgpass\n")
    (tmp_path / "aws").write_text("[default]\naws_secret_access_key = of-aws-credentials\n")
    for name, value in {**SECRETS, "MAIL_USER": "farm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "aws"))
    monkeypatch.delenv("FARM_STORE", raising=False)
    monkeypatch.delenv("FARM_STATE_DIR", raising=False)
    known = [*SECRETS.values(), *IN_FILES, "postgresql://other:another-password@db/farm"]
    known += ["https://hooks.example.com/address-in-the-file"]
    for name in ("agent/h1/agent.log", "agent/h1/agent.log.1", "agent/h1/logs/R5CT1.log", "runs/r1/logs/builder.log"):
        log = tmp_path / "state" / name
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("\n".join(f"the store refuses {secret}" for secret in known) + "\nlast line \x1b[2J\n")
    for name in ("farm.db", "agent/h1/token", "runs/r1/report.html", "artifacts/00/00ff"):
        other = tmp_path / "state" / name
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("no log")
    (tmp_path / "state/runs/r1/logs/elsewhere.log").symlink_to(tmp_path / "farm.toml")
    return load_config(tmp_path / "farm.toml")


def bundle(config: Config, path: Path) -> dict[str, str]:
    write_bundle(path, config, [Tool("executorch", "1.2.0", "/home/ada/venv")])
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


@pytest.mark.usefixtures("own_environment")
def test_it_has_versions_configuration_and_logs_and_no_secret(config: Config, tmp_path: Path) -> None:
    files = bundle(config, tmp_path / "farm.zip")
    assert set(files) == {
        "versions.json", "configuration.json", "logs/agent/h1/agent.log", "logs/agent/h1/agent.log.1",
        "logs/agent/h1/logs/R5CT1.log", "logs/runs/r1/logs/builder.log",
    }  # fmt: skip
    everything = "\n".join(files.values())
    of_tables = ("address-in-the-file", "power-argument", "relay-key", "another-password")
    assert [secret for secret in (*SECRETS.values(), *IN_FILES, *of_tables) if secret in everything] == []
    shown = json.loads(files["configuration.json"])
    assert shown["store_url"] == "postgresql://farm:***@db.example.com/farm?sslpassword=***"
    assert (shown["devices"][0]["name"], shown["devices"][0]["power"][0]) == ("left", "curl")
    assert shown["notify"]["webhook"][0]["url_env"] == "HOOK"
    assert json.loads(files["versions.json"])["tools"] == [{"name": "executorch", "version": "1.2.0", "problem": ""}]
    assert files["logs/agent/h1/agent.log"].endswith("last line \n")
    assert stat.S_IMODE((tmp_path / "farm.zip").stat().st_mode) == 0o600


@pytest.mark.usefixtures("own_environment")
def test_a_secret_is_not_cut_in_two(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.cli.setup.doctor._LOG_BYTES", 20)
    monkeypatch.setenv("PGPASSWORD", 'pa"ss\\word')
    (tmp_path / "state/agent/h1/agent.log").write_text("a session-of-S3\nlast line\n")
    (tmp_path / "state/agent/h1/agent.log.1").write_text(json.dumps('pa"ss\\word'))
    files = bundle(config, tmp_path / "farm.zip")
    assert files["logs/agent/h1/agent.log"] == "last line\n"
    assert files["logs/agent/h1/agent.log.1"] == '"***"'


@pytest.mark.usefixtures("own_environment")
def test_a_file_that_is_there_stays_and_a_full_disk_leaves_no_half_of_one(config: Config, tmp_path: Path) -> None:
    (tmp_path / "mine.zip").write_text("mine")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for name, message in (
            ("mine.zip", r"mine\.zip is there already: name another file"),
            ("gone/farm.zip", "cannot write .*gone/farm.zip: No such file or directory"),
            ("farm.zip", r"cannot write .*farm\.zip: File too large: name a file on another disk"),
        ):
            with pytest.raises(UsageError, match=message):
                write_bundle(tmp_path / name, config, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "mine.zip").read_text() == "mine"
    assert not (tmp_path / "farm.zip").exists()


def test_the_command_writes_it(home: FarmHome, tmp_path: Path) -> None:
    done = home.farm("doctor", "--bundle", str(tmp_path / "farm.zip"), env={"ANDROID_ADB_SERVER_PORT": "9"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/farm.zip: versions, configuration without secrets, ")
    with zipfile.ZipFile(tmp_path / "farm.zip") as file:
        assert {"versions.json", "configuration.json"} <= set(file.namelist())
