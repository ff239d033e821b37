"""Run every command that answers in JSON over one store, in this one process: `python commands.py FOLDER [serve]`.

Prints one JSON object: what each command wrote to standard output, and its exit code. The clock stands still, so that
ages are the same at all times. Of farm only the entry point of the command line is used.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

NOW_MS = 1_795_381_200_000
"""2026-11-22 21:00 UTC: shortly after the newest run of the store began."""

JOBS = ("quantized_ops/conv2d", "quantized_ops/linear", "quantized_ops/softmax", "quantized_ops/layer_norm", "smoke")
RUNS = {
    "latest": "latest",
    "last night": "20261120-2100",
    "night with a flaky job": "20261119-2100",
    "night with stale jobs": "20261116-2100",
    "night with a failed build": "20261113-2100",
    "night that ended with 4": "20261110-2100",
    "both kinds of device": "20261122-0300",
    "virtual": "20261122-0800",
    "pytest": "20261122-1300",
    "debug": "20261122-1400",
    "real: detailed profile": "20261122-195600",
    "real: debug": "20261122-195606",
    "real: exec": "20261122-195717",
    "killed": "20261116-2000",
}
QUERIES = {
    "runs": "SELECT id, command, priority, started_ms, finished_ms, exit_code FROM run ORDER BY id",
    "verdicts": (
        "SELECT run_id, job.name, verdict, stage, cause, reason, known_issue FROM attempt"
        " JOIN run_job ON run_job.id = run_job_id JOIN job ON job.id = job_id ORDER BY attempt.id"
    ),
    "samples": "SELECT attempt_id, position, n, p50, mad, samples FROM measurement ORDER BY 1, 2 LIMIT 40",
    "nothing": "SELECT id FROM run WHERE id = 'x'",
}
PLACES = {
    "status": "/",
    "status of a run": "/?run=20261120-2100",
    "runs": "/runs?limit=100",
    "runs of a filter": "/runs?user=nightly&soc=SM8650&state=failed",
    "report": "/runs/20261120-2100",
    "report of the newest": "/runs/latest",
    "files": "/runs/20261122-195600/files",
    "diff": "/diff?a=20261119-2100&b=20261120-2100",
    "diff of a filter": "/diff?a=20261119-2100&b=20261120-2100&q=softmax",
    "devices": "/devices",
    "devices of a filter": "/devices?health=quarantined",
    "device": "/devices/R5CX1",
    "history": "/history?job=quantized_ops/conv2d",
    "history of a metric": "/history?job=*&metric=pte_size&soc=SM8650&limit=3",
    "progress": "/api/progress",
    "no run": "/runs/20200101",
}


def asked() -> dict[str, list[str]]:
    """Return the commands by a name for each."""
    found = {
        "status": ["status"],
        "triage": ["triage"],
        "triage of an alert": ["triage", "1"],
        "triage of a job": ["triage", "quantized_ops/gelu"],
        "devices": ["devices"],
        "coverage": ["coverage", "--soc", "SM8650"],
        "coverage of a suite": ["coverage", "--soc", "SM8650", "--suite", "smoke"],
        "coverage of a run": ["coverage", "--soc", "SM8650", "--run", "20261120-2100"],
        "baseline": ["baseline", "show", "*"],
        "baseline of a metric": ["baseline", "show", "quantized_ops/conv2d", "--metric", "latency"],
        "diff": ["diff", "latest~1"],
        "diff of nights": ["diff", "20261119-2100", "20261120-2100"],
        "diff of distant nights": ["diff", "20261107-2100", "20261120-2100"],
        "diff of virtual runs": ["diff", "20261122-0730", "20261122-0800"],
        "profile": ["profile", "smoke"],
        "profile on hardware": ["profile", "quantized_ops/conv2d"],
        "profile of two runs": ["profile", "*", "--diff", "20261116-2100", "20261120-2100"],
        "history of one metric": ["history", "*", "--metric", "pte_size", "--limit", "3"],
        "history of one target": ["history", "quantized_ops/*", "--soc", "SM8750", "--limit", "4"],
        "history of pytest": ["history", "pytest/*"],
        "prune": ["prune", "--keep", "5d"],
        "prune of results": ["prune", "--keep-runs", "8", "--keep-results", "2", "--orphans"],
        "suite": ["suites", "smoke"],
        "socs": ["socs"],
        "cache": ["cache", "show"],
        "faults": ["virtual", "faults"],
        "night": ["nightly", "night.toml", "--check"],
    }
    found |= {f"history of {job}": ["history", job] for job in JOBS}
    found |= {f"status of {name}": ["status", run] for name, run in RUNS.items()}
    found |= {f"report of {name}": ["report", run] for name, run in RUNS.items()}
    found |= {f"sql: {name}": ["sql", query] for name, query in QUERIES.items()}
    devices = ("R5CX1", "pixel-left", "R5CX2", "bench-8750", "sim")
    found |= {f"device {device}": ["device", "show", device] for device in devices}
    found = {name: [*arguments, "--json"] for name, arguments in found.items()}
    found |= {f"sql as csv: {name}": ["sql", "--csv", query] for name, query in QUERIES.items()}
    for kind in ("ctrf", "junit", "hud", "trace", "jsonl"):
        for name in ("last night", "both kinds of device", "night with a failed build", "real: debug", "pytest"):
            found[f"export of {name} as {kind}"] = ["export", "--format", kind, RUNS[name]]
    found["export since a day"] = ["export", "--since", "2026-11-22"]
    found["export of all"] = ["export", "--all", "--unfinished"]
    return found


def changed(lines: Path) -> dict[str, list[str]]:
    """Return commands that write, and then what others say, in their order; `lines` are all runs."""
    note = ["--note", "seen"]
    return {
        "baseline accept": ["baseline", "accept", "quantized_ops/conv2d", *note, "--json"],
        "baseline accept of a metric": [
            "baseline",
            "accept",
            "quantized_ops/add",
            "--metric",
            "latency",
            *note,
            "--json",
        ],
        "triage of an alert, written": ["triage", "6", "--owner", "grace", *note, "--until", "2099-01-01", "--json"],
        "triage of a job, written": ["triage", "quantized_ops/gelu", "--owner", "ada", "--json"],
        "status then": ["status", "--json"],
        "triage then": ["triage", "--json"],
        "baseline then": ["baseline", "show", "quantized_ops/*", "--json"],
        "history then": ["history", "quantized_ops/conv2d", "--metric", "latency", "--json"],
        "prune, written": ["prune", "--keep", "5d", "--yes", "--json"],
        "runs left": ["sql", QUERIES["runs"], "--json"],
        "history left": ["history", "quantized_ops/linear", "--json"],
        "import of runs that are there": ["import", str(lines), "--json"],
        "import again": ["import", str(lines), "--json"],
        "status after the import": ["status", "--json"],
    }


def imported(lines: Path) -> dict[str, list[str]]:
    """Return commands for a store that is empty before."""
    return {
        "import": ["import", str(lines), "--json"],
        "imported: history": ["history", "quantized_ops/*", "--limit", "3", "--json"],
        "imported: report": ["report", "20261120-2100", "--json"],
        "imported: status": ["status", "20261120-2100", "--json"],
    }


NIGHT = """\
[nightly]
name = "night"
budget = "1h"

