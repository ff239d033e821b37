"""`farm data export` and `farm data import`: between stores, into files, through pipes; and their refusals."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from farm_home import FarmHome
from made_runs import BEGAN_MS, HOUR_MS, record_run

from farm.base.errors import UsageError
from farm.cli.output import write_file, written
from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Direction, Measurement
from farm.store.store import open_store

VIRTUAL = Device("virtual-1", "SM8650", "virtual", "b", AdbAddress(5037), "phone")


@pytest.fixture(scope="module")
def source(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[FarmHome, list[str]]:
    """Home with two finished runs and a killed one between them; tests only read it."""
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("source"))
    home.state.mkdir()
    latency = Measurement("latency", "ns", Direction.LOWER, (1e6 / 3, float("inf")))
    attempt = {"measurements": (latency,), "log": "\x1b[31mred\x9b0m\n" * 20_000}
    with open_store(home.state / "farm.db") as store:
        ids = [
            record_run(
                store, started_ms=BEGAN_MS + day * 24 * HOUR_MS, device=VIRTUAL, attempt=attempt, exit_code=exit_code
            )
            for day, exit_code in enumerate((0, None, 0))
        ]
    return home, ids


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
    assert home.json("history", "s/c") == there.json("history", "s/c")
    again = json.loads(home.farm("data", "import", str(file), str(file), "--json").stdout)
    assert again == {"schema": 1, "imported": [], "present": [first, killed, last]}


def test_a_pipe_is_as_good_as_a_file(source: tuple[FarmHome, list[str]], home: FarmHome) -> None:
    there, (first, killed, last) = source
    out = there.farm("data", "export", "--since", "2020-01-01")
    assert out.stderr == f"farm: unfinished and left out: {killed}; --unfinished writes them in their present state\n"
    # The device's output cannot control a terminal.
    assert not {"\x1b", "\x9b"} & set(out.stdout)
    done = home.farm("data", "import", "-", stdin=out.stdout)
    assert done.stdout.splitlines()[-1] == "2 runs imported, 0 were there already", done.stderr
    named = home.farm("data", "export", first, last, first)
    assert named.stdout == out.stdout


def test_a_reader_that_has_enough_ends_it_quietly(source: tuple[FarmHome, list[str]]) -> None:
    there, _ = source
    with there.start_alone("data", "export", "--all", "--unfinished") as process:
        assert process.stdout.readline().startswith(b'{"kind":"farm-export"')
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_impossible_requests_are_told_in_the_last_line(source: tuple[FarmHome, list[str]]) -> None:
    home, _ = source
    for arguments, message in {
        ("export", "nonsense"): "unknown run 'nonsense'",
        ("export", "latest", "--all"): "name the runs: RUN..., or --all, or --since TIME",
        ("export", "--all", "--format", "hud"): "--format hud is of one run: name one, or use --format jsonl",
        ("export", "latest", "latest~1", "--format", "junit"): "--format junit is of one run",
        ("export", "--unfinished"): "--unfinished needs --all or --since",
        ("export", "--since", "a while"): "--since 'a while': expected an age, such as 12h or 7d",
        ("export", "-o", "/proc/x/runs.jsonl"): "cannot write /proc/x/runs.jsonl",
        ("import", "nowhere.jsonl"): "nowhere.jsonl: cannot be read: No such file",
        ("import", "/proc/self/status"): "/proc/self/status:1: ",
        ("import", "-"): "standard input:1: is no export of farm",
    }.items():
        done = home.farm("data", *arguments, code=2)
        assert (done.stdout, message in done.stderr.splitlines()[-1]) == ("", True), done.stderr
    assert list(home.cwd.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "count", "says"),
    [("0.12345678901234567,", 3_600_000, "more than 64 MiB"), ("7,", 5_000_000, "more than 4,194,304 values")],
    ids=["fractions", "sevens"],
)
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
