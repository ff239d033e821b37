"""Which programs of a suite are the same with two toolchains: `python bench/same_programs.py [--quick] [A B]`.

Compiles jobs of quantized_ops for SM8650 with both, one builder each, into a cache of their own, and prints which
programs are the same. A and B are what `--toolchain` takes, releases 1.5.0 and 1.5.1 unless they are given. The last
line is one JSON object:

* same_programs: the share of the jobs compiled with both whose programs are the same.
* compared: jobs that were compiled with both.
* changed, newly_failing: names of jobs.

`--quick` takes a handful. All of them are 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.bundles.bundle import Bundle
from farm.bundles.cache import BundleCache
from farm.bundles.key import bundle_key
from farm.bundles.same import ProgramComparison, compare_programs
from farm.compile.pool import BuilderPool, MemoryLimits
from farm.compile.protocol import BuildReply, BuildRequest
from farm.config.settings import Config, load_config
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.socs import find_soc
from farm.suites.suite import plan
from farm.system.processes import Supervisor
from farm.toolchains.prepare import prepare
from farm.toolchains.select import use_toolchain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.suites.suite import Job

SOC, SUITE = "SM8650", "quantized_ops"
RELEASES = ("1.5.0", "1.5.1")
# One of a kind: a matrix, a window, a norm, something element by element, something that moves, a table.
QUICK = ("conv2d", "linear", "max_pool2d", "layer_norm", "add", "permute", "gelu", "index_select")


def figures_same_programs(*, quick: bool = False, toolchains: Sequence[str] = RELEASES) -> dict[str, float]:
    """Return `same_programs`, the share of jobs whose programs are the same with both of `toolchains`."""
    return {"same_programs": share(comparison(toolchains, chosen_jobs(quick=quick)))}


def share(found: ProgramComparison) -> float:
    """Return the share of the programs that both sides have which are the same."""
    return round(len(found.same) / max(1, len(found.same) + len(found.changed)), 3)


def chosen_jobs(*, quick: bool) -> list[Job]:
    """Return the jobs to compile."""
    planned = plan([resolve_suite(SUITE, find_suites(()))], [find_soc(SOC)], "htp", (), ((),))
    return [
        job for job in planned if not quick or (job.case.name in QUICK and job.target.precision in ("8a8w", "16a8w"))
    ]


def comparison(toolchains: Sequence[str], jobs: Sequence[Job]) -> ProgramComparison:
    """Compile `jobs` with both of `toolchains` and return which programs are the same."""
    config = load_config()
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        sides = [compiled(config, toolchain, jobs, Path(folder)) for toolchain in toolchains]
        return compare_programs(*sides)


def compiled(config: Config, toolchain: str, jobs: Sequence[Job], folder: Path) -> dict[str, Bundle | None]:
    """Return the bundles of `jobs` with one toolchain, compiled below `folder`; None for those that fail."""
    config = use_toolchain(config, toolchain, print)
    tools = prepare(config, print)
    cache, replies = BundleCache(folder / "cache"), list[BuildReply]()
    keys = {job.id: bundle_key(job, tools.versions) for job in jobs}
    requests = [BuildRequest(job, keys[job.id], dict(tools.versions), str(folder / "log")) for job in jobs]
    with Supervisor() as supervisor:
        pool = BuilderPool(
            requests,
            width=1,
            limits=MemoryLimits(config.build_memory_mb, config.build_recycle_mb),
            cache_root=cache.root,
            compiler=tools.compiler,
            supervisor=supervisor,
            log_folder=folder,
            timeout_s=config.build_timeout_s,
            on_start=lambda _key: None,
            on_done=replies.append,
        )
        pool.start()
        pool.join()
    for reply in replies:
        if not reply.ok:
            print(f"{toolchain}: {next(id_ for id_, key in keys.items() if key == reply.key)}: {reply.reason}")
    return {job.id: cache.lookup(keys[job.id]) for job in jobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a handful of jobs")
    parser.add_argument("toolchains", nargs="*", default=RELEASES, help="two, as --toolchain takes them")
    arguments = parser.parse_args()
    if len(arguments.toolchains) != len(RELEASES):
        sys.exit("give two toolchains, A and B")
    found = comparison(arguments.toolchains, chosen_jobs(quick=arguments.quick))
    print(found)
    for job in found.changed:
        print(f"  changed: {job}")
    last: dict[str, Any] = {
        "same_programs": share(found),
        "compared": len(found.same) + len(found.changed),
        "changed": found.changed,
        "newly_failing": found.newly_failing,
    }
    print(json.dumps(last))


if __name__ == "__main__":
    main()
