"""Bad input is one clear line, the right exit code, and nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from farm_home import FarmHome

RUN = ("run", "--virtual", "2", "--soc", "SM8650", "--suite", "smoke")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("run", "--virtual", "2", "--soc", "SM9999", "--suite", "smoke"), 2, "unknown SoC 'SM9999'"),
        (("run", "--virtual", "2", "--soc", "SM8651", "--suite", "smoke"), 2, "did you mean 'SM8650'?"),
        (("run", "--virtual", "2", "--soc", "SM8650", "--suite", "quantised_ops"), 2, "did you mean 'quantized_ops'?"),
        (("run", "--virtual", "2", "--soc", "SM8650", "--suite", "./nowhere"), 2, "nowhere: No such file or directory"),
        ((*RUN, "--backend", "gpu"), 2, "the gpu backend does not run 8a8w: legal are fp16, fp32"),
        (
            ("run", "--soc", "SM8650", "--suite", "fp_smoke", "--backend", "gpu"),
            2,
            "the gpu backend of SM8650 needs a QNN SDK",
        ),
        ((*RUN, "--backend", "lpai"), 2, "SM8650 has no lpai backend: legal are htp, gpu"),
        ((*RUN, "--backend", "npu"), 2, "unknown backend 'npu'"),
        ((*RUN, "--precision", "4a4w"), 2, "unknown precision '4a4w'"),
        ((*RUN, "--precision", "fp32"), 2, "the htp backend does not run fp32: legal are 8a8w"),
        ((*RUN, "--backend", "xnnpack", "--precision", "16a4w"), 2, "the xnnpack backend does not run 16a4w"),
        ((*RUN, "-k", "no_such_operator"), 5, "jobs is selected by -k no_such_operator"),
        ((*RUN, "-k", "("), 2, "pytest does not understand -k ("),
        ((*RUN, "--", "-k", "no_such_operator"), 5, "jobs is selected by -k no_such_operator"),
        ((*RUN, "--", "-n", "4"), 2, "farm starts one worker for every device"),
        ((*RUN, "--", "--no-such-option"), 2, "pytest does not understand --no-such-option"),
        ((*RUN, "conv2d"), 2, "'conv2d' is not understood; arguments for pytest stand behind --"),
        ((*RUN, "--html", "/dev/null/page.html"), 2, "/dev/null is no folder"),
        ((*RUN, "--junitxml", "/dev/null/a/b.xml"), 2, "/dev/null is no folder"),
        (("run", "--soc"), 2, "option '--soc' requires an argument"),
        (("history",), 2, "JOB is missing, an argument that is needed (farm history --help)"),
        (("runtime", "check"), 2, "--soc is missing, an option that is needed (farm runtime check --help)"),
        (("device", "shw"), 2, "unknown command 'shw': did you mean 'show'? (farm device --help lists them)"),
        (("socs", "extra"), 2, "got unexpected extra argument"),
        (("runn",), 2, "unknown command 'runn': did you mean 'run'?"),
        (("report",), 2, "there is no store yet"),
        (("cache", "prune", "--older", "a while"), 2, "expected something like 30d"),
        (("cache", "prune"), 2, "one of --older AGE, --keep SIZE, --all"),
    ],
)
def test_it_is_one_line(home: FarmHome, arguments: tuple[str, ...], code: int, says: str) -> None:
    done = home.farm(*arguments)
    line = done.stderr.strip().splitlines()[-1]
    assert (done.returncode, done.stdout) == (code, "")
    assert says in line
    assert line.startswith("farm: ")
    assert "Traceback" not in done.stderr
    assert not (home.state / "runs").exists()
    assert list(home.cwd.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("confirm",),
        ("confirm", "smoke/conv2d"),
        ("bisect", "smoke/conv2d", "--good", "latest~1", "--bad", "latest"),
        ("triage", "12", "--owner", "ada"),
        ("baseline", "accept", "smoke/conv2d", "--note", "right"),
        ("repro", "smoke/conv2d"),
        ("prune", "--keep", "9d", "--yes"),
    ],
)
def test_what_asks_of_the_past_makes_no_store(home: FarmHome, arguments: tuple[str, ...]) -> None:
    done = home.farm(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no store yet: 'farm run' makes one" in done.stderr
    assert not home.state.exists()


def test_an_option_that_is_misspelt_starts_nothing(home: FarmHome) -> None:
    done = home.farm(*RUN, "--precison", "8a8w")
    assert done.returncode == 2
    assert done.stderr == "farm: unknown option '--precison': did you mean '--precision'? (farm run --help)\n"
    assert not home.state.exists()


def test_trouble_with_files_is_one_line_and_no_failed_job(home: FarmHome) -> None:
    home.state.mkdir()
    (home.state / "runs").write_text("a file where a folder has to be")
    done = home.farm(*RUN)
    assert done.returncode == 4
    assert "Not a directory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["--soc", "--suite"])
def test_an_option_that_is_missing_is_named(home: FarmHome, missing: str) -> None:
    given = {"--soc": "SM8650", "--suite": "smoke"}
    del given[missing]
    done = home.farm("run", *(word for pair in given.items() for word in pair))
    assert done.returncode == 2
    assert missing in done.stderr


def test_a_broken_farm_toml_is_named(home: FarmHome) -> None:
    (home.cwd / "farm.toml").write_text("[build]\nbuilders = 'many'\n")
    done = home.farm("suites")
    assert done.returncode == 2
    assert f"{home.cwd / 'farm.toml'}" in done.stderr
    assert "build.builders" in done.stderr


def test_without_a_device_it_says_what_is_attached(home: FarmHome, tmp_path: Path) -> None:
    from farm.devices.adb.server import start_adb_server
    from farm.system.processes import Supervisor

    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        done = home.farm(
            "run", "--soc", "SM8650", "--suite", "smoke", env={"ANDROID_ADB_SERVER_PORT": str(server.port)}
        )
    assert done.returncode == 4
    assert "no attached device is a SM8650 that can be used: attached are none" in done.stderr
    assert "--virtual" in done.stderr
