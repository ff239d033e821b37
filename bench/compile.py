"""Ratio of compile times: the builders of farm over the test flow of ExecuTorch.

    python bench/compile.py           40 jobs of quantized_ops for SM8650, three times: a quarter of an hour
    python bench/compile.py --quick   2 jobs, once

Three ways compile the same jobs, in turns, so that a noisy machine is noisy for all of them: ExecuTorch's tests (one
process: upstream_compile.py), farm's pool with one builder, and with two. All processes are forks of a process with
torch and ExecuTorch (tests/warm_torch.py), and farm's cache is empty each time. The last line is one JSON object with
medians of the ratios of each round:

* modules: jobs compiled.
* ratio_one_builder, ratio_two_builders: wall time of the pool over the time of ExecuTorch's tests, without imports.

The jobs are every n-th of the suite in the order of the manifest, in 8a8w, 16a8w and 16a16w, without `batch_norm`,
which takes half a minute of the same on both sides. farm does more for each: it computes the reference in FP32 as well,
hashes all files, and publishes the bundle. ExecuTorch's tests import more than farm does: `pip install
'snapdragon-farm[conformance]'`, as `./farmw test` does.

The `.pte` files of one builder are compared with the files of ExecuTorch's tests, compiled in the same order; the time
that QNN writes into each is left out. Jobs with another program are named.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import warm_torch

from farm.base import processes
from farm.base.config.settings import Config, load_config
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import MODEL
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.pool import BuilderPool, BuilderSettings
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.builds.runtime.packages import install_hint
from farm.builds.toolchains.selection import prepare
from farm.builds.toolchains.toolchain import Toolchain
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.suite import plan

SOC = "SM8650"
SUITE = "quantized_ops"
LEFT_OUT = "batch_norm"
PRECISIONS = ("8a8w", "16a8w", "16a16w")
QUICK = ("add", "relu")
# Packages of the extra `conformance`, which farm itself does not import.
UPSTREAM_IMPORTS = ("graphviz", "openpyxl", "pydot")
# Time in a context binary of QNN 2.51, after its magic number: nanoseconds since 1970.
TIME = re.compile(rb"(?<=\xcd\xab\x78\x56).{8}", re.DOTALL)


class Took(NamedTuple):
    """Seconds of one way through all jobs."""

    seconds: float
    programs: dict[str, str]
    """SHA-256 of the `.pte` file but for its time, by key."""


def require_upstream() -> None:
    """End with the install command of packages that ExecuTorch's tests import and that are missing."""
    missing = [name for name in UPSTREAM_IMPORTS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"ExecuTorch's own tests import {', '.join(missing)}: {install_hint('conformance')}")


def choose(tools: Toolchain, folder: Path, *, quick: bool) -> list[BuildRequest]:
    """Return the jobs to measure."""
    requests = []
    for job in plan([resolve_suite(SUITE, find_suites(()))], [find_soc(SOC)], "htp", (), ((),)):
        case = job.case
        # Upstream's tests have a module, one sample, and all sizes.
        fixed = case.module and case.samples == 1 and not any(spec.dynamic for spec in case.inputs)
        wanted = (QUICK if quick else (case.name,)), (PRECISIONS[:1] if quick else PRECISIONS)
        if case.name == LEFT_OUT or not fixed or case.name not in wanted[0] or job.target.precision not in wanted[1]:
            continue
        key = bundle_key(job, tools.versions)
        requests.append(BuildRequest(job, key, tools.versions, str(folder / f"{key}.log")))
    return requests if quick else requests[:: len(requests) // 40][:40]


def farm(tools: Toolchain, config: Config, requests: list[BuildRequest], width: int, scratch: Path) -> Took:
    """Compile with `width` builders."""
    replies: list[BuildReply] = []
    cache = BundleCache(scratch / "cache")
    with Supervisor() as supervisor:
        pool = BuilderPool(
            requests,
            tools.compiler,
            BuilderSettings.of(config, supervisor, scratch)._replace(cache_root=cache.root),
            width=width,
            on_done=replies.append,
        )
        started = time.perf_counter()
        pool.start()
        pool.join()
        seconds = time.perf_counter() - started
    for reply in replies:
        if not reply.ok:
            sys.exit(f"farm did not compile {reply.key}: {reply.reason}")
    return Took(seconds, {request.key: timeless(cache.folder(request.key) / MODEL) for request in requests})


def upstream(config: Config, requests: list[BuildRequest], scratch: Path) -> Took:
    """Compile with ExecuTorch's tests, in one process."""
    listed, out = scratch / "requests.json", scratch / "programs"
    out.mkdir()
    listed.write_bytes(msgspec.json.encode(requests))
    script = Path(__file__).with_name("upstream_compile.py")
    printed = warm_torch.run_script(script, str(listed), str(out), cache=config.cache_dir, folder=scratch)
    programs = {request.key: timeless(out / f"{request.key}.pte") for request in requests}
    return Took(json.loads(printed.splitlines()[-1])["seconds"], programs)


def timeless(pte: Path) -> str:
    """Return the SHA-256 of a program without its time of compiling."""
    return hashlib.sha256(TIME.sub(bytes(8), pte.read_bytes())).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 jobs, once")
    parser.add_argument("--rounds", type=int, default=3, help="times each way is taken")
    arguments = parser.parse_args()
    require_upstream()
    config = load_config()
    tools = prepare(config)
    ratios: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        warm_torch.session = warm_torch.WarmTorch(Path(folder, "torch"), config.cache_dir, os.getpid())
        vars(processes)["subprocess"] = warm_torch.session.subprocess()
        requests = choose(tools, Path(folder), quick=arguments.quick)
        print(f"{len(requests)} jobs of {SUITE} for {SOC}: {', '.join(request.job.id for request in requests)}")
        for number in range(1 if arguments.quick else arguments.rounds):
            scratch = [Path(folder, f"{number}-{width}") for width in range(3)]
            for each in scratch:
                each.mkdir()
            base = upstream(config, requests, scratch[0])
            print(f"upstream {base.seconds:7.1f} s")
            for width, values in ratios.items():
                took = farm(tools, config, requests, width, scratch[width])
                values.append(took.seconds / base.seconds)
                print(f"{width} at once {took.seconds:6.1f} s, {values[-1]:.3f} of upstream's")
                if width == 1:
                    other = [one.job.id for one in requests if base.programs[one.key] != took.programs[one.key]]
                    print(f"programs that are not upstream's: {', '.join(other) or 'none'}", flush=True)
    result = {
        "modules": len(requests),
        "ratio_one_builder": round(statistics.median(ratios[1]), 3),
        "ratio_two_builders": round(statistics.median(ratios[2]), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
