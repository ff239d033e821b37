from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from farm_home import FarmHome

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SYSTEMD = EXAMPLES / "systemd"


def test_the_nightly_run_can_be_run(home: FarmHome) -> None:
    done = home.farm("nightly", "--check", str(EXAMPLES / "nightly.toml"), code=0)
    assert "850 jobs" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_what_is_commented_out_is_right_as_well(home: FarmHome) -> None:
    text = (EXAMPLES / "nightly.toml").read_text()
    (home.cwd / "nightly.toml").write_text(re.sub(r"(?m)^# (?=\[|\w+ = )", "", text))
    done = home.farm("nightly", "--check", "nightly.toml", code=0)
    assert "[notify.mail]: the environment variable FARM_MAIL_PASSWORD is not set" in done.stderr


def test_the_workflow_is_one_that_may_only_read() -> None:
    workflow = yaml.safe_load((EXAMPLES / "github" / "nightly.yml").read_text())
    # YAML 1.1 takes the key `on` for a truth value.
    assert workflow[True]["schedule"][0]["cron"]
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["cancel-in-progress"] is False
    [job] = workflow["jobs"].values()
    assert "self-hosted" in job["runs-on"]
    [run] = [step for step in job["steps"] if "run" in step]
    assert "${{" not in run["run"], "what an input says is no shell"
    assert "farm nightly" in run["run"]
    assert job["steps"][-1]["if"] == "always()"


def test_reports_stay_where_the_next_checkout_does_not_clean() -> None:
    nightly_run = tomllib.loads((EXAMPLES / "nightly.toml").read_text())
    [job] = yaml.safe_load((EXAMPLES / "github" / "nightly.yml").read_text())["jobs"].values()
    steps = {step.get("uses", "run").partition("@")[0]: step for step in job["steps"]}
    left = [Path(nightly_run["nightly"]["report_dir"]), Path(nightly_run["export"]["folder"])]
    left += map(Path, (steps["run"]["env"]["FARM_STATE_DIR"], steps["run"]["env"]["FARM_CACHE_DIR"]))
    # A folder beside the file would be in the checkout, where `git clean -ffdx` keeps committed files only.
    assert all(path.expanduser().is_absolute() for path in left)
    uploaded = [Path(line) for line in steps["actions/upload-artifact"]["with"]["path"].split()]
    assert uploaded == left[:2]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd")
def test_systemd_understands_its_units(tmp_path: Path) -> None:
    for path in SYSTEMD.iterdir():
        # The program is not installed here.
        (tmp_path / path.name).write_text(path.read_text().replace("/opt/farm/.venv/bin/farm", "/bin/true"))
    units = [str(path) for path in sorted(tmp_path.iterdir())]
    done = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_units_belong_together() -> None:
    units = {}
    for path in SYSTEMD.iterdir():
        units[path.name] = configparser.ConfigParser(strict=False, interpolation=None)
        units[path.name].read(path)
    service = units["farm-nightly.service"]["Service"]
    assert service["ExecStart"].split()[1] == "nightly"
    assert service["KillMode"] == "mixed"
    assert units["farm-nightly.timer"]["Timer"]["OnCalendar"]
