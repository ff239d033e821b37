"""Output of commands: bad input, hostile names, pipes, `-q` and progress."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attached import rack
from farm_home import FarmHome
from made_runs import HOUR_MS, record_run
from rich.console import Console
from sqlalchemy import text
from terminals import terminal_of

from farm.base.errors import FIRST_RUN, UsageError
from farm.cli import main
from farm.cli.output import asked_server
from farm.cli.progress import LiveFront
from farm.results.attempt import Verdict
from farm.store.store import Store, open_store

# Bad input is one clear line, the right exit code, and nothing changed.


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
    ("jobs rerun --timeout soon smoke/add", 2, "expected a time such as 90s, 10m or 1h30m, or seconds"),
    # A question about the past makes no store. An option of a kind is taken alike by every command.
    ("report", 9, NO_STORE),
    ("jobs coverage --soc SM8650", 9, NO_STORE),
    ("perf confirm --virtual smoke/conv2d", 9, NO_STORE),
    ("perf confirm --virtual 1 smoke/conv2d", 9, NO_STORE),
    ("perf bisect smoke/conv2d --good latest~1 --bad latest", 9, NO_STORE),
    ("alerts accept smoke/conv2d --note right", 9, NO_STORE),
    ("jobs rerun --virtual smoke/conv2d", 9, NO_STORE),
    ("jobs rerun --virtual 1 smoke/conv2d", 9, NO_STORE),
    ("runs prune --keep 1h30m --yes", 9, NO_STORE),
    ("runs prune", 2, "no rule for runs to keep: give --keep 90d or --keep-runs 500"),
    ("runs prune --keep-nightly 90d", 2, "no rule for runs to keep"),
    ("runs prune --keep soon", 2, "expected an age such as 90d"),
    ("runs prune --keep-runs 0", 2, "0 is not in the range"),
    ("doctor --backend hpt", 2, "unknown backend 'hpt': did you mean 'htp'?"),
    ("setup runtime check --soc SM8650 --target linux-x86", 2, "did you mean 'linux-x86_64'?"),
    ("setup runtime check --soc SM8650 --backend gpu --target linux-x86_64", 2, "there is no gpu simulator"),
    ("setup runtime check --soc SM8650 --target linux-aarch64", 2, "use --target linux-x86_64 or android-arm64"),
    ("setup runtime check --soc SM8650 --backend dsp", 2, "unknown backend 'dsp'"),
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
    with rack(tmp_path / "rack") as empty:
        done = home.farm("run", "--soc", "SM8650", "--suite", "smoke", env=empty.env, code=4)
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


# Names that no terminal should obey: from manifests, stores and arguments, through every way that farm prints.


# A terminal's title, a colour, C1's way to clear the screen, a right-to-left override, an isolate, a zero width space.
EVIL = "a\x1b]0;owned\x07b\x1b[31mc\x9b2Jd\u202ee\u2066f\u200bg\x7fh"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def written(home: FarmHome, **changes: str) -> Path:
    """Write a suite whose texts are hostile, and return its folder."""
    facts = {"name": "mine", "description": EVIL, "module": "torch.nn:ReLU", "case": "relu", **changes}
    output = {key: json.dumps(value) for key, value in facts.items()}
    folder = home.cwd / "mine"
    folder.mkdir()
    (folder / "suite.toml").write_text(
        f"[suite]\nname = {output['name']}\ndescription = {output['description']}\n\n"
        f"[case.{output['case']}]\nmodule = {output['module']}\ninputs = [{{shape = [1, 3]}}]\n",
        encoding="utf-8",
    )
    return folder


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_suites_are_listed_without_what_a_terminal_obeys(home: FarmHome, arguments: tuple[str, ...]) -> None:
    done = home.farm("suites", str(written(home)), *arguments, code=0)
    assert "relu" in done.stdout
    assert not OBEYED.search(done.stdout)
    if arguments:
        assert [suite["description"] for suite in json.loads(done.stdout)["suites"]] == [EVIL]


@pytest.mark.parametrize("what", ["case", "module", "name"])
def test_errors_of_a_manifest_are_one_line_that_a_terminal_does_not_obey(home: FarmHome, what: str) -> None:
    folder = written(home, **{what: EVIL})
    for arguments in (("suites", str(folder)), ("run", "--soc", "SM8650", "--suite", str(folder))):
        assert not OBEYED.search(home.refused(*arguments))


def test_typed_words_come_back_visible(home: FarmHome) -> None:
    for arguments in (["suites", EVIL], ["run", "--soc", EVIL], [EVIL], ["suites", f"--{EVIL}"]):
        done = home.farm(*arguments)
        assert done.returncode, done.stderr
        assert not OBEYED.search(done.stderr + done.stdout), arguments


def test_rows_of_a_store_are_printed_visible(home: FarmHome, store: Store) -> None:
    with store:
        run_id = record_run(store)
        # Stands for a user who writes the rows of a shared store by hand.
        update = text("UPDATE run SET user_name = :evil, host = 'a,b' || char(10) || 'c'")
        store._database.write(lambda connection: connection.execute(update, {"evil": EVIL}))
    printed = ""
    for arguments in ("status", "status --json", "runs prune --keep 1", f"report {run_id} --json"):
        done = home.farm(*arguments.split())
        printed += done.stdout + done.stderr
    assert not OBEYED.search(printed)


# Output of farm into a pipe, a file or CI: whole lines, and a run that goes on after its reader has left.


REASON = f"output 0 against fp32: {'the channel differs, ' * 10}THE POINT"


@pytest.fixture
def red(home: FarmHome) -> FarmHome:
    """A home with two runs, in the newer of which the job fails for a long reason."""
    home.state.mkdir(parents=True)
    now_ms = time.time_ns() // 1_000_000
    with open_store(home.state / "farm.db") as store:
        record_run(store, started_ms=now_ms - 2 * HOUR_MS)
        record_run(
            store, verdicts=[Verdict.FAILED], started_ms=now_ms - HOUR_MS, attempt={"reason": REASON}, exit_code=1
        )
    return home


def environment(home: FarmHome) -> dict[str, str]:
    return {name: value for name, value in home.env.items() if name != "COLUMNS"}


def piped(env: dict[str, str], *arguments: str) -> str:
    """Return the output of a command into a pipe."""
    argv = [sys.executable, "-m", "farm.cli.main", *arguments]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False).stdout


@pytest.mark.parametrize(
    "command",
    [
        ("report",),
        pytest.param(("status",), marks=pytest.mark.whole),
        pytest.param(("diff", "latest~1"), marks=pytest.mark.whole),
    ],
)
def test_a_pipe_gets_the_whole_reason_unless_somebody_says_how_wide_it_is(
    red: FarmHome, command: tuple[str, ...]
) -> None:
    assert "THE POINT" in piped(environment(red), *command)
    narrow = piped({**red.env, "COLUMNS": "60"}, *command)
    assert "THE POINT" not in narrow
    assert "output 0 against" in narrow


def test_a_terminal_gets_lines_that_fit(red: FarmHome) -> None:
    with terminal_of("report", env=environment(red), cwd=red.cwd, columns=70) as terminal:
        assert terminal.close() == 0
    shown = terminal.shown.decode()
    assert "THE POINT" not in shown
    assert 0 < max(len(line) for line in shown.splitlines() if "the channel" in line) <= 70


@pytest.mark.parametrize(
    "arguments",
    [
        ("devices",),
        *(pytest.param(one, marks=pytest.mark.whole) for one in (("status",), ("report", "--json"), ("--help",))),
    ],
)
def test_a_command_whose_reader_has_left_ends_quietly_as_it_would_have(
    red: FarmHome, arguments: tuple[str, ...]
) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    with red.start_alone(*arguments, stdout=ours, text=True) as process:
        os.close(ours)
        assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0


# `-q`: the last line of a command's text, all of its JSON, and errors.


@pytest.mark.parametrize("words", [("-q", "devices", "socs"), ("devices", "socs", "--quiet")])
def test_a_quiet_command_prints_the_last_line(home: FarmHome, words: tuple[str, ...]) -> None:
    whole = home.farm("devices", "socs", code=0).stdout.splitlines()
    done = home.farm(*words, code=0)
    assert (done.stdout.splitlines(), done.stderr) == (whole[-1:], "")


def test_a_quiet_command_prints_json_and_errors(home: FarmHome) -> None:
    assert json.loads(home.farm("devices", "socs", "-q", "--json", code=0).stdout)["socs"]
    assert "there is no store yet" in home.farm("status", "-q", code=9).stderr


# Progress of a run on a terminal, and its lines after Ctrl-C.


# A run's display and its signals, with nothing behind them. signal.pause() would miss a signal that comes just before.
RUN_LIVE = """
import logging, time
from farm.cli.output import begin_log
from farm.cli.progress import make_front
from farm.base.interrupts import InterruptHandler

