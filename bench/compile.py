"""Whether compiling a suite takes longer here than with ExecuTorch's own test flow.

    python bench/compile.py           40 jobs of quantized_ops for SM8650, three times: a quarter of an hour
    python bench/compile.py --quick   2 jobs, once

Three ways compile the same jobs, in turns, so that a noisy machine is noisy for all of them: ExecuTorch's tests (one
process: upstream_compile.py), farm's pool with one builder, and with two. Every time farm's cache is empty. The last
line is one JSON object, medians of the ratios of each round:

* modules: jobs compiled.
* ratio_one_builder, ratio_two_builders: wall time of the pool over that of ExecuTorch's tests. Every process has been
  started, has imported torch and ExecuTorch and compiled one job before the clock starts: that is what hundreds of jobs
  feel. The lines before have the same with all of that, and processor times.

The jobs are every n-th of the suite in the order of the manifest, in 8a8w, 16a8w and 16a16w, without `batch_norm`,
which takes half a minute of the same on both sides. farm does more for each: it computes the reference in FP32 as well,
hashes all files, and publishes the bundle.

ExecuTorch's tests import more than farm does: `pip install 'snapdragon-farm[conformance]'`, as `./farmw test` does.

The `.pte` files of one builder are compared with upstream's, which are compiled in the same order: QNN writes into each
the time, which is left out here, and numbers its tensors through the life of a process, so that those of two builders
have others. Those that differ are named.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from farm.bundles.bundle import MODEL
from farm.bundles.cache import BundleCache
from farm.bundles.key import bundle_key
from farm.compile.pool import BuilderPool, MemoryLimits
from farm.compile.protocol import BuildReply, BuildRequest
from farm.config.settings import Config, load_config
from farm.runtime.packages import install_hint
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.socs import find_soc
from farm.suites.suite import plan
from farm.system.processes import Supervisor
from farm.toolchains.prepare import prepare
from farm.toolchains.toolchain import Toolchain

SOC = "SM8650"
SUITE = "quantized_ops"
LEFT_OUT = "batch_norm"
PRECISIONS = ("8a8w", "16a8w", "16a16w")
# Of the extra `conformance`; nothing that farm itself imports.
UPSTREAM_IMPORTS = ("graphviz", "openpyxl", "pydot")
# In a context binary of QNN 2.51, after its magic number: nanoseconds since 1970.
TIME = re.compile(rb"(?<=\xcd\xab\x78\x56).{8}", re.DOTALL)


class Took(NamedTuple):
    """Seconds of one way through all jobs."""

    steady: float
    with_start: float
    """With the processes' start, their imports and one job each."""
    cpu: float
    """Processor time of everything, starts included."""
    programs: dict[str, str]
    """SHA-256 of the `.pte` file but for its time, by key."""


def require_upstream() -> None:
    """End with how to get what ExecuTorch's tests import and is not installed."""
    missing = [name for name in UPSTREAM_IMPORTS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"ExecuTorch's own tests import {', '.join(missing)}: {install_hint('conformance')}")


