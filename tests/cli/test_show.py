"""`farm show`: all there is of one job."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from farm.base.errors import FarmError, UnknownNameError, UsageError
from farm.base.user import user_name
from farm.cli.main import cli
from farm.devices.device import AdbAddress, Device
from farm.results.attempt import Attempt, Cause, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord, RunRecord
from farm.store.store import open_store
from farm.suites.suite import Case, InputSpec, Job, Target

CONV, RELU, ADD = (
    Job(Case("s", name, module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))
    for name in ("conv", "relu", "add")
)
PHONE = Device(serial="phone-1", soc="SM8650", kind="hardware", build="b", address=AdbAddress(5037), product="phone")
REASON = f"output 0 against fp32: {'the channel differs, ' * 12}THE POINT"
LOG = "".join(f"line {n}: {'x' * 90}\n" for n in range(400)) + "Traceback (most recent call last):\n\x1b[2Jboom\u202e\n"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; in the newer one `conv` fails twice, `relu` does not compile and `add` was not begun."""
    folder = tmp_path_factory.mktemp("state")
    artifacts = ArtifactStore(folder / "artifacts")
    sha256 = artifacts.put(b"an etdump")
    outputs = [ArtifactRecord(artifacts.put(b"wrong"), 5, "output:output_0_0.raw")]
    measured = Measurement("latency", "ns", Direction.LOWER, (1.5e6, 1.6e6, 1.7e6))
    compared = Comparison(0, "fp32", 12.3, 0.9, 0.5, None, ("sqnr 12.3 dB < 20 dB",))
    with open_store(folder / "farm.db") as store:
        for age in (2, 1):
            began = time.time_ns() // 1_000_000 - age * 3_600_000
            run_id = store.begin_run(
                RunRecord("farm run --suite s", user_name(), "bench", {"executorch": "1.5.1"}, began)
            )
            store.plan_jobs(run_id, [CONV, RELU, ADD])
            store.record_device(run_id, PHONE)
            if age == 2:
                store.record_attempt(run_id, Attempt(ADD.id, Verdict.PASSED, Stage.DONE, "", "phone-1", began))
            else:
                built = Attempt(RELU.id, Verdict.FAILED, Stage.BUILD, "RuntimeError: no", log=LOG, cause=Cause.COMPILE)
                store.record_attempt(run_id, built)
                for number in range(2):
                    attempt = Attempt(
                        CONV.id, Verdict.FAILED, Stage.NUMERICS, REASON, "phone-1", began + number, 0.5,
                        bundle_key="b" * 64, comparisons=(compared,), measurements=(measured,), cause=Cause.NUMERICS,
                        notes=("a note",),
                    )  # fmt: skip
                    kept = [ArtifactRecord(sha256, 9, "etdump"), *(outputs[number:])]
                    store.record_attempt(run_id, attempt, artifacts=kept)
            store.finish_run(run_id, 1)
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
    assert (answer["schema"], answer["outcome"], answer["reason"]) == (1, "failed", REASON)
    assert [one["verdict"] for one in answer["job"]["attempts"]] == ["failed", "failed"]
    assert answer["run"]["command"] == "farm run --suite s"
    files = [(one["attempt"], one["kind"]) for one in answer["files"]]
    assert files == [(1, "etdump"), (1, "output:output_0_0.raw"), (2, "etdump")]
    assert all(Path(one["path"]).is_file() for one in answer["files"])
    assert json.loads(show(state, "s/relu", "--json"))["job"]["attempts"][0]["log"] == LOG


def test_it_is_the_newest_run_that_has_a_result_unless_one_is_named(state: Path) -> None:
    assert "attempt 1 of 1: passed" in show(state, "s/add")
    assert "s/add[SM8650-htp-8a8w]: not run" in show(state, "s/add", "--run", "latest")


@pytest.mark.parametrize("name", ["s/conv", "./s/conv", "../here/s/conv[SM8650-htp-8a8w]", "/there/s/conv"])
def test_a_suite_may_be_named_by_its_path(state: Path, name: str) -> None:
    assert show(state, name).startswith("s/conv[SM8650-htp-8a8w]: failed")


def test_the_name_of_a_test_is_no_path(state: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"unknown job 'pytest/tests/s/conv'"):
        show(state, "pytest/tests/s/conv")


def test_what_names_no_job_or_several_is_refused(state: Path) -> None:
    with pytest.raises(UsageError, match="s means 3 jobs, and only one can be shown: name it: s/"):
        show(state, "s")
    with pytest.raises(UnknownNameError, match="did you mean 's/conv'"):
        show(state, "s/cnov")
    with pytest.raises(UnknownNameError, match="run"):
        show(state, "s/conv", "--run", "nonsense")


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


def test_a_job_without_kept_files_has_none_to_write(state: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no file is kept of s/relu\[.*failures.keep_attempts in farm.toml"):
        show(state, "s/relu", "--files", str(tmp_path / "files"))
    assert not (tmp_path / "files").exists()
