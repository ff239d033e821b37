#!/usr/bin/python3 -IS
"""Stands in for `farm_runner --serve` where a test needs a runner that misbehaves: a model's bytes select how."""

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

START = Path.cwd()
OPTIONS = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[2:])


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"schema": 1, **answer}) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def fail(number: int, stage: str, code: int, **more: object) -> None:
    error = {"stage": stage, "message": f"{stage} as wanted", "code": None, "line": None}
    say({"job": number, "ok": False, "exit_code": code, "error": error, **more})


def work(number: int, flags: dict[str, str]) -> None:
    os.chdir(Path(START, flags["working_folder"]))
    what = Path(flags["model_path"]).read_bytes().split()[0].decode(errors="replace")
    if "heap_profiling_path" in OPTIONS and what != "heapless":
        # Only the first job of a process creates the first context.
        with Path(OPTIONS["heap_profiling_path"]).open("w") as file:
            file.write("DSP:before_context_created (bytes), 928212\n" if not number else "")
    if what == "crash" or (what == "crash-in-company" and number):
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "hang":
        Path("hangs").touch()
        time.sleep(600)
    if what == "late":
        fail(number, "execute", 9, last=True)
        os._exit(9)
    if what == "babble":
        sys.stdout.write("what a backend prints\n")
    if what == "noisy":
        sys.stderr.write("x" * 1_000_000)
        note("the end")
    if what in ("refused", "DAMAGED"):
        fail(number, "load", 4)
        return
    lines = Path(flags["input_list_path"]).read_text().split("\n")[:-1]
    for line, names in enumerate(lines):
        Path(flags["output_folder_path"], f"output_{line}_0.raw").write_bytes(Path(names.split()[0]).read_bytes())
    Path(flags["output_folder_path"], "extra.raw").write_bytes(b"not asked for")
    if "etdump_path" in flags:
        Path(flags["etdump_path"]).write_bytes(b"dump")
    if "debug_output_path" in flags:
        Path(flags["debug_output_path"]).write_bytes(b"intermediate")
    if "heap_profiling_path" in OPTIONS and what != "heapless":
        with Path(OPTIONS["heap_profiling_path"]).open("a") as file:
            file.write("DSP:after_context_freed (bytes), 930000\n")
    inferences = [{"line": line, "warm_up_ns": [], "iterations_ns": [5]} for line in range(len(lines))]
    say({"job": number, "ok": True, "exit_code": 0, "error": None, "outputs": [{}], "inferences": inferences})


def main() -> None:
    note(f"started {os.getpid()} {' '.join(sys.argv[1:])}")
    note(f"environment {os.environ['ADSP_LIBRARY_PATH']}")
    say({"ready": True, "pid": os.getpid(), "versions": {}})
    for number, line in enumerate(sys.stdin):
        note(f"farm_runner: job {number} begins")
        note(f"line {line.strip()}")
        flags = dict(word.removeprefix("--").split("=", 1) for word in shlex.split(line))
        if Path(START, flags["working_folder"], flags["model_path"]).read_bytes() == b"mute":
            sys.exit(0)
        work(number, flags)
        note(f"farm_runner: job {number} ends")
        if Path("model.pte").read_bytes().startswith(b"leaves"):
            sys.exit(3)


main()
