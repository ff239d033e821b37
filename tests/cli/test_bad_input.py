"""Bad input is one clear line, the right exit code, and nothing changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from farm_home import FarmHome

from farm.base.errors import FIRST_RUN, UsageError
from farm.cli import main
from farm.cli.output import asked_server

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
            6,
            "the gpu backend of SM8650 needs a QNN SDK",
        ),
        ((*RUN, "--backend", "lpai"), 2, "SM8650 has no lpai backend: legal are htp, gpu"),
        ((*RUN, "--backend", "npu"), 2, "unknown backend 'npu'"),
        ((*RUN, "--precision", "4a4w"), 2, "unknown precision '4a4w'"),
        ((*RUN, "--precision", "fp32"), 2, "the htp backend does not run fp32: legal are 8a8w"),
        ((*RUN, "--backend", "xnnpack", "--precision", "16a4w"), 2, "the xnnpack backend does not run 16a4w"),
        ((*RUN, "-k", "no_such_operator"), 5, "jobs is selected by -k no_such_operator"),
        ((*RUN, "-k", "("), 2, "pytest does not understand -k ("),
        ((*RUN, "--", "-n", "4"), 2, "'-n' is not understood"),
        ((*RUN, "conv2d"), 2, "'conv2d' is not understood"),
        ((*RUN, "--html", "/dev/null/page.html"), 2, "/dev/null is no folder"),
        ((*RUN, "--junitxml", "/dev/null/a/b.xml"), 2, "/dev/null is no folder"),
        (("run", "--soc"), 2, "option '--soc' requires an argument"),
        (("history",), 2, "JOB is missing, an argument that is needed (farm history --help)"),
        (
            ("setup", "runtime", "check"),
            2,
            "--soc is missing, an option that is needed (farm setup runtime check --help)",
        ),
        (("devices", "shw"), 2, "unknown command 'shw': did you mean 'show'? (farm devices --help lists them)"),
        (("devices", "socs", "extra"), 2, "got unexpected extra argument"),
        (("runn",), 2, "unknown command 'runn': did you mean 'run'?"),
        (("report",), 9, "there is no store yet"),
        (("setup", "cache", "prune", "--older", "a while"), 2, "expected something like 30d"),
        (("setup", "cache", "prune"), 2, "one of --older AGE, --keep-size SIZE, --all"),
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
        (
            "perf",
            "confirm",
        ),
        ("perf", "confirm", "smoke/conv2d"),
        ("perf", "bisect", "smoke/conv2d", "--good", "latest~1", "--bad", "latest"),
        ("alerts", "assign", "12", "--owner", "ada"),
        ("alerts", "accept", "smoke/conv2d", "--note", "right"),
        ("jobs", "rerun", "smoke/conv2d"),
        ("runs", "prune", "--keep", "9d", "--yes"),
    ],
)
def test_what_asks_of_the_past_makes_no_store(home: FarmHome, arguments: tuple[str, ...]) -> None:
    done = home.farm(*arguments)
    assert (done.returncode, done.stdout) == (9, "")
    assert f"there is no store yet: '{FIRST_RUN}' makes one" in done.stderr
    assert not home.state.exists()


def test_an_option_that_is_misspelt_starts_nothing(home: FarmHome) -> None:
    done = home.farm(*RUN, "--precison", "8a8w", code=2)
    assert done.stderr == "farm: unknown option '--precison': did you mean '--precision'? (farm run --help)\n"
    assert not home.state.exists()


@pytest.mark.whole
def test_trouble_with_files_is_one_line_and_no_failed_job(home: FarmHome) -> None:
    home.state.mkdir()
    (home.state / "runs").write_text("a file where a folder has to be")
    done = home.farm(*RUN, code=4)
    assert "Not a directory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("missing", ["--soc", "--suite"])
def test_an_option_that_is_missing_is_named(home: FarmHome, missing: str) -> None:
    given = {"--soc": "SM8650", "--suite": "smoke"}
    del given[missing]
    done = home.farm("run", *(word for pair in given.items() for word in pair), code=2)
    assert missing in done.stderr


def test_a_broken_farm_toml_is_named(home: FarmHome) -> None:
    (home.cwd / "farm.toml").write_text("[build]\nbuilders = 'many'\n")
    done = home.farm("suites", code=2)
    assert f"{home.cwd / 'farm.toml'}" in done.stderr
    assert "build.builders" in done.stderr


def test_without_a_device_it_says_what_is_attached(home: FarmHome, tmp_path: Path) -> None:
    from farm.base.processes import Supervisor
    from farm.devices.adb.server import start_adb_server

    with Supervisor() as supervisor:
        server = start_adb_server(supervisor, tmp_path / "adb")
        done = home.farm(
            "run", "--soc", "SM8650", "--suite", "smoke", env={"ANDROID_ADB_SERVER_PORT": str(server.port)}
        )
    assert done.returncode == 4
    assert "no usable SM8650 is attached (no device): attach one, or" in done.stderr
    assert "--virtual" in done.stderr
    # A refused command leaves no run.
    assert home.farm("status").stdout.startswith("no run yet")
    assert "latest: " in home.farm("report", "latest").stderr
    assert "NEVER BEGAN" in home.farm("runs", "list").stdout


@pytest.mark.parametrize("words", [("-v", "status"), ("status", "--verbose")])
def test_verbose_says_with_what_a_command_works_and_where_an_error_came_from(
    home: FarmHome, words: tuple[str, ...]
) -> None:
    (home.cwd / "farm.toml").write_text("store = 'postgresql://ada:secret@127.0.0.1:1/farm'\n")
    done = home.farm(*words, code=10)
    lines = done.stderr.splitlines()
    assert re.fullmatch(rf"farm: \d\d:\d\d:\d\d configuration: {home.cwd}/farm.toml", lines[0])
    assert lines[1].endswith("store: postgresql://ada:***@127.0.0.1:1/farm")
    assert any("StoreUnreachableError in farm/store/database.py" in line for line in lines)
    assert lines[-1].startswith("farm: postgresql://ada:***@127.0.0.1:1/farm: ")
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    ("words", "jobs"),
    [
        (("--virtual",), 8),
        (("--virtual", "-k", "conv"), 1),
        (("--virtual", "2", "-k", "conv"), 1),
    ],
)
def test_virtual_is_one_without_a_number(home: FarmHome, words: tuple[str, ...], jobs: int) -> None:
    done = home.farm("run", "--soc", "SM8650", "--suite", "smoke", "--collect-only", *words)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, jobs), done.stderr


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        ("run", ("--soc", "SM8650", "--suite", "smoke", "--virtual", "0"), "leave --virtual out for attached ones"),
        ("run", ("--soc", "SM8650", "--suite", "smoke", "--virtual", "two"), "--virtual takes a number, not 'two'"),
        ("jobs rerun", ("--virtual=0", "smoke/conv2d"), "leave --virtual out for attached ones"),
        ("perf confirm", ("--virtual", "smoke/conv2d"), "there is no store yet"),
        ("perf confirm", ("--virtual", "1", "smoke/conv2d"), "there is no store yet"),
        ("jobs rerun", ("--virtual", "smoke/conv2d"), "there is no store yet"),
        ("jobs rerun", ("--virtual", "1", "smoke/conv2d"), "there is no store yet"),
        ("jobs rerun", ("--virtual", "2", "smoke/conv2d"), "--virtual: 2 is not in the range 0<=x<=1"),
        ("debug", ("--virtual", "smoke/conv2d"), "has no target"),
        ("data sql", ("--timeout", "5m", "SELECT 1"), "there is no store yet"),
        ("data sql", ("--timeout", "300", "SELECT 1"), "there is no store yet"),
        ("data sql", ("--timeout", "2d", "SELECT 1"), "--timeout: '2d' is not in the range from 1 to 86400 s"),
        ("data sql", ("--timeout", "soon", "SELECT 1"), "expected a time such as 90s, 10m or 1h30m, or seconds"),
        ("runs prune", ("--keep", "1h30m"), "there is no store yet"),
    ],
)
def test_options_of_one_kind_are_taken_alike(home: FarmHome, command: str, words: tuple[str, ...], says: str) -> None:
    done = home.farm(*command.split(), *words)
    assert (done.returncode, done.stdout) == (9 if "no store" in says else 2, "")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FARM_TOKEN", "hidden-a b"),
        ("FARM_TOKEN", "hidden\r\nX: y"),
        ("FARM_TOKEN", "hidden-tür"),
        ("FARM_SERVER", "https://me:hidden@farm.example"),
        ("FARM_SERVER", "https://hidden@farm.example"),
        ("FARM_SERVER", "https://farm.example/?token=hidden"),
        ("FARM_SERVER", "https://[hidden"),
        ("FARM_SERVER", "https://farm.example:99999/hidden"),
        ("FARM_SERVER", "https://farm.example/\r\nhidden"),
    ],
)
def test_an_address_or_token_of_a_server_that_is_none_is_refused_unprinted(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    for name, fine in {"FARM_SERVER": "https://farm.example", "FARM_TOKEN": "good"}.items():
        monkeypatch.setenv(name, value if name == variable else fine)
    with pytest.raises(UsageError, match=rf"^\${variable} is no .*: expected") as raised:
        asked_server()
    assert "hidden" not in str(raised.value)


def test_usual_addresses_of_servers_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_TOKEN", "aZ09-_.~+/=")
    for address in (
        "https://farm.example",
        "https://farm.example:8443/lab/",
        "http://[::1]:8080",
        "http://127.0.0.1:1",
    ):
        monkeypatch.setenv("FARM_SERVER", address)
        assert asked_server() is not None


def test_a_missing_package_is_no_bug_of_farm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main._fail_without(ModuleNotFoundError("no litestar", name="litestar.di")) == 6
    output = capsys.readouterr().err
    assert output == "farm: the Python package litestar is missing: install farm again, or call ./farmw\n"
    assert main._fail_without(ModuleNotFoundError("no such module", name="farm.base.nothing")) == 4
    assert "this is a bug in farm" in capsys.readouterr().err
