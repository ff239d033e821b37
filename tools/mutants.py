"""Measure the fault-finding power of the tests: plant one small fault at a time, run the tests that cover it.

    python tools/mutants.py draw --source CHECKOUT --seed 1 --count 150 --out mutants.jsonl
    python tools/mutants.py map --tests CHECKOUT --out map.json -- -n 2 --dist loadfile tests/results tests/run
    python tools/mutants.py run --tests CHECKOUT --mutants mutants.jsonl --map map.json --results out.jsonl --limit-s 60

`map` records by coverage.py which test executes which line, processes that a test starts or forks included. A second
`map` with the same file adds the tests of other files. `run` ends a mutant at its first failed test and appends a line
to the results; a mutant with a result is not run again. The last line of its output is a summary as JSON.
The checkout itself stays unchanged: all tests run in a copy. Linux only.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import operator
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coverage
import pytest

sys.path[:0] = [str(Path(__file__).parent)]

from mutant_sites import FUNCTION, PACKAGES, applied, draw  # noqa: E402 - also as a plugin of pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mutant_sites import Mutant

SPOILING = ("builds/bundles", "builds/compile/flows")
"""Packages whose mutants may leave damaged entries in the cache."""
STATES = ("killed", "survived", "timed out", "not covered", "stale")


class Bench:
    """Copy of a checkout in which tests run, with a copy of FARM_TEST_CACHE."""

    def __init__(self, checkout: Path, work: Path) -> None:
        self.work, self.tree, self.cache = work, work / "tree", work / "cache"
        python = checkout / ".venv/bin/python"
        self.python = str(python if python.exists() else sys.executable)
        shutil.rmtree(self.tree, ignore_errors=True)
        skipped = shutil.ignore_patterns(".venv", ".git", ".hypothesis", ".pytest_cache", "__pycache__")
        shutil.copytree(checkout, self.tree, symlinks=True, ignore=skipped)
        # CI makes the examples of hypothesis the same in each run; the mark finds processes that outlive their test.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("COVERAGE_", "MUTANTS_"))}
        self.env = {**kept, "CI": "true", "MUTANTS_MARK": str(work), "FARM_TEST_CACHE": str(self.cache)}
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.tree), os.environ.get("PYTHONPATH")]))
        if not self.cache.exists():
            self.copy_cache()
        words = [self.python, "-c", "import farm; print(farm.__file__)"]
        place = subprocess.run(words, env=self.env, cwd="/", capture_output=True, text=True, check=True).stdout
        if not place.startswith(str(self.tree)):
            sys.exit(f"{self.python}: farm is imported from {place.strip()}, not from {self.tree}")

    def copy_cache(self) -> None:
        """Link the compiled things of FARM_TEST_CACHE anew: a mutant may have removed or spoilt some."""
        shutil.rmtree(self.cache, ignore_errors=True)
        if kept := os.environ.get("FARM_TEST_CACHE"):
            shutil.copytree(kept, self.cache, symlinks=True, copy_function=os.link)
        else:
            self.cache.mkdir()

    def listed(self, tests: list[str]) -> str:
        """Return the argument of pytest for many tests: a file with their names."""
        (self.work / "tests.txt").write_text("\n".join(tests))
        return f"@{self.work / 'tests.txt'}"

    def pytest(self, words: list[str], limit_s: float | None = None) -> tuple[int | None, str]:
        """Return exit code and output of pytest; the code is None after `limit_s`."""
        log = self.work / "log"
        with log.open("w") as stream:
            process = subprocess.Popen(  # in a group of its own: Ctrl-C of a mutant ends its tests alone
                [self.python, "-m", "pytest", "-p", "no:cacheprovider", *words], cwd=self.tree, env=self.env,
                stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True,
            )  # fmt: skip
            code = self._wait(process, limit_s)
            if code is None:
                process.send_signal(signal.SIGINT)
                if self._wait(process, 10) is None:
                    process.kill()
                    process.wait()
        self._end_leftovers()
        return code, log.read_text(errors="replace")

    @staticmethod
    def _wait(process: subprocess.Popen[bytes], limit_s: float | None) -> int | None:
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def _end_leftovers(self) -> None:
        mark = b"MUTANTS_MARK=" + os.fsencode(self.work) + b"\0"
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
            except OSError:
                continue


class Recorder:
    """pytest plugin of `map`: names the running test or shared fixture as the context of coverage.py."""

    def __init__(self, folder: Path) -> None:
        self._records = folder / f"tests.{os.getpid()}.jsonl"
        self._passed, self._context = True, ""

    def _switch(self, context: str) -> str:
        outer, self._context = self._context, context
        measured = coverage.Coverage.current()
        measured.switch_context(context)
        # Processes that a test starts or forks take their context from here.
        measured.set_option("run:context", context)
        os.environ["COVERAGE_PROCESS_CONFIG"] = measured.config.serialize()
        os.environ["FARM_TEST_COLD_TORCH"] = "1"
        return outer

    def pytest_collection_finish(self) -> None:
        """Start an interpreter for each command: a fork server has the context of the test that started it."""
        if forks := sys.modules.get("forked_command"):
            forks.FORKED = frozenset()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Record one test: its seconds, whether it passed, and the fixtures that it uses."""
        self._passed, begin = True, time.monotonic()
        self._switch(item.nodeid)
        result = yield
        self._switch("")
        seconds = round(time.monotonic() - begin, 3)
        record = {"test": item.nodeid, "s": seconds, "ok": self._passed, "fixtures": item.fixturenames}
        with self._records.open("a") as stream:
            stream.write(json.dumps(record) + "\n")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        """Remember a part of a test that did not pass."""
        report = yield
        self._passed &= report.passed
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[None]:
        """Count the lines of a shared fixture for every test that uses it, not for the first one alone."""
        shared = fixturedef.scope != "function"
        outer = self._switch(f"{request.node.nodeid}\t{fixturedef.argname}") if shared else ""
        try:
            return (yield)
        finally:
            if shared:
                self._switch(outer)


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder in a process of `map`."""
    if folder := os.environ.get("MUTANTS_RECORDS"):
        config.pluginmanager.register(Recorder(Path(folder)))


class LineMap:
    """Tests by the line that they execute; a set of tests is an integer with one bit for each test."""

    def __init__(self, file: Path) -> None:
        known = json.loads(file.read_text()) if file.exists() else {"tests": [], "lines": {}}
        self.tests: list[dict[str, Any]] = known["tests"]
        self.lines = {
            name: {int(line): int(mask, 16) for mask, lines in masks.items() for line in lines}
            for name, masks in known["lines"].items()
        }

    def save(self, file: Path) -> None:
        """Write the map; lines of equal tests share an entry."""
        grouped: dict[str, dict[str, list[int]]] = {}
        for name, lines in sorted(self.lines.items()):
            masks = grouped.setdefault(name, {})
            for line, mask in sorted(lines.items()):
                masks.setdefault(f"{mask:x}", []).append(line)
        file.write_text(json.dumps({"tests": self.tests, "lines": grouped}))

    def add(self, folder: Path, tree: Path) -> None:
        """Add the records of a run of pytest in `folder`."""
        bits: dict[str, int] = defaultdict(int)
        for record in (record for file in folder.glob("tests.*.jsonl") for record in read_lines(file)):
            bit = 1 << len(self.tests)
            name = record["test"]
            self.tests.append({"test": name, "s": record["s"], "ok": record["ok"]})
            bits[name] |= bit
            parts = name.replace("::", "/").split("/")
            for node in ("", *(name[: len("/".join(parts[:number]))] for number in range(1, len(parts)))):
                for fixture in record["fixtures"]:
                    bits[f"{node}\t{fixture}"] |= bit
        measured = coverage.Coverage(data_file=str(folder / "data"), config_file=False)
        measured.combine([str(folder)])
        data = measured.get_data()
        for path in data.measured_files():
            lines = self.lines.setdefault(Path(path).relative_to(tree).as_posix(), {})
            for line, contexts in data.contexts_by_lineno(path).items():
                for context in contexts:
                    lines[line] = lines.get(line, 0) | bits.get(context, 0)

    def covering(self, mutant: Mutant, tree: Path) -> list[str]:
        """Return the passed tests that cover a mutant, the cheapest first.

        A line outside of functions runs once in a process, at its import. Tests that execute a function
        of the file, and test files that import the module, count for such a line.
        """
        lines = self.lines.get(mutant["file"], {})
        mask = lines.get(mutant["line"], 0) or lines.get(mutant["statement"], 0)
        importing: set[str] = set()
        if mutant["at_import"]:
            module = mutant["file"].removesuffix(".py").replace("/", ".")
            users = [one for one in self.lines if module in imports_of(tree / one)]
            importing = {one for one in self.files() if (tree / one).exists() and module in imports_of(tree / one)}
            mask |= self._in_functions(mutant["file"], tree)
            # A file of constants is executed by its users.
            for user in users if not mask & self._passed() else ():
                mask |= self._in_functions(user, tree)
        found = [
            one
            for number, one in enumerate(self.tests)
            if one["ok"] and (mask >> number & 1 or one["test"].split("::")[0] in importing)
        ]
        cost: Counter[str] = Counter()
        for one in found:
            cost[one["test"].split("::")[0]] += one["s"]
        # In classes of cost, so that the tests of a file stay together with the fixtures that they share.
        found.sort(key=lambda one: (one["s"] > 0.1, one["s"] > 1, one["s"] > 5, cost[one["test"].split("::")[0]]))
        return list(dict.fromkeys(one["test"] for one in found))

    def files(self) -> set[str]:
        """Return the test files of the map."""
        return {one["test"].split("::")[0] for one in self.tests}

    def _passed(self) -> int:
        return sum(1 << number for number, one in enumerate(self.tests) if one["ok"])

    def _in_functions(self, file: str, tree: Path) -> int:
        nodes = [one for one in ast.walk(ast.parse((tree / file).read_text())) if isinstance(one, FUNCTION)]
        inside = {line for one in nodes for line in range(one.body[0].lineno, (one.end_lineno or 0) + 1)}
        masks = (mask for line, mask in self.lines.get(file, {}).items() if line in inside)
        return functools.reduce(operator.or_, masks, 0)


@functools.cache
def imports_of(file: Path) -> set[str]:
    """Return the names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
    return found


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object a line; none where the file is missing."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def make_map(bench: Bench, out: Path, words: list[str]) -> int:
    """Run pytest with `words` under coverage.py, add the result to `out`, return the exit code of pytest."""
    folder = bench.work / "records"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    rc = bench.work / "coveragerc"
    rc.write_text(
        f"[run]\ninclude = {bench.tree}/farm/*\ndata_file = {folder}/data\nparallel = true\nsigterm = true\n"
        "concurrency = thread\npatch =\n    subprocess\n    fork\n    _exit\n"
    )
    bench.env |= {"COVERAGE_PROCESS_START": str(rc), "MUTANTS_RECORDS": str(folder)}
    bench.env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    code, output = bench.pytest(["-p", "mutants", *words])
    print(output[-4000:])  # noqa: T201
    line_map = LineMap(out)
    line_map.add(folder, bench.tree)
    line_map.save(out)
    return code or 0


