"""The session mode: many jobs in one process, each answered on its own line, none harmed by the one before it."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_runner.sanitizers import runner_environment


def _files(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def _backends(session: Any) -> tuple[int, ...]:
    """Return how often a session started a backend, and ended one."""
    return tuple(session.stderr.count(text) for text in ("Creating new backend bundle", "Destroy Qnn backend"))


def test_every_job_is_answered_when_its_files_are_there(conv: Any) -> None:
    with conv.serve("--keep_loaded=model.pte") as session:
        ready = session.ready
        assert (ready["schema"], ready["ready"], ready["pid"]) == (1, True, session.process.pid)
        assert set(ready["versions"]) == {"executorch", "runner"}
        for job in range(2):
            outputs = conv.folder / f"out{job}"
            outputs.mkdir()
            answer = session.ask(
                *("--iteration=2", f"--output_folder_path=out{job}", f"--result_path=r{job}.json"),
                *(f"--etdump_path=e{job}.etdp", f"--performance_output_path=p{job}.txt"),
            )
            assert _files(outputs) == {"output_0_0.raw": 8192, "output_1_0.raw": 8192}
            result = json.loads((conv.folder / f"r{job}.json").read_text())
            assert answer == {**result, "job": job, "warm": True}
            assert answer["ok"] is True
            assert [len(inference["iterations_ns"]) for inference in answer["inferences"]] == [2, 2]
            assert (conv.folder / f"e{job}.etdp").stat().st_size > 0
            assert float((conv.folder / f"p{job}.txt").read_text()) > 0
        assert session.end() == 0
    conv.passes()
    assert conv.output(1, 0).tobytes() == (conv.folder / "out1" / "output_1_0.raw").read_bytes()
    # The backend started once, though all jobs are the program that is kept loaded.
    assert _backends(session) == (1, 1)


def test_markers_on_standard_error_enclose_a_job(conv: Any) -> None:
    before = set(_files(conv.folder))
    with conv.serve() as session:
        assert session.ask()["ok"] is True
        # Nothing is written that was not asked for.
        assert set(_files(conv.folder)) == before | {"stderr.txt"}
        session.ask("--model_path=none.pte")
        lines = session.stderr.splitlines()
    marks = [line for line in lines if line.startswith("farm_runner: ")]
    assert marks[:3] == ["farm_runner: job 0 begins", "farm_runner: job 0 ends", "farm_runner: job 1 begins"]
    assert marks[3].startswith("farm_runner: load: cannot read 'none.pte'")
    assert marks[4:] == ["farm_runner: job 1 ends"]
    first, last = lines.index(marks[0]), lines.index(marks[1])
    assert any("Qnn ExecuTorch" in line for line in lines[first:last])


def test_a_bad_job_harms_no_other(conv: Any) -> None:
    (conv.folder / "short.raw").write_bytes(bytes(7))
    (conv.folder / "short.txt").write_text("short.raw\n")
    bad = [
        (["--nosuch"], 2, "flags", "unknown flag '--nosuch'"),
        (["--serve"], 2, "flags", "--serve cannot stand in the line of a job"),
        (["--keep_loaded=model.pte"], 2, "flags", "--keep_loaded cannot stand in the line of a job"),
        (["--working_folder=nowhere"], 2, "flags", "cannot change into 'nowhere'"),
        (["--log_level=2"], 3, "options", "--log_level=2 needs a process of its own: this session has --log_level=1"),
        (["--heap_profiling_path=h.txt"], 3, "options", "needs a process of its own"),
        (["--model_path=none.pte"], 4, "load", "cannot read 'none.pte'"),
        (["--input_list_path=none.txt"], 5, "inputs", "cannot read 'none.txt'"),
        (["--input_list_path=short.txt"], 5, "inputs", "has 7 bytes"),
        (["--output_folder_path=none"], 7, "outputs", "cannot write into folder 'none'"),
        (["--etdump_path=none/e.etdp"], 8, "etdump", "cannot write 'none/e.etdp'"),
    ]
    with conv.serve("--log_level=1") as session:
        for job, (flags, code, stage, message) in enumerate(bad):
            answer = session.ask(*flags)
            assert (answer["job"], answer["ok"], answer["exit_code"]) == (2 * job, False, code)
            assert answer["error"]["stage"] == stage
            assert message in answer["error"]["message"]
            assert "last" not in answer
            good = session.ask("--log_level=1")
            assert (good["job"], good["ok"], good["exit_code"]) == (2 * job + 1, True, 0), good
        assert session.end() == 0


def test_a_line_that_is_no_job(conv: Any) -> None:
    with conv.serve() as session:
        for line in (b"", b"  \t ", b"\r"):
            session.send(line)
        for line, message in (
            (b"--model_path 'x", "ends before '"),
            (b'--model_path "x', 'ends before "'),
            (b"--model_path x\\", "ends before what a backslash quotes"),
            (b"--model_path=x\0y", "has a zero byte"),
            (b"--model_path=" + b"x" * (1 << 20), "has more than 1048576 bytes"),
        ):
            session.send(line)
            answer = session.answer()
            assert (answer["exit_code"], answer["error"]["stage"]) == (2, "flags")
            assert message in answer["error"]["message"]
        # The longest allowed line; a name that is not UTF-8 is a file name like any other.
        session.send(b"--model_path=" + b"\xff" * ((1 << 20) - 13))
        assert "cannot read '\ufffd\ufffd" in session.answer()["error"]["message"]
        answer = session.ask()
        assert (answer["job"], answer["ok"]) == (6, True)


def test_paths_are_quoted_as_a_shell_does(conv: Any) -> None:
    folder = conv.folder / "outputs"
    with conv.serve() as session:
        for name in ("a folder", 'say "so"', "it's", "back\\slash", "$HOME `x` *", "line\u2028end", "--x"):
            folder = folder.rename(conv.folder / name)
            escaped = "".join("\\" + char if char in '\\"$`' else char for char in name)
            for line in (
                shlex.join(["--output_folder_path", name]).encode(),
                b"--output_folder_path=" + b"".join(b"\\" + bytes([byte]) for byte in name.encode()),
                f'--output_folder_path="{escaped}"'.encode(),
            ):
                session.send(line)
                assert session.answer()["ok"] is True, line
                assert [path.unlink() for path in folder.iterdir()] == [None, None]


def test_a_job_works_in_its_folder_and_the_next_one_starts_where_the_session_did(conv: Any, tmp_path: Path) -> None:
    inside, outside = conv.folder / "jobs" / "1", tmp_path / "outside"
    shutil.copytree(conv.folder, inside)
    shutil.copytree(conv.folder, outside, ignore=shutil.ignore_patterns("jobs"))
    with conv.serve() as session:
        for folder in ("jobs/1", str(outside), "jobs/1"):
            assert session.ask(f"--working_folder={folder}", "--result_path=r.json")["ok"] is True
        assert session.ask("--working_folder=1")["ok"] is False
        assert session.ask("--result_path=here.json")["ok"] is True
    for place, result in ((inside, "r.json"), (outside, "r.json"), (conv.folder, "here.json")):
        assert (place / result).is_file()
        assert len(list((place / "outputs").iterdir())) == 2


def test_jobs_from_a_file_and_answers_into_one(conv: Any) -> None:
    jobs, answers = conv.folder / "jobs.txt", conv.folder / "answers.jsonl"
    # The last line does not end, and input that ends does not end a job.
    jobs.write_text("--iteration=1\n\n--nosuch\n--iteration=20")
    files = {"stdin": jobs.open(), "stdout": answers.open("w"), "stderr": subprocess.DEVNULL}
    with files["stdin"], files["stdout"], conv.start("--serve", **files) as process:
        assert process.wait(120) == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line.get("job") for line in lines] == [None, 0, 1, 2]
    assert [line.get("ok") for line in lines] == [None, True, False, True]
    assert len(lines[3]["inferences"][1]["iterations_ns"]) == 20


def test_programs_of_several_backends_share_a_session(bare: Any, models: Path) -> None:
    bare.list_inputs(str(models / "conv_input_0.raw"))
    (bare.folder / "x.txt").write_text(f"{models / 'xnnpack_input.raw'}\n")
    (bare.folder / "shape.txt").write_text("2, 8\n")
    xnnpack = (f"--model_path={models / 'xnnpack.pte'}", "--input_list_path=x.txt", "--input_shape_path=shape.txt")
    with bare.serve(f"--keep_loaded={models / 'conv_dump.pte'}") as session:
        assert session.stderr.count("Creating new backend bundle") == 1
        conv, dump = ((f"--model_path={models / name}.pte",) for name in ("conv", "conv_dump"))
        for flags in (xnnpack, conv, xnnpack, dump, dump, conv):
            answer = session.ask(*flags)
            assert (answer["ok"], answer["warm"]) == (True, True), answer
        assert session.end() == 0
        assert _backends(session) == (1, 1)


def test_without_a_program_that_is_kept_loaded_every_job_starts_the_backend(conv: Any) -> None:
    with conv.serve("--keep_loaded=") as session:
        assert [session.ask()["warm"] for _ in range(2)] == [False, False]
        assert session.end() == 0
        assert _backends(session) == (2, 2)


def test_a_program_for_another_soc_is_refused_where_the_backend_is_up(conv: Any, models: Path) -> None:
    with conv.serve("--keep_loaded=model.pte") as session:
        answer = session.ask(f"--model_path={models / 'conv_sm8850.pte'}")
        assert (answer["exit_code"], answer["error"]["stage"]) == (4, "load")
        assert session.ask()["ok"] is True


@pytest.mark.parametrize("kept", ["missing", "truncated", "context", "xnnpack"])
def test_a_session_goes_on_without_a_program_that_cannot_be_kept_or_is_not_for_qnn(
    conv: Any, models: Path, kept: str
) -> None:
    good = (conv.folder / "model.pte").read_bytes()
    content = {
        "truncated": good[:7000],
        "context": good[:1300] + bytes(4000) + good[5300:],
        "xnnpack": (models / "xnnpack.pte").read_bytes(),
    }
    if kept != "missing":
        (conv.folder / "kept.pte").write_bytes(content[kept])
    with conv.serve("--keep_loaded=kept.pte") as session:
        answer = session.ask()
        assert (answer["ok"], answer["warm"]) == (True, False)
        assert ("farm_runner: --keep_loaded: " in session.stderr) == (kept != "xnnpack")


def test_nothing_stays_loaded_when_the_heap_of_the_dsp_is_measured(conv: Any) -> None:
    (conv.folder / "heap.txt").write_text("of an earlier run")
    with conv.serve("--heap_profiling_path=heap.txt", "--profile_level=2") as session:
        for _ in range(2):
            answer = session.ask("--heap_profiling_path=heap.txt")
            assert (answer["ok"], answer["warm"]) == (True, False)
        # The simulator writes none.
        assert not (conv.folder / "heap.txt").exists()
        assert session.stderr.count("Destroy Qnn backend") == 2


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--model_path=model.pte"], 2, "--model_path belongs into the line of a job"),
        (["--nosuch"], 2, "unknown flag '--nosuch'"),
        (["--keep_loaded=k.pte", "--heap_profiling_path=h.txt"], 2, "exclude each other"),
        ([f"--heap_profiling_path={'x' * 256}"], 3, "has a text of 256 bytes"),
    ],
)
def test_a_session_that_cannot_start_says_why_and_takes_no_job(
    bare: Any, flags: list[str], code: int, message: str
) -> None:
    ran = bare.run("--serve", *flags)
    assert (ran.code, ran.stdout, ran.result) == (code, "", None)
    assert message in ran.stderr


# From here on a stub replaces a backend; its input makes it hang, crash or print.


def test_a_job_that_takes_too_long_ends_the_session_with_an_answer(stub: Any) -> None:
    with stub.serve() as session:
        assert session.ask("--input_list_path=work.txt", "--timeout_ms=60000")["ok"] is True
        assert stub.output(0, 0).tolist() == [0, -1]
        answer = session.ask("--input_list_path=hang.txt", "--timeout_ms=200", "--result_path=r.json")
        assert (answer["job"], answer["ok"], answer["exit_code"], answer["last"]) == (1, False, 9, True)
        expected = {"stage": "execute", "message": "not finished after 200 ms", "code": None, "line": None}
        assert answer["error"] == expected
        assert answer["inferences"] == [{"line": 0, "warm_up_ns": [], "iterations_ns": []}]
        assert json.loads((stub.folder / "r.json").read_text())["exit_code"] == 9
        assert session.process.wait() == 9
        assert "farm_runner: job 1 ends" in session.stderr


def test_the_time_of_a_job_starts_with_the_job(stub: Any) -> None:
    with stub.serve() as session:
        # The limit of an earlier job is none for a later one, be it shorter or longer.
        for limit in ("60000", "200", "0", "60000", "200"):
            assert session.ask("--input_list_path=work.txt", f"--timeout_ms={limit}")["ok"] is True
        answer = session.ask("--input_list_path=hang.txt", "--timeout_ms=300")
        assert answer["error"]["message"] == "not finished after 300 ms"
        assert session.process.wait() == 9


def test_a_crash_ends_the_session_without_an_answer(stub: Any) -> None:
    with stub.serve() as session:
        assert session.ask("--input_list_path=work.txt")["ok"] is True
        session.send(b"--input_list_path=crash.txt")
        assert session.process.wait() == -signal.SIGSEGV
        assert session.process.stdout.read() == b""
        marks = [line for line in session.stderr.splitlines() if line.startswith("farm_runner: job")]
        assert marks[-1] == "farm_runner: job 1 begins"


def test_a_failure_and_output_of_a_backend_do_not_end_the_session_and_an_abort_is_answered(stub: Any) -> None:
    with stub.serve() as session:
        assert "versions" in session.ask("--input_list_path=print.txt")
        answer = session.ask("--input_list_path=fail.txt")
        assert (answer["exit_code"], answer["error"]["stage"], answer["error"]["line"]) == (6, "execute", 0)
        assert "the stub refuses" in answer["error"]["message"]
        assert session.ask("--input_list_path=work.txt")["job"] == 2
        answer = session.ask("--input_list_path=abort.txt")
        assert (answer["ok"], answer["exit_code"], answer["last"]) == (False, 6, True)
        assert answer["error"]["message"] == "ExecuTorch aborted: the stub gives up"
        assert session.process.wait() == 6
        lines = session.stderr.splitlines()
    # A printed line in the form of an answer is none.
    printed = lines.index('{"schema":1,"job":0,"ok":true}')
    assert lines.index("farm_runner: job 0 begins") < printed < lines.index("farm_runner: job 0 ends")


def test_a_session_that_nobody_listens_to_ends_in_the_middle_of_a_job(stub: Any) -> None:
    with stub.serve() as session:
        session.send(b"--input_list_path=hang.txt")
        session.wait_for("backend stub hangs")
        session.process.stdout.close()
        assert session.process.wait() == 10


def test_a_session_that_nobody_listens_to_ends_while_it_waits(bare: Any) -> None:
    with bare.serve() as session:
        session.process.stdout.close()
        assert session.process.wait() == 10


def test_a_session_without_standard_output_does_not_start(bare: Any) -> None:
    words = ["sh", "-c", 'exec "$0" --serve </dev/null >&-', str(bare.runtime / "farm_runner")]
    assert subprocess.run(words, env=runner_environment(bare.runtime, {}), timeout=60, check=False).returncode == 10


def test_outputs_are_of_the_job_that_was_asked(bare: Any, models: Path) -> None:
    shutil.copy(models / "select.pte", bare.folder / "model.pte")
    bare.write("table.raw", np.arange(8).reshape(4, 2))
    with bare.serve() as session:
        for job in range(8):
            bare.write("index.raw", [job % 4, 0, 1], np.int64)
            bare.list_inputs("table.raw index.raw")
            assert session.ask()["job"] == job
            assert bare.output(0, 0).tolist()[:2] == [2 * (job % 4), 2 * (job % 4) + 1]
