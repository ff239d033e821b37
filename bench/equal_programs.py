"""Equal programs with and without shortcuts (farm/builds/compile/flows/shortcuts), job by job.

    python bench/equal_programs.py                          all jobs of five suites: some hours of processor time
    python bench/equal_programs.py quantized_ops fp_ops     all jobs of two suites
    python bench/equal_programs.py --sample 20 --seed 7     20 jobs, drawn by seed
    python bench/equal_programs.py --kept FOLDER            results stay in FOLDER, and an interrupted program goes on
    python bench/equal_programs.py --shares --sample 12     what each shortcut saves, in turns in one process
    python bench/equal_programs.py --quick                  1 job

Two processes compile the same jobs in the same order: one with all shortcuts, one without. Programs are compared by
their canonical hashes, inputs, references and output specs bit by bit, failures by their reasons. The last line is one
JSON object:

* jobs: jobs compared, `failing` among them failed on both sides for the same reason.
* equal_programs, equal_references: jobs with equal hashes.
* different: names of all others.
* processor_ratio: processor time with shortcuts over processor time without, of jobs that compiled.
* peak_mb: greatest resident memory of the process with shortcuts.
* shares: with --shares, the processor time that each shortcut saves over the time without this shortcut alone, of jobs
  whose export is kept from an earlier precision; else null.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgspec

from farm.base.config.settings import load_config
from farm.base.machine import peak_bytes
from farm.base.socs import find_soc
from farm.builds.bundles.key import bundle_key
from farm.builds.bundles.same import data_hash
from farm.builds.compile.processes import ONE_THREAD, SAME_EACH_TIME
from farm.builds.compile.protocol import BuildRequest, collect_rarely, failure_of
from farm.builds.compile.torch_graphs import TorchGraphs
from farm.builds.toolchains.interpreters import process_environment
from farm.builds.toolchains.selection import prepare
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.suite import plan

SUITES = ("quantized_ops", "fp_ops", "lpai_ops", "models_small", "llm_tiny")
LPAI = "lpai"
SOCS = {"htp": "SM8650", LPAI: "SM8850"}
QUICK = ("quantized_ops/linear[SM8650-htp-16a8w]",)
SIDES = ("plain", "short")
SHARES = "shares"


class Result(msgspec.Struct):
    """Compiled job of one side."""

    job: str
    program: str = ""
    data: str = ""
    reason: str = ""
    cpu_s: float = 0.0
    peak_bytes: int = 0


def choose(suites: list[str]) -> list[BuildRequest]:
    """Return all jobs of `suites`, for HTP or LPAI."""
    tools, found = prepare(load_config()), find_suites(())
    requests: list[BuildRequest] = []
    for name in suites:
        suite = resolve_suite(name, found)
        backend = LPAI if LPAI in suite.backends else "htp"
        requests += [
            BuildRequest(job, bundle_key(job, tools.versions), dict(tools.versions), os.devnull)
            for job in plan([suite], [find_soc(SOCS[backend])], backend, (), ((),))
        ]
    return requests


class Side(NamedTuple):
    """Process that compiles all jobs, with or without shortcuts."""

    name: str
    folder: Path

    def run(self, requests: list[BuildRequest]) -> dict[str, Result]:
        """Return the results by job; a job that ends the process has its end as the reason."""
        tools = prepare(load_config())
        env = {**process_environment(tools.compiler.env), **SAME_EACH_TIME, **ONE_THREAD}
        asked, out = self.folder / f"{self.name}.json", self.folder / f"{self.name}.jsonl"
        while left := [one for one in requests if one.job.id not in (done := read(out))]:
            asked.write_bytes(msgspec.json.encode(left))
            with (self.folder / f"{self.name}.log").open("ab") as log:
                words = [tools.compiler.python, __file__, "--side", self.name, str(asked), str(out)]
                code = subprocess.run(words, env=env, stdout=log, stderr=log, check=False).returncode
            now = read(out)
            if code and (unfinished := [one.job.id for one in left if one.job.id not in now]):
                write(out, Result(unfinished[0], reason=f"the process ended with {code}"))
            elif not code and len(now) == len(done):
                sys.exit(f"no results: {self.folder}/{self.name}.log")
        return read(out)


def read(path: Path) -> dict[str, Result]:
    """Return the results in a file."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return {one.job: one for one in (msgspec.json.decode(line, type=Result) for line in lines)}