def judge(bench: Bench, mutant: Mutant, tests: list[str], limit_s: float) -> Mutant:
    """Run the tests against one mutant and return its result."""
    result = {"id": mutant["id"], "package": mutant["package"], "change": mutant["change"], "tests": len(tests)}
    file, text = bench.tree / mutant["file"], applied(mutant, bench.tree)
    if text is None:
        return {**result, "state": "stale"}
    if not tests:
        return {**result, "state": "not covered"}
    begin = time.monotonic()
    original, times = file.read_bytes(), file.stat()
    file.write_text(text)
    # A compiled file is found by size and second: each mutant gets a time of its own.
    stamp = zlib.crc32(mutant["id"].encode())
    os.utime(file, (stamp, stamp))
    try:
        code, output = bench.pytest(["-x", "-q", "-rfE", bench.listed(tests)], limit_s)
    finally:
        file.write_bytes(original)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        if mutant["package"] in SPOILING:
            bench.copy_cache()
    state = "timed out" if code is None else "killed" if code else "survived"
    failed = re.search(r"^(?:FAILED|ERROR) (.*)", output, re.MULTILINE)
    by = {"by": failed[1][:300] if failed else output[-300:]} if state == "killed" else {}
    return {**result, "state": state, "s": round(time.monotonic() - begin, 1), **by}