[[run]]
name = "few"
socs = ["SM8650"]
suites = ["smoke"]
"""


def call(arguments: list[str]) -> dict[str, Any]:
    """Return what a command writes and its exit code; `notes` are words on standard error, which may change."""
    from farm.cli.main import main

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    sys.argv = ["farm", *arguments]
    code: Any = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    wrote, notes = (file.buffer.getvalue().decode() for file in (out, err))  # type: ignore[attr-defined]
    return {"command": " ".join(arguments), "code": code, "wrote": wrote, "notes": notes}


def kept(answers: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return answers without what depends on this machine, folders and sizes, or on words: the size of a page."""
    for answer in answers.values():
        for name in ("command", "wrote"):
            answer[name] = answer[name].replace(str(folder), "FOLDER").replace(os.uname().nodename, "HOST")
        answer["wrote"] = re.sub(r'"[^"]*/test_suites/', '"FARM/test_suites/', answer["wrote"])
        answer["wrote"] = re.sub(r'("(?:database|folder)_bytes": )\d+', r"\g<1>0", answer["wrote"])
    return answers


def main() -> None:
    """Answer all of it, or serve until somebody ends it."""
    folder = Path(sys.argv[1])
    os.environ |= {"FARM_STATE_DIR": str(folder / "state"), "FARM_CACHE_DIR": str(folder / "cache"), "TZ": "UTC"}
    # Of whoever writes into the store.
    os.environ |= {"LOGNAME": "ada", "COLUMNS": "80"}
    time.tzset()
    time.time = lambda: NOW_MS / 1000
    time.time_ns = lambda: NOW_MS * 1_000_000
    os.chdir(folder)
    if sys.argv[2:] == ["serve"]:
        from farm.cli.main import main as farm

        sys.argv = ["farm", "serve", "--port", "0", "--json"]
        farm()
    (folder / "night.toml").write_text(NIGHT)
    lines = folder / "all.jsonl"
    answers = {name: call(arguments) for name, arguments in asked().items()}
    lines.write_text(answers["export of all"]["wrote"])
    answers |= {name: call(arguments) for name, arguments in changed(lines).items()}
    os.environ["FARM_STATE_DIR"] = str(folder / "another")
    answers |= {name: call(arguments) for name, arguments in imported(lines).items()}
    sys.stdout.write(json.dumps(kept(answers, folder)))


if __name__ == "__main__":
    main()
