"""Files of examples/: farm, systemd and GitHub take them as they are."""

from __future__ import annotations

import configparser
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from command_words import called_command, fault
from farm_home import FarmHome

from farm.base.config.settings import load_config
from farm.cli.main import cli

_ROOT = Path(__file__).resolve().parents[2]
_EXAMPLES = _ROOT / "examples"
_FILES = _EXAMPLES / "shared_farm"
_PAGE = _ROOT / "docs/guides/three_hosts.md"
_TESTS_OF_FAULTS = (
    "test_faults.py", "test_build_hosts.py", "test_client.py", "test_agent_threads.py",
    "test_nightly_starts.py", "test_delivery.py", "../store/test_cluster_races.py",
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
    assert len(rows) >= 17
    assert {name: cell for name, cell in rows.items() if not set(re.findall(r"\w+", cell)) <= tests} == {}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_understands_the_units(tmp_path: Path) -> None:
    found = [*_FILES.glob("*.service"), *(_EXAMPLES / "systemd").iterdir()]
    for path in found:
        # The program is not installed here.
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/farm/.venv/bin/farm", "/bin/true"))
    assert len(found) == 5
    argv = ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
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
    def service(path: Path) -> configparser.SectionProxy:
        unit = configparser.ConfigParser(strict=False, interpolation=None)
        unit.read(path)
        return unit["Service"]

    nightly_run = service(_EXAMPLES / "systemd" / "farm-nightly.service")
    assert (nightly_run["ExecStart"].split()[1], nightly_run["KillMode"]) == ("nightly", "mixed")
    for one in map(service, _FILES.glob("*.service")):
        if one["ExecStart"].split()[1:3] == ["lab", "agent"]:
            assert one["KillMode"] == "mixed"
        # Drained, an agent ends with 0 and stays down; killed, it is started again.
        assert (one["User"], one["Restart"]) == ("farm", "on-failure")
        assert "2" in one["RestartPreventExitStatus"].split()


def test_the_nightly_run_can_be_run_and_what_is_commented_out_as_well(home: FarmHome) -> None:
    done = home.farm("nightly", "--check", str(_EXAMPLES / "nightly.toml"), code=0)
    assert "850 jobs" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    text = (_EXAMPLES / "nightly.toml").read_text()
    (home.cwd / "nightly.toml").write_text(re.sub(r"(?m)^# (?=\[|\w+ = )", "", text))
    done = home.farm("nightly", "--check", "nightly.toml", code=0)
    assert "[notify.mail]: the environment variable FARM_MAIL_PASSWORD is not set" in done.stderr


def test_the_workflow_may_only_read_and_keeps_reports_where_no_checkout_cleans() -> None:
    workflow = yaml.safe_load((_EXAMPLES / "github" / "nightly.yml").read_text())
    # YAML 1.1 takes the key `on` for a truth value.
    assert workflow[True]["schedule"][0]["cron"]
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is False
    [job] = workflow["jobs"].values()
    assert "self-hosted" in job["runs-on"]
    steps = {step.get("uses", "run").partition("@")[0]: step for step in job["steps"]}
    assert "${{" not in steps["run"]["run"], "what an input says is no shell"
    assert "farm nightly" in steps["run"]["run"]
    assert job["steps"][-1]["if"] == "always()"
    nightly_run = tomllib.loads((_EXAMPLES / "nightly.toml").read_text())
    left = [Path(nightly_run["nightly"]["report_dir"]), Path(nightly_run["export"]["folder"])]
    left += map(Path, (steps["run"]["env"]["FARM_STATE_DIR"], steps["run"]["env"]["FARM_CACHE_DIR"]))
    # A folder beside the file would be in the checkout, where `git clean -ffdx` keeps committed files only.
    assert all(path.expanduser().is_absolute() for path in left)
    assert [Path(line) for line in steps["actions/upload-artifact"]["with"]["path"].split()] == left[:2]