def table(results: list[Mutant]) -> str:
    """Return the number of mutants by package and state, as a table and a line of JSON."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in results:
        counts[one["package"]][one["state"]] += 1
        counts["all"][one["state"]] += 1
    rows = [f"{'package':<16}" + "".join(f"{state:>13}" for state in STATES)]
    rows += [f"{name:<16}" + "".join(f"{count[one]:>13}" for one in STATES) for name, count in counts.items()]
    return "\n".join([*rows, json.dumps({name: dict(count) for name, count in counts.items()})])


def run(bench: Bench, mutants: list[Mutant], line_map: LineMap, results: Path, limit_s: float) -> None:
    """Judge every mutant without a result and print the table."""
    done = {one["id"] for one in read_lines(results)}
    covering = {one["id"]: line_map.covering(one, bench.tree) for one in mutants if one["id"] not in done}
    if names := sorted(set(itertools.chain(*covering.values()))):
        code, output = bench.pytest(["--collect-only", "-qq", bench.listed(names)])
        if code:
            sys.exit(f"{output[-2000:]}\nthe map is of other tests; run map again")
    for mutant in (one for one in mutants if one["id"] in covering):
        result = judge(bench, mutant, covering[mutant["id"]], limit_s)
        with results.open("a") as stream:
            stream.write(json.dumps(result) + "\n")
        print(f"{result['state']:<12} {result['id']} {result.get('by', '')}"[:200], flush=True)  # noqa: T201
    drawn = {one["id"] for one in mutants}
    print(table([one for one in read_lines(results) if one["id"] in drawn]))  # noqa: T201


def main() -> int:
    """Execute the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("draw", help="draw mutants from the sources of a checkout")
    one.add_argument("--source", type=Path, required=True)
    one.add_argument("--seed", type=int, default=1)
    one.add_argument("--count", type=int, default=150)
    one.add_argument("--packages", nargs="+", default=PACKAGES, help="of farm/")
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("map", help="record which test executes which line")
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("words", nargs="*", help="arguments of pytest, behind --")
    three = commands.add_parser("run", help="run each mutant against the tests that cover it")
    three.add_argument("--mutants", type=Path, required=True)
    three.add_argument("--map", type=Path, required=True)
    three.add_argument("--results", type=Path, required=True)
    three.add_argument("--limit-s", type=float, default=60, help="seconds for the tests of one mutant")
    for command in (two, three):
        command.add_argument("--tests", type=Path, required=True, help="checkout with the tests")
        command.add_argument("--work", type=Path, help="folder for the copy, on the file system of FARM_TEST_CACHE")
    options = parser.parse_args()
    if options.command == "draw":
        drawn = draw(options.source, options.seed, options.count, options.packages)
        options.out.write_text("".join(json.dumps(mutant) + "\n" for mutant in drawn))
        return 0
    work = options.work or Path(tempfile.gettempdir(), f"farm-mutants-{options.tests.resolve().name}")
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.tests.resolve(), work.resolve())
    if options.command == "map":
        return make_map(bench, options.out, options.words)
    run(bench, read_lines(options.mutants), LineMap(options.map), options.results, options.limit_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
