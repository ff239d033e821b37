"""ExecuTorch's own runners, which run one job and end, over a real adb server and a real sshd, with a stub of them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

import made
import msgspec
import numpy as np
import pytest
from ssh_server import SshServer
from waiting import ends, until
from watched_transport import Watched

from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle, Generation, TensorSpec
from farm.builds.runtime.runtime import LLAMA_RUNNER, Runtime
from farm.devices.execution import runner_process as one_shot_module
from farm.devices.execution.liveness import take_over
from farm.devices.execution.raw import HEAP_FILE, RESULT_FILE, RawResult, RunnerOptions
from farm.devices.execution.session import DeviceSession
from farm.devices.ssh.transport import SshTransport
from farm.policy.retries import Tried, classify
from farm.results.attempt import Cause, Ending, Stage, Verdict
from farm.results.measurements import time_measurements
from farm.results.outcome import outcome
from farm.results.outputs import describe_differing

STUB = Path(__file__).with_name("one_shot_stub.sh")
OPTIONS = RunnerOptions(iterations=2, warm_up=1, timeout_s=30)
MS = 1_000_000
Run = Callable[..., RawResult]


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    """Direct mode's runner: its one flag more, and a library beside it."""
    library = tmp_path / "libqnn_executorch_stub.so"
    library.write_bytes(str(tmp_path).encode())
    files = {STUB.name: STUB, library.name: library}
    return made.runtime(files, STUB.name, "android", one_shot=True, flags={"domain_id": "3"})


def latency(raw: RawResult) -> tuple[float, ...]:
    report = outcome(raw)
    assert not isinstance(report, Ending), report
    return next((one.samples for one in time_measurements(report) if one.metric == "latency"), ())


def test_every_execution_is_a_line_and_the_last_of_each_sample_is_kept(run: Run) -> None:
    raw = run(b"good", OPTIONS, [b"12345678", b"abcdefgh"])
    assert (raw.error, raw.exit_code, raw.process_ended) == ("", 0, False), raw.stderr
    assert {path.name for path in raw.folder.iterdir()} == {"output_0_0.raw", "output_1_0.raw", RESULT_FILE}
    assert (raw.output(0, 0).read_bytes(), raw.output(1, 0).read_bytes()) == (b"12345678", b"abcdefgh")
    # Lines 1 and 4 are warm-up; every line has its time.
    assert latency(raw) == (2.5 * MS, 3.5 * MS, 5.5 * MS, 6.5 * MS)
    report = outcome(raw)
    assert not isinstance(report, Ending)
    assert [one.metric for one in time_measurements(report)] == ["latency"], "it does not say how long the load took"
    assert not describe_differing(report)
    report = outcome(run(b"unsteady", OPTIONS))
    assert not isinstance(report, Ending)
    assert describe_differing(report) == ("execution 2 of 3 (the first is warm-up) gave other outputs than the last")


def test_it_gets_the_flags_that_the_original_has_and_no_others(run: Run) -> None:
    raw = run(b"good", OPTIONS)
    called, environment = raw.stderr.splitlines()[:2]
    flags = dict(word.removeprefix("--").split("=", 1) for word in called.split()[2:])
    assert flags == {
        "model_path": "model.pte",
        "input_list_path": "repeated_list.txt",
        "output_folder_path": f"{called.split()[1].rpartition('/runtime/')[0]}/1/outputs",
        "domain_id": "3",
    }
    folder = called.split()[1].rpartition("/")[0]
    assert environment == f"environment LD_LIBRARY_PATH={folder} ADSP_LIBRARY_PATH={folder}"
    options = RunnerOptions(iterations=1, warm_up=0, timeout_s=30, flags={"htp_performance_mode": "2"}, etdump=True)
    again = run(b"good again", options)
    assert {"--htp_performance_mode=2", "--domain_id=3"} < set(again.stderr.split())
    assert (again.folder / "etdump.etdp").read_bytes() == b"dump\n"
    heap = run(b"good", RunnerOptions(iterations=1, warm_up=0, timeout_s=30, heap=True))
    assert (heap.folder / HEAP_FILE).read_text().startswith("DSP:before_context_created")


