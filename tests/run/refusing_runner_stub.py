#!/usr/bin/python3 -IS
"""Stands in for `farm_runner --serve` of a device whose DSP session dies, as the file `dies.txt` beside it sets.

The first line of the file is:
* the number of the first refused job, counted for the `process` or for the `device`; later jobs are refused too
* the only refused job, counted `once`
* `program`: this device alone refuses the program `picky`
The other lines are the DSP's output at a refusal; a last line `health_check ...` is its output at the health check.
The program `refused` is refused anywhere, the program `late` by a process that has to keep its time.
"""

import json
import os
import shlex
import sys
from pathlib import Path

START, HERE = Path.cwd(), Path(sys.argv[0]).parent
MS = 1_000_000


def say(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps({"schema": 1, **answer}) + "\n")
    sys.stdout.flush()


def refuses(number: int, model: bytes) -> str:
    first, _, words = (HERE / "dies.txt").read_text().partition("\n")
    words, _, of_health_check = words.partition("\nhealth check ")
    if model.startswith(b"late"):
        return "" if "--lpai_client_perf_type=2" in sys.argv else words
    if model.startswith(b"health_check") and of_health_check:
        words = of_health_check
    if model.startswith(b"refused") or (first == "program" and model.startswith(b"picky")):
        return words
    if first == "program":
        return ""
    whose, job = first.split()
    # Beside the sessions of the run: the DSP outlives them.
    counter = START.parent / f"count-{START.name.partition('.')[0]}"
    count = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(count))
    if whose == "once":
        return words if count == int(job) else ""
    return words if (number + 1 if whose == "process" else count) >= int(job) else ""


def work(number: int, flags: dict[str, str]) -> dict[str, object]:
    os.chdir(Path(START, flags["working_folder"]))
    words = refuses(number, Path(flags["model_path"]).read_bytes())
    if words:
        sys.stderr.write(f"{words}\n")
        error = {"stage": "load", "message": "load: Loading of method forward failed", "code": 48, "line": None}
        return {"ok": False, "exit_code": 4, "error": error}
    data = Path("input_0_0.raw").read_bytes()
    Path(flags["output_folder_path"], "output_0_0.raw").write_bytes(data)
    times = int(flags["iteration"])
    inference = {
        "line": 0,
        "warm_up_ns": [1000] * int(flags.get("warm_up", "0")),
        "iterations_ns": [1000] * times,
        "differing": {"count": 0, "executions": []},
    }
    output = {"shape": [len(data) // 4], "dtype": "float32", "nbytes": len(data)}
    return {"ok": True, "exit_code": 0, "error": None, "load_ns": 1000, "outputs": [output], "inferences": [inference]}


def main() -> None:
    say({"ready": True, "pid": os.getpid(), "versions": {}})
    for number, line in enumerate(sys.stdin):
        sys.stderr.write(f"farm_runner: job {number} begins\n")
        answer = work(number, dict(word.removeprefix("--").split("=", 1) for word in shlex.split(line)))
        sys.stderr.write(f"farm_runner: job {number} ends\n")
        sys.stderr.flush()
        say({"job": number, **answer})


main()