def write(path: Path, result: Result) -> None:
    """Append a result to a file."""
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def compile_side(name: str, asked: Path, out: Path) -> None:
    """Compile the requested jobs in this process: once, or for shares once without each shortcut."""
    collect_rarely()
    import torch

    from farm.builds.compile.flows.shortcuts import every

    torch.set_num_threads(1)
    graphs = TorchGraphs()
    requests = msgspec.json.decode(asked.read_bytes(), type=list[BuildRequest])
    whole = every.SHORTCUTS
    ways = {"": () if name == "plain" else whole}
    if name == SHARES:
        without = {f" {out.__name__}": tuple(one for one in whole if one is not out) for out in whole}
        # The first way makes the export that the others share, and is not counted.
        ways = {" first": whole, **ways, **without}
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for number, request in enumerate(requests):
            for place, (suffix, shortcuts) in enumerate(ways.items()):
                with patch.object(every, "SHORTCUTS", shortcuts):
                    result = compile_one(request, Path(work, f"{number}-{place}"))
                graphs.release()
                result.job += suffix
                write(out, result)
        os.chdir("/")


def compile_one(request: BuildRequest, folder: Path) -> Result:
    """Compile a job into the new `folder`."""
    from farm.builds.compile.builder import compile_request

    folder.mkdir()
    result, started = Result(request.job.id), time.process_time()

    def act() -> None:
        manifest = compile_request(request, folder)
        result.program, result.data = manifest.program, data_hash(manifest)

    result.reason, _ = failure_of(act)
    result.cpu_s, result.peak_bytes = round(time.process_time() - started, 3), peak_bytes()
    return result


def shares(found: dict[str, Result], jobs: list[str]) -> dict[str, float]:
    """Return the part of the time that each shortcut saves, by name."""
    sums: dict[str, float] = {}
    for name, result in found.items():
        job, _, way = name.partition(" ")
        if job in jobs and result.program:
            sums[way] = sums.get(way, 0.0) + result.cpu_s
    return {way: round(1 - sums[""] / total, 3) for way, total in sums.items() if way not in ("", "first")}


def compare(plain: dict[str, Result], short: dict[str, Result], jobs: list[str]) -> dict[str, object]:
    """Return the last line of this program."""
    pairs = [(plain[job], short[job]) for job in jobs]
    failing = [job.job for job, other in pairs if job.reason and job.reason == other.reason]
    programs = {job.job for job, other in pairs if job.program and job.program == other.program}
    references = {job.job for job, other in pairs if job.data and job.data == other.data}
    both = [(job, other) for job, other in pairs if job.program and other.program]
    seconds = [sum(one[side].cpu_s for one in both) for side in (0, 1)]
    return {
        "jobs": len(pairs),
        "failing": len(failing),
        "equal_programs": len(programs),
        "equal_references": len(references),
        "different": [job for job in jobs if job not in programs & references and job not in failing],
        "processor_ratio": round(seconds[1] / seconds[0], 3) if both else None,
        "peak_mb": max((other.peak_bytes for _, other in pairs), default=0) // 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", default=list(SUITES))
    parser.add_argument("--sample", type=int, default=0, help="number of jobs to draw")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--kept", type=Path, help="folder for results")
    parser.add_argument("--shares", action="store_true", help="measure each shortcut")
    parser.add_argument("--quick", action="store_true", help="1 job")
    parser.add_argument("--side", choices=(*SIDES, SHARES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        compile_side(arguments.side, *map(Path, arguments.suites))
        return
    requests = choose(["quantized_ops"] if arguments.quick else arguments.suites)
    if arguments.quick:
        requests = [one for one in requests if one.job.id in QUICK]
    if arguments.sample:
        requests = random.Random(arguments.seed).sample(requests, min(arguments.sample, len(requests)))
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as temporary:
        folder = arguments.kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        plain, short = (Side(name, folder.absolute()).run(requests) for name in SIDES)
        jobs = [one.job.id for one in requests]
        saved = shares(Side(SHARES, folder.absolute()).run(requests), jobs) if arguments.shares else None
    found = {**compare(plain, short, jobs), "shares": saved}
    print(f"{found['equal_programs']} of {found['jobs']} programs are equal, {found['failing']} do not compile")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