@pytest.mark.parametrize(("what", "expected"), [(b"direct", (2.0 * MS,)), (b"silent", (1.25 * MS,))])
def test_a_mean_alone_is_one_sample(run: Run, what: bytes, expected: tuple[float]) -> None:
    assert latency(run(what, OPTIONS)) == expected


@pytest.mark.parametrize(
    ("what", "verdict", "stage", "cause", "reason"),
    [
        (b"unloadable", Verdict.FAILED, Stage.LOAD, Cause.REFUSED, "Loading of method forward failed with status 0x20"),
        (b"refused-on-dsp", Verdict.FAILED, Stage.EXECUTE, Cause.REFUSED, "qnn_executorch_execute_all failed"),
        (b"no-dsp", Verdict.INFRA, Stage.LOAD, Cause.DEVICE, "qnn_executorch_open failed: 0x4e"),
        (b"short", Verdict.FAILED, Stage.EXECUTE, Cause.REFUSED, "output_0_0.raw has 1 bytes, the reference 8"),
        (b"nothing", Verdict.INFRA, Stage.EXECUTE, Cause.NONE, "ended well and wrote 0 of 3 outputs"),
        (b"crash", Verdict.FAILED, Stage.EXECUTE, Cause.CRASH, "signal 11"),
        (b"assertion", Verdict.FAILED, Stage.EXECUTE, Cause.CRASH, "signal 6"),
        (b"loader", Verdict.INFRA, Stage.EXECUTE, Cause.RUNTIME, "CANNOT LINK EXECUTABLE"),
    ],
)
def test_every_end_is_judged_as_that_of_a_session(
    run: Run, what: bytes, verdict: Verdict, stage: Stage, cause: Cause, reason: str
) -> None:
    raw = run(what, OPTIONS)
    ending = outcome(raw)
    assert isinstance(ending, Ending)
    assert (ending.verdict, ending.stage, ending.cause) == (verdict, stage, cause), ending.reason
    assert reason in ending.reason
    # Only a process that ended without a result is tried once more.
    assert raw.process_ended == (cause is Cause.CRASH or what == b"loader")


def test_a_hang_is_ended_in_its_time_and_nothing_is_left_of_it(run: Run, storage: Path) -> None:
    raw = run(b"hang", RunnerOptions(iterations=1, warm_up=0, timeout_s=1))
    assert raw.timed_out
    assert raw.process_ended
    ending = outcome(raw)
    assert isinstance(ending, Ending)
    assert ending.cause is Cause.HANG
    [file] = storage.glob("run-r-*/*/hangs")
    assert ends(int(file.read_text()))
    assert run(b"good").exit_code == 0


def test_a_new_owner_ends_a_runner_that_still_runs(run: Run, transport: Watched, storage: Path) -> None:
    with ThreadPoolExecutor(1) as aside:
        running = aside.submit(run, b"hang", OPTIONS)
        found = until(
            lambda: [path for path in storage.glob("run-r-*/*/hangs") if path.read_text().strip()],
            "a runner that hangs",
        )
        pid = int(found[0].read_text())
        take_over(transport, "run-other")
        raw = running.result()
    assert ends(pid)
    assert raw.exit_code == 128 + 9


def test_too_many_executions_are_the_jobs_failure(run: Run) -> None:
    raw = run(b"good", RunnerOptions(iterations=1000, warm_up=1, timeout_s=30))
    ending = outcome(raw)
    assert isinstance(ending, Ending)
    assert (ending.verdict, ending.cause) == (Verdict.FAILED, Cause.UNSUPPORTED)
    assert "ask for at most 1000, with --iterations and --warm-up together" in ending.reason
    assert not raw.process_ended
    attempt = Tried("one", ending.verdict, ending.cause, ending.stage, ending.reason)
    assert not classify([attempt], others=2).repeat


