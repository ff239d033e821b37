"""Costs of an edit of a toolchain: recognized, limited to the jobs that it concerns, and never missed.

    python bench/toolchains.py             quantized_ops for SM8650 on 2 virtual devices, half an hour and more
    python bench/toolchains.py --quick     two jobs, one round of random edits
    python bench/toolchains.py --minutes N minutes of random edits, 20 by default

A copy of the installed ExecuTorch is the toolchain, and is edited in place. The last line is one JSON object:

* identity_warm_s: time to recognize farm's own toolchain by its content, median of five.
* one_function_edit_recompiled_share: share of the bundles that are compiled again after an edit in one operator's
  builder.
* one_function_edit_speedup: `farm run` of everything with an empty cache, over `farm run --changed-since` that run
  after such an edit; from Enter to prompt, verdicts included.
* edits, stale: number of random edits of functions, and of bundles that an edit kept although a compile with the edit
  gives another program, other inputs or other references. A dozen edits are made at a time, in functions that half of
  the jobs did not run: two thirds of these functions take part in other jobs.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from empty_cache import empty_environment

from farm.base.config.settings import Config, load_config
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import Body, find_bundles_for, parts_of, read_trace
from farm.builds.bundles.same import differences, program_of
from farm.builds.compile.pool import BuilderPool, BuilderSettings, MemoryLimits
from farm.builds.compile.protocol import BuildRequest
from farm.builds.toolchains.selection import prepare, use_toolchain
from farm.builds.toolchains.toolchain import Toolchain
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.suite import Job, plan

_SWAPPED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
            ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn,
            ast.Is: ast.IsNot}  # fmt: skip

# Number of places in a function that are tried for an edit.
_TRIES = 40


def outermost_functions(tree: ast.AST) -> list[ast.FunctionDef]:
    """Return the functions of a module and of its classes, in their order."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            found.append(node)
        elif not isinstance(node, ast.AsyncFunctionDef):
            found += outermost_functions(node)
    return found


def mutated(source: str, number: int, draw: random.Random) -> str | None:
    """Return `source` with an edit in the body of its outermost function `number`; None if no edit is possible.

    All other characters of the file stay.
    """
    function = outermost_functions(ast.parse(source))[number]
    count = sum(1 for _ in ast.walk(function))
    numbers = draw.sample(range(count), min(count, _TRIES))
    body = next((edit for place in numbers if (edit := _edit_at(function, place)) is not None), None)
    if not body:
        return None
    first, last = function.body[0], function.body[-1]
    lines = source.splitlines(keepends=True)
    if first.lineno <= function.lineno or last.end_lineno is None:
        return None
    text = ast.unparse(ast.Module(body=body, type_ignores=[]))
    indent = " " * first.col_offset
    # Strings of several lines must not be moved.
    if any(
        isinstance(one, ast.Constant) and isinstance(one.value, str) and "\n" in one.value for one in ast.walk(function)
    ):
        return None
    new = "".join(f"{indent}{line}\n" for line in text.splitlines())
    return "".join([*lines[: first.lineno - 1], new, *lines[last.end_lineno :]])


def _edit_at(function: ast.FunctionDef, number: int) -> list[ast.stmt] | None:
    changed = copy.deepcopy(function)
    header = {id(one) for part in (changed.args, *changed.decorator_list) for one in ast.walk(part)}
    node = next(one for place, one in enumerate(ast.walk(changed)) if place == number)
    if node is changed or id(node) in header or not _edit(node):
        return None
    return changed.body