begin_log()
log = logging.getLogger("farm.dispatch.run")
with InterruptHandler() as interrupts:
    try:
        with make_front() as front:
            front.begin(jobs=4, to_build=3, devices=["phone-1", "phone-2"])
            front.devices({"phone-1": "s/conv[SM8650]"})
            with interrupts.finishing(lambda: None, "Ctrl-C again stops, --resume goes on"):
                log.info("jobs run")
                while True:
                    time.sleep(0.1)
    except KeyboardInterrupt:
        print("the end", flush=True)
"""

LAST_ROW = r"phone-2\S* \S*idle +\S*$"


def screen_of(written: str) -> list[str]:
    """Return the lines that a terminal shows in the end: text, line ends, up and erased lines are all that there is."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
        elif part.endswith("A"):
            row -= int(part[2:-1] or 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        else:
            assert part[-1] in "mhl", part
    return [line.rstrip() for line in lines if line.strip()]


def test_ctrl_c_tells_a_second_one_and_resume_and_leaves_no_bar(tmp_path: Path) -> None:
    with terminal_of("-c", RUN_LIVE, env=os.environ, cwd=tmp_path) as terminal:
        # A terminal drops output that waits when Ctrl-C comes: it comes between two drawings of the bars.
        for line in ("jobs run", "--resume goes on"):
            terminal.read_until(f"(?s){line}.*{LAST_ROW}")
            terminal.write(b"\x03")
        assert terminal.close() == 0
    screen = screen_of(terminal.shown.decode())
    assert "Ctrl-C again stops, --resume goes on" in screen
    assert screen[-1] == "the end"
    assert not [line for line in screen if "0/4" in line or "━" in line], screen


def test_80_columns_show_the_time_left_and_the_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    front = LiveFront(console)
    now = 1000.0
    monkeypatch.setattr("farm.cli.progress.time.monotonic", lambda: now)
    front.begin(jobs=425, to_build=425, devices=["virtual-SM8650-0"])
    front.live.stop()
    for number in range(20):
        now += 60
        known = "#1: weak" if number < 2 else ""
        shown = {"job_id": f"s/{number}", "verdict": "failed" if known else "passed", "reason": "x"}
        front.job_ended({**shown, "known_issue": known})
    console.file = io.StringIO()
    console.print(front.live.get_renderable())
    [line] = [line for line in console.file.getvalue().splitlines() if line.startswith("run")]
    assert line.rstrip().split("20/425")[1].split("  ") == [" about 6 h 45 min left", "18 passed", "2 known issues"]