def test_executions_that_farm_chose_are_reduced(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [b"12345678", b"abcdefgh"]
    reducible = RunnerOptions(iterations=2, warm_up=1, timeout_s=30, reducible=True)
    monkeypatch.setattr(one_shot_module, "_MOST_OUTPUTS", 4)
    raw = run(b"good", reducible, samples)
    assert latency(raw) == (2.5 * MS, 4.5 * MS)
    [note] = raw.notes
    assert note.startswith("3 executions of each sample were due, and 2 made: ")
    monkeypatch.setattr(one_shot_module, "_MOST_OUTPUTS", 1)
    again = run(b"good too", RunnerOptions(reducible=True), samples)
    assert latency(again) == (1.5 * MS, 2.5 * MS), "one of each sample is always possible"


def test_a_board_behind_ssh_runs_jobs_the_same_way(
    runtime: Runtime, make_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    oe_linux = msgspec.structs.replace(runtime, kind="oe-linux", flags={})
    with Supervisor() as supervisor:
        server = SshServer(supervisor, tmp_path / "sshd").start()
        transport = SshTransport("board-1", server.address)
        session = DeviceSession(transport, oe_linux, "r", "board-1")
        good = session.execute("s/c", session.stage(make_bundle(b"good")), tmp_path / "good", OPTIONS)
        limits = RunnerOptions(iterations=1, warm_up=0, timeout_s=1)
        hung = session.execute("s/c", session.stage(make_bundle(b"hang")), tmp_path / "hang", limits)
        [file] = (server.folder / "storage").glob(f"run-r-{os.getpid()}/*/hangs")
        pid = int(file.read_text())
        session.close()
        assert ends(pid)
        server.stop()
    assert latency(good) == (2.5 * MS, 3.5 * MS), good.stderr
    assert "domain_id" not in good.stderr
    assert hung.timed_out


@pytest.mark.parametrize("change", [-1, 1])
def test_logits_of_another_size_are_no_failure_of_the_program(
    transport: Watched, make_bundle: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    stub = Path(__file__).parents[1] / "qnn_llama_runner_stub.py"
    program, tokenizer, pull = tmp_path / "program", tmp_path / "tokenizer.json", transport.pull
    program.write_text(f"#!{sys.executable} -IS\n{stub.read_text()}")
    tokenizer.write_text(json.dumps({"mode": "fine", "vocabulary": 24}))
    runtime = made.runtime({LLAMA_RUNNER: program, "tokenizer/tokenizer.json": tokenizer}, LLAMA_RUNNER, one_shot=True)
    decoder = make_bundle(b"decoder", [np.array([1, 2, 3], np.int32).tobytes()])
    generation = Generation("kv", 16, 0, 1, 2, 24, 16, 4, prompt_tokens=(3,))
    manifest = msgspec.structs.replace(
        decoder.manifest, inputs=(TensorSpec((3,), "int32"),), outputs=(), generation=generation, references=()
    )

    def pull_changed(files: Mapping[PurePosixPath, Path], **options: Any) -> None:
        """Lose the end of logits on their way, or add to them."""
        pull(files, **options)
        for path in files.values():
            if path.name.startswith("generated_"):
                path.write_bytes((path.read_bytes() + b"\0")[: None if change > 0 else -2])

    monkeypatch.setattr(transport, "pull", pull_changed)
    with closing(DeviceSession(transport, runtime, "r", transport.serial)) as session:
        bundle = msgspec.structs.replace(decoder, manifest=manifest)
        raw = session.execute("s/c", session.stage(bundle), tmp_path / "raw", RunnerOptions(timeout_s=60))
    ending = outcome(raw)
    assert isinstance(ending, Ending), "the tokens of other logits were accepted"
    assert ending.verdict is Verdict.INFRA, ending.reason
    assert f"arrived with {6 * 24 * 2 + change} bytes" in ending.reason