def choose(tools: Toolchain, count: int, folder: Path) -> tuple[list[BuildRequest], list[BuildRequest]]:
    """Return two jobs to warm up with and `count` to measure."""
    suite = resolve_suite(SUITE, find_suites(()))
    planned = plan([suite], [find_soc(SOC)], "htp", (), ((),))
    requests = []
    for job in planned:
        case = job.case
        # Upstream's tests have a module, one sample, and all sizes.
        fixed = case.module and case.samples == 1 and not any(spec.dynamic for spec in case.inputs)
        if case.name == LEFT_OUT or not fixed or job.target.precision not in PRECISIONS:
            continue
        key = bundle_key(job, tools.versions)
        requests.append(BuildRequest(job, key, tools.versions, str(folder / f"{key}.log")))
    measured = requests[:: len(requests) // count][:count]
    spare = [request for request in requests if request not in measured]
    return spare[:2], measured


def farm(
    tools: Toolchain, config: Config, warm_up: list[BuildRequest], measured: list[BuildRequest], scratch: Path
) -> Took:
    """Compile with a builder for each of `warm_up`."""
    width = len(warm_up)
    # Who has warmed up waits for the other: the clock starts when all can go.
    ready = threading.Barrier(width)
    warm = {request.key for request in warm_up}
    begun: list[float] = []
    ended: list[float] = []
    replies: list[BuildReply] = []

    def on_done(reply: BuildReply) -> None:
        replies.append(reply)
        if reply.key in warm:
            ready.wait()
            begun.append(time.perf_counter())
        else:
            ended.append(time.perf_counter())

    cache = BundleCache(scratch / "cache")
    cpu, started = cpu_seconds(), time.perf_counter()
    with Supervisor() as supervisor:
        pool = BuilderPool(
            (*warm_up, *measured),
            width=width,
            limits=MemoryLimits(config.build_memory_mb, config.build_recycle_mb),
            cache_root=cache.root,
            compiler=tools.compiler,
            supervisor=supervisor,
            log_folder=scratch,
            timeout_s=config.build_timeout_s,
            on_start=lambda _key: None,
            on_done=on_done,
        )
        pool.start()
        pool.join()
    for reply in replies:
        if not reply.ok:
            sys.exit(f"farm did not compile {reply.key}: {reply.reason}")
    programs = {request.key: timeless(cache.folder(request.key) / MODEL) for request in measured}
    return Took(max(ended) - min(begun), time.perf_counter() - started, cpu_seconds() - cpu, programs)


def upstream(tools: Toolchain, warm_up: list[BuildRequest], measured: list[BuildRequest], scratch: Path) -> Took:
    """Compile with ExecuTorch's tests, in one process."""
    requests, out = scratch / "requests.json", scratch / "programs"
    out.mkdir()
    requests.write_bytes(msgspec.json.encode((*warm_up, *measured)))
    argv = [sys.executable, str(Path(__file__).with_name("upstream_compile.py"))]
    cpu, started = cpu_seconds(), time.perf_counter()
    with (scratch / "log").open("wb") as log:
        done = subprocess.run(
            [*argv, str(requests), str(out), str(len(warm_up))],
            env={**os.environ, **tools.compiler.env},
            stdout=subprocess.PIPE,
            stderr=log,
            check=False,
        )
    with_start, cpu = time.perf_counter() - started, cpu_seconds() - cpu
    if done.returncode != 0:
        sys.exit(f"ExecuTorch's tests ended with {done.returncode}: {(scratch / 'log').read_text()[-3000:]}")
    programs = {request.key: timeless(out / f"{request.key}.pte") for request in measured}
    return Took(json.loads(done.stdout.splitlines()[-1])["seconds"], with_start, cpu, programs)


def timeless(pte: Path) -> str:
    """Return the SHA-256 of a program but for when it was compiled."""
    return hashlib.sha256(TIME.sub(bytes(8), pte.read_bytes())).hexdigest()


def cpu_seconds() -> float:
    """Return the processor time of this process and of those that it waited for."""
    return sum(os.times()[:4])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 jobs, once")
    parser.add_argument("--rounds", type=int, default=3, help="times each way is taken")
    arguments = parser.parse_args()
    require_upstream()
    count, rounds = (2, 1) if arguments.quick else (40, arguments.rounds)
    config = load_config()
    tools = prepare(config, note=print)
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        warm_up, measured = choose(tools, count, Path(folder))
        print(f"{len(measured)} jobs of {SUITE} for {SOC}: {', '.join(request.job.id for request in measured)}")
        for number in range(rounds):
            taken: dict[str, Took] = {}
            for way in ("upstream", "one", "two"):
                scratch = Path(folder, f"{number}-{way}")
                scratch.mkdir()
                if way == "upstream":
                    took = upstream(tools, warm_up[:1], measured, scratch)
                else:
                    took = farm(tools, config, warm_up[: 1 if way == "one" else 2], measured, scratch)
                taken[way] = took
                print(f"{way:9} {took.steady:7.1f} s, with start {took.with_start:7.1f} s, cpu {took.cpu:7.1f} s")
            base = taken.pop("upstream")
            same = {key for key, digest in taken["one"].programs.items() if base.programs[key] == digest}
            other = [request.job.id for request in measured if request.key not in same]
            print(f"programs that are not upstream's: {', '.join(other) or 'none'}")
            for way, took in taken.items():
                ratios.setdefault(way, []).append(took.steady / base.steady)
                ratios.setdefault(f"{way}, with start", []).append(took.with_start / base.with_start)
                ratios.setdefault(f"{way}, cpu", []).append(took.cpu / base.cpu)
    for name, values in ratios.items():
        print(f"ratio of {name}: {' '.join(f'{value:.3f}' for value in values)}")
    result = {
        "modules": len(measured),
        "ratio_one_builder": round(statistics.median(ratios["one"]), 3),
        "ratio_two_builders": round(statistics.median(ratios["two"]), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
