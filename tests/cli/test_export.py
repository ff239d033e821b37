"""`farm data export` and `farm data import`: between stores, into files, through pipes; and their refusals."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from farm_home import FarmHome
from waiting import Started

from farm.base.errors import UsageError
from farm.base.user import user_name
from farm.cli.output import write_file, written
from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Direction, Measurement, Stage, Verdict
from farm.store.records import RunRecord
from farm.store.store import open_store
from farm.suites.suite import Case, InputSpec, Job, Target

JOB = Job(Case("s", "c", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))
VIRTUAL = Device("virtual-1", "SM8650", "virtual", "b", AdbAddress(5037), "phone")
DAY = 86_400_000


@pytest.fixture(scope="module")
def source(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FarmHome, list[str]]:
    """Home with two finished runs and a killed one between them; tests only read it."""
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("source"))
    home.state.mkdir()
    ids = []
    with open_store(home.state / "farm.db") as store:
        for day, finished in enumerate((True, False, True)):
            started_ms = 1_790_000_000_000 + day * DAY
            run_id = store.begin_run(RunRecord("farm run", user_name(), "bench", {"executorch": "1.5.1"}, started_ms))
            store.plan_jobs(run_id, [JOB])
            latency = Measurement("latency", "ns", Direction.LOWER, (1e6 / 3, float("inf")))
            attempt = Attempt(
                JOB.id, Verdict.PASSED, Stage.DONE, "", "virtual-1", started_ms, 0.5, measurements=(latency,),
                log="\x1b[31mred\x9b0m\n" * 20_000,
            )  # fmt: skip
            store.record_attempt(run_id, attempt, VIRTUAL)
            if finished:
                store.finish_run(run_id, 0)
            ids.append(run_id)
    return home, ids


def history(home: FarmHome) -> str:
    done = home.farm("history", "s/c", "--json", code=0)
    return done.stdout


def test_all_runs_go_into_another_store_once(source: tuple[FarmHome, list[str]], home: FarmHome) -> None:
    there, (first, killed, last) = source
    file = home.cwd / "out" / "runs.jsonl"
    done = there.farm("data", "export", "--all", "--unfinished", "-o", str(file))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"export: {file}\n")
    assert list(file.parent.iterdir()) == [file]

    imported = home.farm("data", "import", str(file), code=0)
    assert imported.stdout.splitlines() == [
        f"imported {first}: 1 job, 1 attempt",
        f"imported {killed}: 1 job, 1 attempt, not finished",
        f"imported {last}: 1 job, 1 attempt",
        "3 runs imported, 0 were there already",
    ]
    assert history(home) == history(there)
    again = json.loads(home.farm("data", "import", str(file), str(file), "--json").stdout)
    assert again == {"schema": 1, "imported": [], "present": [first, killed, last]}


def test_a_pipe_is_as_good_as_a_file(source: tuple[FarmHome, list[str]], home: FarmHome) -> None:
    there, (first, killed, last) = source
    out = there.farm("data", "export", "--since", "2020-01-01")
    assert out.stderr == f"farm: unfinished and left out: {killed}; --unfinished writes them in their present state\n"
    # The device's output cannot control a terminal.
    assert not {"\x1b", "\x9b"} & set(out.stdout)
    command = [sys.executable, "-m", "farm.cli.main", "data", "import", "-"]
    done = subprocess.run(
        command, input=out.stdout, env=home.env, cwd=home.cwd, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1] == "2 runs imported, 0 were there already", done.stderr
    named = home.farm("data", "export", first, last, first)
    assert named.stdout == out.stdout


def test_a_reader_that_has_enough_ends_it_quietly(source: tuple[FarmHome, list[str]]) -> None:
    there, _ = source
    command = [sys.executable, "-m", "farm.cli.main", "data", "export", "--all", "--unfinished"]
    with Started(command, env=there.env, cwd=there.cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b'{"kind":"farm-export"')
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_the_other_formats_are_of_one_run(source: tuple[FarmHome, list[str]], home: FarmHome) -> None:
    there, (_, killed, last) = source
    written_to = {form: home.cwd / f"run.{form}" for form in ("ctrf", "junit", "hud", "trace")}
    for form, file in written_to.items():
        done = there.farm("data", "export", killed[:15], "--format", form, "--output", str(file))
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert json.loads(written_to["ctrf"].read_text())["results"]["summary"]["passed"] == 1
    assert ET.parse(written_to["junit"]).getroot().get("name") == f"farm run {killed}"  # noqa: S314 - our own output
    assert json.loads(written_to["hud"].read_text()) == []
    assert json.loads(written_to["trace"].read_text())["otherData"]["run"] == killed
    latest = json.loads(there.farm("data", "export", "--format", "ctrf").stdout)
    assert latest["results"]["environment"]["reportName"] == last


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("data", "export", "nonsense"), 2, "unknown run 'nonsense'"),
        (("data", "export", "latest", "--all"), 2, "say which runs: RUN..., or --all, or --since TIME"),
        (
            ("data", "export", "--all", "--format", "hud"),
            2,
            "--format hud is of one run: name one, or use --format jsonl",
        ),
        (("data", "export", "latest", "latest~1", "--format", "junit"), 2, "--format junit is of one run"),
        (("data", "export", "--unfinished"), 2, "--unfinished needs --all or --since"),
        (("data", "export", "--since", "a while"), 2, "--since 'a while': expected an age, such as 12h or 7d"),
        (("data", "export", "-o", "/proc/x/runs.jsonl"), 2, "cannot write /proc/x/runs.jsonl"),
        (("data", "export", "--format", "pdf"), 2, "'pdf' is not one of"),
        (("data", "import", "nowhere.jsonl"), 2, "nowhere.jsonl: cannot be read: No such file"),
        (("data", "import", "/proc/self/status"), 2, "/proc/self/status:1: "),
        (("data", "import", "-"), 2, "standard input:1: is no export of farm"),
    ],
)
def test_what_cannot_be_is_said_in_the_last_line(
    source: tuple[FarmHome, list[str]], arguments: tuple[str, ...], code: int, says: str
) -> None:
    done = source[0].farm(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr.splitlines()[-1]
    assert list(source[0].cwd.iterdir()) == []


def test_a_file_that_is_no_export_makes_no_store(home: FarmHome) -> None:
    (home.cwd / "bad.jsonl").write_text('{"kind":"farm-export","layout":5,"farm":"9"}\n')
    done = home.farm("data", "import", "bad.jsonl", code=2)
    expected = "bad.jsonl:1: is of a newer farm (layout 5, this one knows 4): update farm; nothing was imported"
    assert done.stderr == f"farm: {expected}\n"
    assert not home.state.exists()


@pytest.mark.parametrize(
    ("value", "count", "says"),
    [("0,", 60_000_000, "more than 64 MiB"), ("0.12345678901234567,", 6_000_000, "more than 64 MiB"),
     ("7,", 10_000_000, "more than 4,194,304 values")],
    ids=["zeros", "fractions", "sevens"],
)  # fmt: skip
def test_a_huge_line_is_refused_before_it_takes_the_memory(
    source: tuple[FarmHome, list[str]], home: FarmHome, value: str, count: int, says: str
) -> None:
    there, (first, _, _) = source
    *lines, attempt = there.farm("data", "export", first).stdout.splitlines()
    before, sample, after = attempt.partition('"samples":[')
    assert sample
    with (home.cwd / "huge.jsonl").open("w", encoding="utf-8") as file:
        file.write("\n".join([*lines, before + sample]) + value * count + after + "\n")
    with home.running("data", "import", "huge.jsonl") as process:
        # Limit of the address space, most of which an interpreter and its libraries reserve without use.
        resource.prlimit(process.pid, resource.RLIMIT_AS, (1200 << 20, 1200 << 20))
        printed = process.communicate()[0]
    assert process.returncode == 2, printed
    assert printed.startswith("farm: huge.jsonl:4: ")
    assert printed.count("\n") == 1
    assert says in printed


def test_an_export_of_nothing_says_so(source: tuple[FarmHome, list[str]], home: FarmHome) -> None:
    done = source[0].farm("data", "export", "--since", "2999-01-01", "-o", str(home.cwd / "none.jsonl"), code=0)
    assert done.stderr.splitlines()[0] == "farm: no run matches: the export is empty"
    assert home.farm("data", "import", "none.jsonl").stdout == "0 runs imported, 0 were there already\n"


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "here" / "a.json"
    write_file(file, "old")
    with pytest.raises(KeyboardInterrupt), written(file) as out:  # noqa: PT012 - what is written before it counts
        out.write(b"ne")
        raise KeyboardInterrupt
    assert (file.read_text(), list(file.parent.iterdir())) == ("old", [file])
    (tmp_path / "link.json").symlink_to(file)
    write_file(tmp_path / "link.json", "new")
    assert (file.read_text(), (tmp_path / "link.json").is_symlink()) == ("new", True)


def test_a_file_that_is_no_file_is_written_to(tmp_path: Path) -> None:
    write_file(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(UsageError, match="cannot write"):
        write_file(tmp_path / "a.json" / "b.json" / ("x" * 300), "text")
