"""Run every command with an answer for programs over one store, in this one process: `python commands.py FOLDER`.

Prints one JSON list: the group, command, exit code, standard output and standard error of each. The clock stands still,
so that ages are the same at all times. Only the entry point of the command line is called.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOW_MS = 1_795_381_200_000
"""2026-11-22 21:00 UTC: shortly after the newest run of the store began."""

NIGHTLY_RUN = "20261120-2100"
"""Run with every outcome: passed, failed, infra, skipped, known issue, failed build, crash, flaky, attempts of two."""

RUNS = {
    "without an end": "20261122-205800",
    "killed": "20261116-2000",
    "skipped jobs": "20261122-0100",
    "both kinds of device": "20261122-0300",
    "farm pytest": "20261122-1300",
    "farm debug": "20261122-1400",
    "detailed profile": "20261122-195600",
    "farm exec": "20261122-195717",
}
"""Runs of other shapes than the nightly run."""

ASKED = [
    ["status"],
    ["status", RUNS["killed"]],
    ["status", "20261122-0800"],
    *(["report", run] for run in (NIGHTLY_RUN, *RUNS.values())),
    ["alerts", "list"],
    ["alerts", "assign", "1"],
    ["alerts", "assign", "quantized_ops/gelu"],
    ["devices"],
    *(["devices", "show", device] for device in ("R5CX1", "R5CX2", "bench-8750", "sim")),
    ["jobs", "coverage", "--soc", "SM8650"],
    ["jobs", "coverage", "--soc", "SM8650", "--suite", "smoke"],
    ["jobs", "coverage", "--soc", "SM8650", "--run", NIGHTLY_RUN],
    ["perf", "baseline", "*"],
    ["perf", "baseline", "quantized_ops/conv2d", "--metric", "latency"],
    ["diff", "latest~1"],
    ["diff", "20261116-2100", NIGHTLY_RUN],
    ["diff", "20261119-2100", NIGHTLY_RUN],
    ["diff", "20261122-0700", "20261122-0800"],
    ["jobs", "profile", "smoke"],
    ["jobs", "profile", "quantized_ops/conv2d"],
    ["jobs", "profile", "*", "--diff", "20261116-2100", NIGHTLY_RUN],
    ["history", "quantized_ops/conv2d", "--limit", "2"],
    ["history", "*/c*", "--metric", "pte_size", "--soc", "SM8650", "--limit", "1"],
    ["history", "quantized_ops/*", "--soc", "SM8750", "--limit", "4"],
    ["history", "smoke", "--limit", "1"],
    ["history", "pytest/*"],
    ["runs", "prune", "--keep-runs", "8", "--keep-results", "2", "--orphans"],
    ["suites", "smoke"],
    ["devices", "socs"],
    ["setup", "cache", "show"],
    ["virtual", "faults"],
    ["nightly", "night.toml", "--check"],
]
EXPORTED = {
    "junit": (NIGHTLY_RUN, RUNS["farm debug"], RUNS["farm exec"]),
    "hud": (NIGHTLY_RUN, RUNS["both kinds of device"], RUNS["farm pytest"]),
    "trace": (NIGHTLY_RUN, RUNS["detailed profile"]),
    "jsonl": (NIGHTLY_RUN, RUNS["farm debug"]),
}
ALL = ["data", "export", "--all", "--unfinished"]
_NOTE = ["--note", "seen"]
WRITTEN = [
    ["alerts", "accept", "quantized_ops/conv2d", *_NOTE],
    ["alerts", "accept", "quantized_ops/add", "--metric", "latency", *_NOTE],
    ["alerts", "assign", "6", "--owner", "grace", *_NOTE, "--until", "2099-01-01"],
    ["alerts", "assign", "quantized_ops/gelu", "--owner", "ada"],
    ["status"],
    ["alerts", "list"],
    ["perf", "baseline", "quantized_ops/conv2d", "--metric", "latency"],
    ["history", "quantized_ops/conv2d", "--limit", "2"],
    ["runs", "prune", "--keep", "5d", "--yes"],
    ["history", "quantized_ops/layer_norm", "--limit", "1"],
    ["data", "import", "all.jsonl"],
    ["data", "import", "all.jsonl"],
    ["status"],
]
"""Commands that write, and then commands that show the changes."""

IMPORTED = [
    ["data", "import", "all.jsonl"],
    ["history", "quantized_ops/conv2d", "--limit", "2"],
    ["report", NIGHTLY_RUN],
    ["status"],
]
"""Commands for a store that is empty before."""

PAGES = [
    "/",
    f"/?run={NIGHTLY_RUN}",
    "/runs?limit=9",
    "/runs?user=nightly&soc=SM8650&state=failed",
    f"/runs/{NIGHTLY_RUN}",
    "/runs/latest",
    f"/diff?a=20261116-2100&b={NIGHTLY_RUN}",
    f"/diff?a=20261116-2100&b={NIGHTLY_RUN}&q=softmax",
    "/devices",
    "/devices?health=quarantined",
    "/devices/R5CX2",
    "/history?job=quantized_ops/conv2d&limit=2",
    "/history?job=*/c*&metric=pte_size&soc=SM8650&limit=1",
    "/api/v1/progress",
    "/runs/20200101",
]
NIGHTLY = """\
[nightly]
name = "night"
budget = "1h"

