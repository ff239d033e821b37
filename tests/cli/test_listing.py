"""Listing is fast because it imports nothing heavy, and it shows the jobs that a run would have."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from farm_home import FarmHome
from programs import run_program

from farm.cli.main import cli

_HEAVY = ("torch", "executorch", "numpy", "sqlalchemy", "adbutils", "jinja2")


@pytest.mark.parametrize(
    ("arguments", "light"),
    [
        (["--help"], (*_HEAVY, "msgspec", "rich", "pytest")),
        (["devices", "socs"], (*_HEAVY, "pytest")),
        (["suites"], (*_HEAVY, "pytest")),
        (["run", "--soc", "SM8650", "--suite", "smoke", "--collect-only"], _HEAVY),
        (["run", "--soc", "SM8650", "--suite", "smoke", "--collect-only", "-k", "conv2d"], ("torch", "executorch")),
    ],
)
def test_what_is_listed_imports_nothing_heavy(home: FarmHome, arguments: list[str], light: tuple[str, ...]) -> None:
    code = (
        "import sys\nfrom farm.cli.main import main\n"
        f"sys.argv = ['farm', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit as ended:\n    assert not ended.code, ended.code\n"
        f"loaded = [name for name in {light!r} if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    run_program([sys.executable, "-c", code], env=home.env, cwd=home.cwd, timeout_s=60)


def test_every_help_text_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def check(names: list[str], command: click.Command) -> None:
        output = CliRunner().invoke(cli, [*names, "--help"], prog_name="farm")
        assert output.exit_code == 0, names
        assert [line for line in output.output.splitlines() if len(line) > 80] == [], names
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                below = command.get_command(context, name)
                assert below is not None
                check([*names, name], below)

    check([], cli)


def test_collecting_lists_the_jobs_and_touches_nothing(home: FarmHome) -> None:
    done = home.farm("run", "--soc", "SM8650", "--soc", "SM8750", "--suite", "smoke", "--collect-only", "-k", "conv2d")
    assert done.returncode == 0
    jobs = done.stdout.splitlines()
    assert "smoke/conv2d[SM8650-htp-8a8w]" in jobs
    assert "smoke/conv2d[SM8750-htp-8a8w]" in jobs
    assert all("conv2d" in job for job in jobs)
    assert list(home.cwd.iterdir()) == []
    assert not home.state.exists()


def test_the_users_own_pytest_settings_do_not_leak_in(home: FarmHome) -> None:
    (home.cwd / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (home.cwd / "conftest.py").write_text("raise RuntimeError('read')\n")
    collect = ("run", "--soc", "SM8650", "--suite", "smoke", "--collect-only", "-k", "conv2d")
    home.farm(*collect, env={"PYTEST_ADDOPTS": "--no-such-option"}, code=0)
    assert {path.name for path in home.cwd.iterdir()} == {"pytest.ini", "conftest.py"}


def test_listings_as_json_are_versioned(home: FarmHome) -> None:
    socs = json.loads(home.farm("devices", "socs", "--json").stdout)
    assert socs["schema"] == 1
    assert len(socs["socs"]) == 21
    suites = json.loads(home.farm("suites", "smoke", "--json").stdout)
    assert len(suites["suites"][0]["cases"]) == 8


def test_a_suite_of_the_users_own_is_listed_from_farm_toml_and_by_path(home: FarmHome) -> None:
    folder = home.cwd / "suites" / "mine"
    folder.mkdir(parents=True)
    (folder / "suite.toml").write_text(
        '[suite]\nname = "mine"\ndescription = "my own"\n'
        '[case.relu]\nmodule = "torch.nn:ReLU"\ninputs = [{ shape = [4] }]\n'
        "tolerance = { 8a8w = { fp32 = { sqnr_db = 30.0 } } }\n"
    )
    by_path = home.farm("run", "--soc", "SM8650", "--suite", "./suites/mine", "--collect-only")
    assert by_path.stdout == "mine/relu[SM8650-htp-8a8w]\n"
    (home.cwd / "farm.toml").write_text('suites = ["suites"]\n')
    assert "my own" in home.farm("suites").stdout
    by_name = home.farm("run", "--soc", "SM8650", "--suite", "mine", "--collect-only")
    assert by_name.stdout == by_path.stdout


def test_a_pipe_that_closes_early_ends_it_in_silence(home: FarmHome) -> None:
    farm = subprocess.Popen(
        [sys.executable, "-m", "farm.cli.main", "suites", "quantized_ops", "--json"],
        env=home.env, cwd=home.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert farm.stdout is not None
    assert farm.stderr is not None
    farm.stdout.close()
    assert farm.stderr.read() == b""
    farm.stderr.close()
    assert farm.wait(60) in (0, 1)
