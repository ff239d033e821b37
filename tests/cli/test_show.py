"""`farm show`: all there is of one job."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from made_runs import HOUR_MS, attempt_of, made_job, record_run

from farm.base.errors import FarmError, UnknownNameError, UsageError
from farm.cli.main import cli
from farm.results.attempt import Attempt, Cause, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord
from farm.store.store import open_store

CONV, RELU, ADD = (made_job(name) for name in ("conv", "relu", "add"))
REASON = f"output 0 against fp32: {'the channel differs, ' * 12}THE POINT"
LOG = "".join(f"line {n}: {'x' * 90}\n" for n in range(400)) + "Traceback (most recent call last):\n\x1b[2Jboom\u202e\n"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; in the newer one `conv` fails twice, `relu` does not compile and `add` was not begun."""
    folder = tmp_path_factory.mktemp("state")
    artifacts = ArtifactStore(folder / "artifacts")
    dump = ArtifactRecord(artifacts.put(b"an etdump"), 9, "etdump")
    output = ArtifactRecord(artifacts.put(b"wrong"), 5, "output:output_0_0.raw")
    fields = {
        "reason": REASON, "bundle_key": "b" * 64, "cause": Cause.NUMERICS, "notes": ("a note",),
        "comparisons": (Comparison(0, "fp32", 12.3, 0.9, 0.5, None, ("sqnr 12.3 dB < 20 dB",)),),
        "measurements": (Measurement("latency", "ns", Direction.LOWER, (1.5e6, 1.6e6, 1.7e6)),),
    }  # fmt: skip
    now_ms = time.time_ns() // 1_000_000
    with open_store(folder / "farm.db") as store:
        record_run(store, [ADD, CONV, RELU], [Verdict.PASSED], started_ms=now_ms - 2 * HOUR_MS)
        run_id = record_run(
            store, [CONV, RELU, ADD], [Verdict.FAILED], started_ms=now_ms - HOUR_MS, attempt=fields,
            artifacts=[dump, output], command="farm run --suite s", exit_code=1,
        )  # fmt: skip
        again = attempt_of(CONV, Verdict.FAILED, **fields, started_ms=now_ms)
        store.record_attempt(run_id, again, artifacts=[dump])
        unbuilt = Attempt(RELU.id, Verdict.FAILED, Stage.BUILD, "RuntimeError: no", log=LOG, cause=Cause.COMPILE)
        store.record_attempt(run_id, unbuilt)
    return folder


def show(state: Path, *arguments: str) -> str:
    done = CliRunner().invoke(cli, ["show", *arguments], env={"FARM_STATE_DIR": str(state), "COLUMNS": "80"})
    if isinstance(done.exception, FarmError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_it_has_every_attempt_with_its_whole_reason_numbers_files_and_what_to_do(state: Path) -> None:
    shown = show(state, "s/conv")
    assert shown.count(REASON) == 2
    for part in ("s/conv[SM8650-htp-8a8w]: failed", "attempt 2 of 2: failed at numerics, cause numerics, decides",
                 "on hardware device phone-1", "note: a note", "output 0 against fp32 violates: sqnr 12.3 dB < 20 dB",
                 "1.600 ms"):  # fmt: skip
        assert part in shown, part
    [place] = {line.split()[-1] for line in shown.splitlines() if "  etdump" in line}
    assert Path(place).read_bytes() == b"an etdump"
    for command in ("farm run ", "farm jobs rerun ", "farm debug ", "farm history "):
        assert f"\n  {command}" in shown


def test_it_has_the_whole_log_with_nothing_that_a_terminal_obeys(state: Path) -> None:
    shown = show(state, "s/relu")
    assert "Traceback (most recent call last):" in shown
    assert shown.count("x" * 90) == 400
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    # A job that did not compile has no bundle to run again.
    assert "farm jobs rerun" not in shown


def test_json_has_the_same(state: Path) -> None:
    answer = json.loads(show(state, "s/conv", "--json"))
    assert (answer["outcome"], answer["reason"]) == ("failed", REASON)
    files = [(one["attempt"], one["kind"]) for one in answer["files"]]
    assert files == [(1, "etdump"), (1, "output:output_0_0.raw"), (2, "etdump")]
    assert all(Path(one["path"]).is_file() for one in answer["files"])
    assert json.loads(show(state, "s/relu", "--json"))["job"]["attempts"][0]["log"] == LOG


def test_it_is_the_newest_run_that_has_a_result_unless_one_is_named(state: Path) -> None:
    assert "attempt 1 of 1: passed" in show(state, "s/add")
    assert "s/add[SM8650-htp-8a8w]: not run" in show(state, "s/add", "--run", "latest")


def test_a_suite_may_be_named_by_its_path(state: Path) -> None:
    for name in ("./s/conv", "../here/s/conv[SM8650-htp-8a8w]", "/there/s/conv"):
        assert show(state, name).startswith("s/conv[SM8650-htp-8a8w]: failed")


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["s"], UsageError, "s means 3 jobs, and only one can be shown: name it: s/"),
        (["s/cnov"], UnknownNameError, "did you mean 's/conv'"),
        (["s/conv", "--run", "nonsense"], UnknownNameError, "run"),
        # The name of a test is no path.
        (["pytest/tests/s/conv"], UnknownNameError, "unknown job 'pytest/tests/s/conv'"),
        (
            ["s/relu", "--files", "files"],
            UsageError,
            r"no file is kept of s/relu\[.*failures.keep_attempts in farm.toml",
        ),
    ],
)
def test_a_name_of_no_job_or_of_several_is_refused(
    state: Path, words: list[str], error: type[FarmError], message: str
) -> None:
    with pytest.raises(error, match=message):
        show(state, *words)
    assert not Path("files").exists()


def test_the_kept_files_are_written_by_attempt(state: Path, tmp_path: Path) -> None:
    [command] = {line.strip() for line in show(state, "s/conv").splitlines() if "--files" in line}
    assert command.startswith("farm show 's/conv[SM8650-htp-8a8w]' --run ")
    show(state, "s/conv", "--files", str(tmp_path / "files"))
    found = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == {
        "files/attempt-1/etdump.etdp": b"an etdump",
        "files/attempt-1/output_0_0.raw": b"wrong",
        "files/attempt-2/etdump.etdp": b"an etdump",
    }
    with pytest.raises(UsageError, match="is there already: name another folder"):
        show(state, "s/conv", "--files", str(tmp_path / "files"))