def _edit(node: ast.AST) -> bool:  # noqa: PLR0911 - one way each
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
        return True
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value += 1
        return True
    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _SWAPPED:
        node.op = _SWAPPED[type(node.op)]()
        return True
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        node.ops[0] = _SWAPPED[type(node.ops[0])]()
        return True
    if isinstance(node, ast.If | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return isinstance(node, ast.If)
    if isinstance(node, ast.Call) and len(node.args) > 1:
        node.args[0], node.args[1] = node.args[1], node.args[0]
        return not any(isinstance(one, ast.Starred) for one in node.args)
    if isinstance(node, ast.FunctionDef | ast.If | ast.For | ast.With) and len(node.body) > 1:
        del node.body[-1]
        return True
    if isinstance(node, ast.Return) and node.value is not None:
        node.value = ast.Constant(None)
        return True
    return False


SOC, SUITE = "SM8650", "quantized_ops"
QUICK = ("relu", "cat")
"""Cases of --quick, in 8a8w."""
EDITED = ("backends/qualcomm/builders/op_relu.py", "define_node")
"""Builder of an operator; the edit does not change the operators that it builds."""
# Words that no edit may add: they name programs and folders of this machine, or could hang it or remove files.
_SPARED = ("rmtree", "unlink", "remove", "os.system", "subprocess", "while ")
_EDITS_AT_ONCE = 12
# The start of a builder takes as long as so many jobs.
_WORTH_A_BUILDER = 4


def copied_toolchain(folder: Path) -> Path:
    """Return a copy of the installed ExecuTorch, as a source tree; its libraries are links."""
    spec = importlib.util.find_spec("executorch")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no executorch is installed")

    def place(source: str, target: str) -> str:
        if source.endswith(".py"):
            return str(shutil.copy2(source, target))
        Path(target).symlink_to(source)
        return target

    left_out = shutil.ignore_patterns("__pycache__", "include", "share", "*.h", "*.pyi")
    return Path(
        shutil.copytree(next(iter(spec.submodule_search_locations)), folder, copy_function=place, ignore=left_out)
    )


def figures_identity(config: Config) -> dict[str, float]:
    """Return the time to recognize farm's own toolchain by its content."""
    from farm.builds.runtime.qnn_sdk import host_sdk
    from farm.builds.toolchains.identity import identify
    from farm.builds.toolchains.interpreters import own_facts

    sdk = host_sdk(config.cache_dir, sdk_root=config.sdk_root)
    facts = own_facts()
    taken = []
    for _ in range(6):
        started = time.perf_counter()
        identify(config.cache_dir, Path(sys.executable), facts, sdk.env, qnn=sdk.lib_dir)
        taken.append(time.perf_counter() - started)
    # The first identification is left out, as it may have read files.
    return {"identity_warm_s": round(statistics.median(taken[1:]), 3)}


def chosen_jobs(config: Config, *, quick: bool) -> list[Job]:
    jobs = plan([resolve_suite(SUITE, find_suites(config.suite_folders))], [find_soc(SOC)], "htp", (), ((),))
    return [job for job in jobs if not quick or (job.case.name in QUICK and job.target.precision == "8a8w")]


def run_farm(toolchain: Path, env: dict[str, str], *more: str, quick: bool) -> tuple[float, dict[str, Any]]:
    """Run the suite and return the seconds from Enter to prompt, and the printed JSON."""
    argv = [sys.executable, "-m", "farm.cli.main", "run", "--soc", SOC, "--suite", SUITE, "--virtual", "2"]
    argv += ["--toolchain", str(toolchain), "--json", *more]
    if quick:
        pattern = " or ".join(f"/{name}[" for name in QUICK)
        argv += ["--precision", "8a8w", "-k", pattern]
    started = time.perf_counter()
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    taken = time.perf_counter() - started
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    return taken, json.loads(done.stdout)


def figures_trace(toolchain: Path, env: dict[str, str], jobs: Sequence[Job], *, quick: bool) -> dict[str, float]:
    """Return the cost of an edit in an operator's builder; the cache is empty before and complete afterwards."""
    config = use_toolchain(load_config(), str(toolchain))
    everything, run = run_farm(toolchain, env, quick=quick)
    print(f"{len(run['jobs'])} jobs from an empty cache: {everything:.1f} s")
    path = toolchain / EDITED[0]
    before = path.read_text()
    function = next(one for one in outermost_functions(ast.parse(before)) if one.name == EDITED[1])
    lines = before.splitlines(keepends=True)
    place, indent = function.body[0].lineno - 1, " " * function.body[0].col_offset
    path.write_text("".join([*lines[:place], f"{indent}edited = 1\n", *lines[place:]]))
    tools = prepare(config)
    started = time.perf_counter()
    found = find_bundles_for(jobs, tools, BundleCache(config.cache_dir))
    lacking = [job.id for job in jobs if not found[job.id].cached]
    print(f"{len(lacking)} of {len(jobs)} are concerned, found in {time.perf_counter() - started:.2f} s: {lacking[:8]}")
    after, again = run_farm(toolchain, env, "--changed-since", run["id"], quick=quick)
    print(f"{len(again['jobs'])} of them again, to the verdict: {after:.1f} s")
    path.write_text(before)
    return {
        "one_function_edit_recompiled_share": round(len(lacking) / len(jobs), 4),
        "one_function_edit_speedup": round(everything / after, 1),
    }


def figures_edits(toolchain: Path, jobs: Sequence[Job], *, rounds: int, seconds: float) -> dict[str, int]:
    """Return the number of random edits, and of kept bundles that differ when they are compiled with the edits."""
    draw = random.Random(20_261_123)
    config = use_toolchain(load_config(), str(toolchain))
    cache = BundleCache(config.cache_dir)
    clean = prepare(config)
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
        compile_jobs(jobs, clean, cache.root, Path(folder))
        found = find_bundles_for(jobs, clean, cache)
        jobs = [job for job in jobs if found[job.id].cached]
        ran = functions_by_bundle(toolchain, cache, [found[job.id].key for job in jobs])
    edits = stale = checked = 0
    end = time.monotonic() + seconds
    for number in range(rounds):
        if time.monotonic() > end:
            break
        made = edit_some(ran, draw)
        try:
            tools = prepare(config)
            found = find_bundles_for(jobs, tools, cache)
            kept = [job for job in jobs if found[job.id].cached]
            with tempfile.TemporaryDirectory(prefix="farm-bench-") as folder:
                fresh = compile_untraced(kept, tools, Path(folder))
                wrong = [
                    job.id
                    for job in kept
                    if (bundle := fresh.get(job.id)) is None or _differ(_bundle(cache, found[job.id].key), bundle)
                ]
        finally:
            for path, text in made.items():
                path.write_text(text)
        edits, stale, checked = edits + len(made), stale + len(wrong), checked + len(kept)
        print(f"round {number}: {len(made)} edits, {len(kept)} of {len(jobs)} bundles kept, stale: {wrong or 'none'}")
        if wrong:
            print(f"  edits: {[str(path.relative_to(toolchain)) for path in made]}")
    print(f"{edits} edits, {checked} kept bundles compared with what is compiled anew")
    return {"edits": edits, "stale": stale}


def functions_by_bundle(toolchain: Path, cache: BundleCache, keys: Sequence[str]) -> dict[tuple[Path, int], set[str]]:
    """Return the bundles that ran each function of the loaded files, by file and number."""
    ran: dict[tuple[Path, int], set[str]] = {}
    bodies: dict[str, tuple[Body, ...]] = {}
    for key in keys:
        trace = read_trace(cache.folder(key))
        if trace is None:
            raise SystemExit(f"bundle {key} has no trace: its build.log says why")
        for name, one in trace.roots[0].items():
            if name not in bodies:
                bodies[name] = parts_of((toolchain / name).read_bytes()).bodies
            for number, body in enumerate(bodies[name]):
                users = ran.setdefault((toolchain / name, number), set())
                if one.whole or body.always or one.ran(body.first, body.last):
                    users.add(key)
    some = sum(1 for users in ran.values() if 0 < len(users) < len(keys))
    none = sum(1 for users in ran.values() if not users)
    print(f"{len(ran)} functions: {some} that some of {len(keys)} bundles ran and others did not, {none} that none ran")
    return ran


def edit_some(ran: dict[tuple[Path, int], set[str]], draw: random.Random) -> dict[Path, str]:
    """Edit functions of different files that half of the bundles did not run; return the former texts of the files.

    If there are enough, two thirds of the functions take part in other bundles.
    """
    keys = sorted(set().union(*ran.values()))
    spared = set(draw.sample(keys, max(1, len(keys) // 2)))
    open_to_all = [place for place, users in ran.items() if not users & spared]
    draw.shuffle(open_to_all)
    open_to_all.sort(key=lambda place: not ran[place])
    taking_part = [place for place in open_to_all if ran[place]]
    choices = taking_part[: _EDITS_AT_ONCE * 4] + open_to_all[len(taking_part) :]
    made: dict[Path, str] = {}
    for path, number in choices:
        if len(made) == _EDITS_AT_ONCE:
            break
        if ran[path, number] and len(made) >= _EDITS_AT_ONCE * 2 // 3:
            continue
        before = path.read_text()
        after = None if path in made else mutated(before, number, draw)
        if after is None or any(word in after and word not in before for word in _SPARED):
            continue
        made[path] = before
        path.write_text(after)
    return made


def compile_jobs(jobs: Sequence[Job], tools: Toolchain, root: Path, folder: Path) -> dict[str, str]:
    """Compile missing bundles into the cache at `root`; return the keys by job id."""
    found = find_bundles_for(jobs, tools, BundleCache(root))
    requests = [
        BuildRequest(job, found[job.id].key, dict(tools.versions), str(folder / f"{found[job.id].key}.log"))
        for job in jobs
        if not found[job.id].cached
    ]
    width = min(2, -(-len(requests) // _WORTH_A_BUILDER))
    if requests:
        with Supervisor() as supervisor:
            pool = BuilderPool(
                requests, tools.compiler, BuilderSettings(MemoryLimits(8192, 4096), 600.0, root, supervisor, folder),
                width=width, on_done=lambda reply: print(reply.reason) if reply.reason else None,
            )  # fmt: skip
            pool.start()
            pool.join()
    return {job_id: one.key for job_id, one in found.items()}


def compile_untraced(jobs: Sequence[Job], tools: Toolchain, folder: Path) -> dict[str, Bundle]:
    """Compile jobs anew, by builders that neither trace nor fork; return their bundles by job id."""
    compiler = msgspec.structs.replace(tools.compiler, developed=())
    plain = msgspec.structs.replace(tools, compiler=compiler)
    keys = compile_jobs(jobs, plain, folder / "cache", folder)
    fresh = BundleCache(folder / "cache")
    found = {job_id: fresh.lookup(key) for job_id, key in keys.items()}
    return {job_id: bundle for job_id, bundle in found.items() if bundle is not None}


def _bundle(cache: BundleCache, key: str) -> Bundle:
    bundle = cache.lookup(key)
    if bundle is None:
        raise SystemExit(f"bundle {key} is gone")
    return bundle


def _differ(one: Bundle, other: Bundle) -> bool:
    return bool(differences(one.manifest, program_of(one), other))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two jobs")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long random edits are tried")
    arguments = parser.parse_args()
    quick = arguments.quick
    config = load_config()
    result: dict[str, float] = {**figures_identity(config)}
    jobs = chosen_jobs(config, quick=quick)
    with tempfile.TemporaryDirectory(prefix="farm-bench-") as scratch:
        # The start of a second builder takes longer than a few jobs.
        env = empty_environment(Path(scratch), builders=1 if quick else 0)
        os.environ.update(env)
        toolchain = copied_toolchain(Path(scratch, "executorch"))
        result |= figures_trace(toolchain, env, jobs, quick=quick)
        few = jobs if quick else jobs[:: max(1, len(jobs) // 24)]
        result |= figures_edits(toolchain, few, rounds=1 if quick else 1000, seconds=60.0 * arguments.minutes)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