[[run]]
name = "few"
socs = ["SM8650"]
suites = ["smoke"]
"""


def call(group: str, arguments: list[str]) -> dict[str, Any]:
    """Return the answer of one command; standard error has words, which may change."""
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
    return {"group": group, "asked": f"farm {' '.join(arguments)}", "code": code, "wrote": wrote, "notes": notes}


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """Run `farm serve` in a fork of this process, whose modules are loaded already, and yield its address."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        from farm.cli.main import main

        os.dup2(writer, 1)
        sys.argv = ["farm", "serve", "--port", "0", "--json"]
        try:
            main()
        except Exception:  # noqa: BLE001 -- the fork must not go on with the work of this process
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as said:
        try:
            yield json.loads(said.readline())["url"].rstrip("/")
        finally:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)


def get(url: str, path: str) -> dict[str, Any]:
    """Return the answer of the server; an error has words, which may change."""
    request = urllib.request.Request(f"{url}{path}", headers={"Accept": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            code, body = answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        code, body = error.code, ""
    return {"group": "serve", "asked": f"GET {path}", "code": code, "wrote": body, "notes": ""}


def without_this_machine(answer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return an answer without folders, host name and sizes on disk, which depend on this machine."""
    wrote = answer["wrote"].replace(str(folder), "FOLDER").replace(os.uname().nodename, "HOST")
    wrote = re.sub(r'"[^"]*/test_suites/', '"FARM/test_suites/', wrote)
    return answer | {"wrote": re.sub(r'("(?:database|folder)_bytes": )\d+', r"\g<1>0", wrote)}


def main() -> None:
    """Print all answers."""
    folder = Path(sys.argv[1])
    os.environ |= {"FARM_STATE_DIR": str(folder / "state"), "FARM_CACHE_DIR": str(folder / "cache"), "TZ": "UTC"}
    # The store records the user of every remark.
    os.environ |= {"LOGNAME": "ada", "COLUMNS": "80"}
    time.tzset()
    time.time = lambda: NOW_MS / 1000
    time.time_ns = lambda: NOW_MS * 1_000_000
    os.chdir(folder)
    (folder / "night.toml").write_text(NIGHTLY)
    answers = [call(arguments[0], [*arguments, "--json"]) for arguments in ASKED]
    for kind, runs in EXPORTED.items():
        answers += [call(f"export {kind}", ["data", "export", "--format", kind, run]) for run in runs]
    with serving() as url:
        answers += [get(url, path) for path in PAGES]
    answers += [call("export all", ["data", "export", "--since", "2026-11-22"]), everything := call("export all", ALL)]
    (folder / "all.jsonl").write_text(everything["wrote"])
    answers += [call("written", [*arguments, "--json"]) for arguments in WRITTEN]
    os.environ["FARM_STATE_DIR"] = str(folder / "another")
    answers += [call("imported", [*arguments, "--json"]) for arguments in IMPORTED]
    sys.stdout.write(json.dumps([without_this_machine(answer, folder) for answer in answers]))


if __name__ == "__main__":
    main()
