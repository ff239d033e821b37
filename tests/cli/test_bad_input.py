"""Bad input is one clear line, the right exit code, and nothing changed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from farm_home import FarmHome

from farm.base.errors import FIRST_RUN, UsageError
from farm.base.processes import Supervisor
from farm.cli import main
from farm.cli.output import asked_server
from farm.devices.adb.server import start_adb_server

RUN = "run --virtual 2 --soc SM8650 --suite smoke"
NOTHING_SET = dict.fromkeys(("ANDROID_NDK_ROOT", "QNN_SDK_ROOT", "HEXAGON_SDK_ROOT", "HEXAGON_TOOLS_ROOT"), "")
NO_STORE = f"there is no store yet: '{FIRST_RUN}' makes one"

REFUSED = [
    ("run --virtual 2 --soc SM8651 --suite smoke", 2, "unknown SoC 'SM8651': did you mean 'SM8650'?"),
    ("run --virtual 2 --soc SM8650 --suite quantised_ops", 2, "did you mean 'quantized_ops'?"),
    ("run --virtual 2 --soc SM8650 --suite ./nowhere", 2, "nowhere: No such file or directory"),
    (f"{RUN} --backend gpu", 2, "the gpu backend does not run 8a8w: legal are fp16, fp32"),
    ("run --soc SM8650 --suite fp_smoke --backend gpu", 6, "the gpu backend of SM8650 needs a QNN SDK"),
    (f"{RUN} --backend lpai", 2, "SM8650 has no lpai backend: legal are htp, gpu"),
    (f"{RUN} --backend npu", 2, "unknown backend 'npu'"),
    (f"{RUN} --precision 4a4w", 2, "unknown precision '4a4w'"),
    (f"{RUN} -k no_such_operator", 5, "jobs is selected by -k no_such_operator"),
    (f"{RUN} -k (", 2, "pytest does not understand -k ("),
    (f"{RUN} -- -n 4", 2, "'-n' is not understood"),
    (f"{RUN} --html /dev/null/page.html", 2, "/dev/null is no folder"),
    (f"{RUN} --precison 8a8w", 2, "unknown option '--precison': did you mean '--precision'? (farm run --help)"),
    (f"{RUN} --virtual 0", 2, "leave --virtual out for attached ones"),
    (f"{RUN} --virtual two", 2, "--virtual takes a number, not 'two'"),
    ("run --soc", 2, "option '--soc' requires an argument"),
    ("run --suite smoke", 2, "--soc"),
    ("run --soc SM8650", 2, "--suite"),
    ("history", 2, "JOB is missing, an argument that is needed (farm history --help)"),
    ("devices shw", 2, "unknown command 'shw': did you mean 'show'? (farm devices --help lists them)"),
    ("devices socs extra", 2, "got unexpected extra argument"),
    ("runn", 2, "unknown command 'runn': did you mean 'run'?"),
    ("setup cache prune --older 'a while'", 2, "expected something like 30d"),
    ("setup cache prune", 2, "one of --older AGE, --keep-size SIZE, --all"),
    ("jobs rerun --virtual 2 smoke/conv2d", 2, "--virtual: 2 is not in the range 0<=x<=1"),
    ("debug --virtual smoke/conv2d", 2, "has no target"),
    ("data sql --timeout 2d 'SELECT 1'", 2, "--timeout: '2d' is not in the range from 1 to 86400 s"),
    ("data sql --timeout soon 'SELECT 1'", 2, "expected a time such as 90s, 10m or 1h30m, or seconds"),
    # A question about the past makes no store. An option of a kind is taken alike by every command.
    ("report", 9, NO_STORE),
    ("jobs coverage --soc SM8650", 9, NO_STORE),
    ("perf confirm --virtual smoke/conv2d", 9, NO_STORE),
    ("perf confirm --virtual 1 smoke/conv2d", 9, NO_STORE),
    ("perf bisect smoke/conv2d --good latest~1 --bad latest", 9, NO_STORE),
    ("alerts accept smoke/conv2d --note right", 9, NO_STORE),
    ("jobs rerun --virtual smoke/conv2d", 9, NO_STORE),
    ("jobs rerun --virtual 1 smoke/conv2d", 9, NO_STORE),
    ("data sql --timeout 300 'SELECT 1'", 9, NO_STORE),
    ("runs prune --keep 1h30m --yes", 9, NO_STORE),
    ("doctor --backend hpt", 2, "unknown backend 'hpt': did you mean 'htp'?"),
    ("setup runtime check --soc SM8650 --target linux-x86", 2, "did you mean 'linux-x86_64'?"),
    ("setup runtime check --soc SM8650 --backend gpu --target linux-x86_64", 2, "there is no gpu simulator"),
    ("setup runtime check --soc SM8650 --target linux-aarch64", 2, "use --target linux-x86_64 or android-arm64"),
    ("setup runtime list --backend dsp", 2, "unknown backend 'dsp'"),
    ("setup runtime build --target android-arm64", 6, "ANDROID_NDK_ROOT is not set: set ANDROID_NDK_ROOT"),
]


def test_it_is_one_line(home: FarmHome) -> None:
    for words, code, message in REFUSED:
        done = home.farm(*shlex.split(words), env=NOTHING_SET)
        line = done.stderr.strip().splitlines()[-1]
        assert (done.returncode, done.stdout, line.startswith("farm: ")) == (code, "", True), (words, done.stderr)
        assert message in line, (words, line)
        assert "Traceback" not in done.stderr
    assert not home.state.exists()
    assert list(home.cwd.iterdir()) == []


@pytest.mark.whole
def test_trouble_with_files_is_one_line_and_no_failed_job(home: FarmHome) -> None:
    home.state.mkdir()
    (home.state / "runs").write_text("a file where a folder has to be")
    done = home.farm(*RUN.split(), code=4)
    assert "Not a directory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_broken_farm_toml_is_named(home: FarmHome) -> None:
    (home.cwd / "farm.toml").write_text("[build]\nbuilders = 'many'\n")
    done = home.farm("suites", code=2)
    assert f"{home.cwd / 'farm.toml'}" in done.stderr
    assert "build.builders" in done.stderr


def test_without_a_device_it_says_what_is_attached_and_leaves_no_run(home: FarmHome, tmp_path: Path) -> None:
    with Supervisor() as supervisor:
        port = {"ANDROID_ADB_SERVER_PORT": str(start_adb_server(supervisor, tmp_path / "adb").port)}
        done = home.farm("run", "--soc", "SM8650", "--suite", "smoke", env=port, code=4)
    assert "no usable SM8650 is attached (no device): attach one, or" in done.stderr
    assert "--virtual" in done.stderr
    assert home.farm("status").stdout.startswith("no run yet")
    assert "NEVER BEGAN" in home.farm("runs", "list").stdout


def test_verbose_says_with_what_a_command_works_and_where_an_error_came_from(home: FarmHome) -> None:
    (home.cwd / "farm.toml").write_text("store = 'postgresql://ada:secret@127.0.0.1:1/farm'\n")
    done = home.farm("status", "--verbose", code=10)
    lines = done.stderr.splitlines()
    assert re.fullmatch(rf"farm: \d\d:\d\d:\d\d configuration: {home.cwd}/farm.toml", lines[0])
    assert lines[1].endswith("store: postgresql://ada:***@127.0.0.1:1/farm")
    assert any("StoreUnreachableError in farm/store/database.py" in line for line in lines)
    assert "secret" not in done.stderr


def test_virtual_is_one_without_a_number(home: FarmHome) -> None:
    for words, jobs in ((["--virtual"], 8), (["--virtual", "-k", "conv"], 1), (["--virtual", "2", "-k", "conv"], 1)):
        done = home.farm("run", "--soc", "SM8650", "--suite", "smoke", "--collect-only", *words, code=0)
        assert len(done.stdout.splitlines()) == jobs


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FARM_TOKEN", "hidden-a b"),
        ("FARM_TOKEN", "hidden\r\nX: y"),
        ("FARM_TOKEN", "hidden-tür"),
        ("FARM_SERVER", "https://me:hidden@farm.example"),
        ("FARM_SERVER", "https://farm.example/?token=hidden"),
        ("FARM_SERVER", "https://[hidden"),
        ("FARM_SERVER", "https://farm.example:99999/hidden"),
        ("FARM_SERVER", "https://farm.example/\r\nhidden"),
    ],
)
def test_an_address_or_token_of_a_server_that_is_none_is_refused_unprinted(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    for name, fine in {"FARM_SERVER": "https://farm.example", "FARM_TOKEN": "aZ09-_.~+/="}.items():
        monkeypatch.setenv(name, fine)
    for address in ("https://farm.example:8443/lab/", "http://[::1]:8080"):
        monkeypatch.setenv("FARM_SERVER", address)
        assert asked_server() is not None
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError, match=rf"^\${variable} is no .*: expected") as raised:
        asked_server()
    assert "hidden" not in str(raised.value)


def test_a_missing_package_is_no_bug_of_farm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main._fail_without(ModuleNotFoundError("no litestar", name="litestar.di")) == 6
    output = capsys.readouterr().err
    assert output == "farm: the Python package litestar is missing: install farm again, or call ./farmw\n"
    assert main._fail_without(ModuleNotFoundError("no such module", name="farm.base.nothing")) == 4
    assert "this is a bug in farm" in capsys.readouterr().err
