"""Real builders that trace a package under development: which edits of it concern which bundles, and which do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import warm_torch
from builder_runs import request_of, run_builders
from made import job

from farm.base import processes
from farm.base.hashes import tree_files
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import DevelopedRoot, FileTrace, edit_between, find_bundles_for, forget_pruned, to_bits
from farm.builds.compile.protocol import BuildReply
from farm.builds.toolchains.toolchain import Toolchain
from farm.suites.suite import Job

LAYERS = '''"""A model's own code in the package under development."""
import functools, torch
from developed import tables

def twice(function):
    return function

class Base(torch.nn.Module):
    bias = 1.0
    def forward(self, x, scale=2.0):
        if torch.compiler.is_compiling():
            return in_dynamo_alone(self.act(x))
        return self.act(x) * tables.factor("a") + self.bias
    def act(self, x):
        return torch.relu(x)

def in_dynamo_alone(x):
    y = x * 3
    return y

class Left(Base):
    @twice
    def unused(self):
        return 4

class Right(Base):
    def act(self, x):
        return torch.abs(x)

def at_import():
    Base.patched = 5

at_import()
'''
TABLES = """import functools

@functools.lru_cache
def factor(name):
    return look(name)

def look(name):
    value = 6.0
    return value

def never(name):
    return 7.0
"""
OPS = """
import ctypes, inspect, os, signal, subprocess, sys, torch
from developed import layers
class Left(layers.Left): pass
class Right(layers.Right): pass
class Reads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        inspect.getsource(layers.twice)
    def forward(self, x):
        return torch.relu(x)
class Spawns(torch.nn.Module):
    def __init__(self):
        super().__init__()
        subprocess.run([sys.executable, "-c", "import os"], check=True)
    def forward(self, x):
        return torch.abs(x)
class TracesItself(torch.nn.Module):
    def __init__(self):
        super().__init__()
        sys.settrace(sys.gettrace())
    def forward(self, x):
        return torch.tanh(x)
class Ends(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        {"os._exit": os._exit, "exit": ctypes.CDLL(None).exit}[how](7)
"""
NAMES = ("Left", "Right", "Reads", "Spawns", "TracesItself")
ENDS = ("exit", "crash")


class Bench:
    """A package under development, and jobs that use it."""

    def __init__(self, tools: Toolchain, folder: Path) -> None:
        self.package, self.suite = folder / "path" / "developed", folder / "suite"
        for path, text in ((self.suite / "ops.py", OPS), (self.package / "layers.py", LAYERS)):
            path.parent.mkdir(parents=True)
            path.write_text(text)
        for name, text in (("tables.py", TABLES), ("__init__.py", ""), ("data.json", "{}"), ("unloaded.py", "x = 1\n")):
            (self.package / name).write_text(text)
        self.cache, self.folder, self._tools = BundleCache(folder / "cache"), folder, tools
        self.jobs = {name: self.job(name) for name in NAMES}
        self.ended: list[BuildReply] = []
        """Replies for the jobs of ENDS."""

    def job(self, name: str, *args: str) -> Job:
        case = {"module": f".ops:{name}", "args": args, "folder": str(self.suite)}
        return job("-".join((name, *args)), backend="xnnpack", precision="fp32", **case)

    def tools(self, *, as_of_ns: int = 0) -> Toolchain:
        """The toolchain as the package is now; prepare() finds such folders by itself."""
        root = DevelopedRoot.of("developed_content", self.package, tree_files(self.folder / "hashes", self.package))
        content = str(hash(tuple(sorted(root.files.items()))) ^ hash(root.rest))
        compiler = self._tools.compiler
        env = {**compiler.env, "PYTHONPATH": str(self.package.parent)}
        compiler = msgspec.structs.replace(compiler, env=env, developed=(root,), as_of_ns=as_of_ns)
        versions = {**self._tools.versions, "developed_content": content}
        return msgspec.structs.replace(self._tools, versions=versions, compiler=compiler)

    def lacking(self, tools: Toolchain | None = None) -> set[str]:
        """The jobs that would be compiled now."""
        found = find_bundles_for(self.jobs.values(), tools or self.tools(), self.cache)
        return {name for name, job in self.jobs.items() if not found[job.id].cached}

    def build(self, *jobs: Job, tools: Toolchain | None = None) -> list[BuildReply]:
        tools = tools or self.tools()
        found = find_bundles_for(jobs, tools, self.cache)
        requests = [request_of(job, tools.versions, self.folder, found[job.id].key) for job in jobs]
        return run_builders(requests, tools.compiler, self.cache.root, self.folder)

    @contextmanager
    def edited(self, old: str, new: str, file: str = "layers.py") -> Iterator[None]:
        """Replace a text in a file of the package during the body."""
        path = self.package / file
        before = path.read_text()
        assert before.count(old) == 1
        path.write_text(before.replace(old, new))
        try:
            yield
        finally:
            path.write_text(before)


@pytest.fixture(scope="module", autouse=True)
def _forked_builders() -> Iterator[None]:
    """Let builders that trace be forks: none of these has imported the developed package.

    bench/toolchains.py has builders that trace from their start on.
    """
    with pytest.MonkeyPatch.context() as patch:
        if warm_torch.session is not None:
            patch.setattr(processes, "subprocess", warm_torch.session.subprocess(traced=True))
        yield


@pytest.fixture(scope="module")
def bench(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Everything compiled once, by one builder; jobs that end their forks come last."""
    bench = Bench(tools, tmp_path_factory.mktemp("tracing"))
    replies = bench.build(*bench.jobs.values(), *(bench.job("Ends", how) for how in ENDS))
    assert [reply.reason for reply in replies[: len(NAMES)]] == [""] * len(NAMES)
    bench.ended += replies[len(NAMES) :]
    assert bench.lacking() == set()
    return bench


TRACED = {"Left", "Right", "Reads"}
UNKNOWN = {"Spawns", "TracesItself"}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("file", "old", "new", "concerned"),
    [
        pytest.param("layers.py", "return torch.relu(x)", "return torch.relu(x) + 1", {"Left"}, id="method"),
        pytest.param("layers.py", "return torch.abs(x)", "return -torch.abs(x)", {"Right"}, id="of a subclass"),
        pytest.param("layers.py", "y = x * 3", "y = x * 4", {"Left", "Right"}, id="what dynamo alone reads"),
        pytest.param("layers.py", "return 4", "return 5", set(), id="a method that did not run"),
        pytest.param("layers.py", "return function", "return (function)", set(), id="brackets"),
        pytest.param("layers.py", "import functools", "# a comment\n\nimport functools", set(), id="a comment"),
        pytest.param("layers.py", "    def unused", "    def act(self, x):\n        return x\n    def unused", TRACED,
                     id="an override"),
        pytest.param("layers.py", "class Left", "@twice\nclass Left", TRACED, id="a decorator"),
        pytest.param("layers.py", "scale=2.0", "scale=3.0", TRACED, id="a default"),
        pytest.param("layers.py", "bias = 1.0", "bias = 2.0", TRACED, id="an attribute of a class"),
        pytest.param("layers.py", "Base.patched = 5", "Base.patched = 6", TRACED, id="what ran at import alone"),
        pytest.param("tables.py", "value = 6.0", "value = 8.0", {"Left", "Right"}, id="what is remembered"),
        pytest.param("tables.py", "return 7.0", "return 9.0", set(), id="a function that never ran"),
        pytest.param("tables.py", "return 7.0", "yield 9.0", TRACED, id="a function becomes a generator"),
        pytest.param("tables.py", "import functools", "import functools, os", TRACED, id="an import"),
        pytest.param("unloaded.py", "x = 1", "x = 2", set(), id="a file that nobody loads"),
        pytest.param("data.json", "{}", "[]", TRACED, id="a data file"),
    ],
)  # fmt: skip
def test_an_edit_concerns_the_bundles_in_which_it_took_part(
    bench: Bench, file: str, old: str, new: str, concerned: set[str]
) -> None:
    # For the case that read the file as text, each character counts.
    readers = {"Reads"} if file == "layers.py" else set()
    with bench.edited(old, new, file):
        assert bench.lacking() == concerned | UNKNOWN | readers
    assert bench.lacking() == set()


@pytest.mark.whole
def test_a_file_more_or_less_concerns_all(bench: Bench) -> None:
    more = bench.package / "more.py"
    more.write_text("")
    assert bench.lacking() == set(NAMES)
    more.unlink()
    less = bench.package / "unloaded.py"
    text = less.read_text()
    less.unlink()
    assert bench.lacking() == set(NAMES)
    less.write_text(text)
    assert bench.lacking() == set()


@pytest.mark.whole
def test_what_was_pruned_is_compiled_again(bench: Bench, tmp_path: Path) -> None:
    sources, away = bench.cache.root / "sources", tmp_path / "sources"
    with bench.edited("return 4", "return 5"):
        assert bench.lacking() == UNKNOWN | {"Reads"}
        sources.rename(away)
        assert bench.lacking() == set(NAMES)
        away.rename(sources)
        forget_pruned(bench.cache)
        assert bench.lacking() == UNKNOWN | {"Reads"}


@pytest.mark.whole
def test_an_edited_bundle_is_compiled_anew_and_both_states_are_kept(bench: Bench) -> None:
    right = bench.jobs["Right"]
    with bench.edited("return torch.abs(x)", "return -torch.abs(x)"):
        tools = bench.tools()
        [reply] = bench.build(right, tools=tools)
        assert reply.ok
        assert "Right" not in bench.lacking(tools)
    assert bench.lacking() == set()
    assert find_bundles_for([right], bench.tools(), bench.cache)[right.id].key != reply.key


@pytest.mark.whole
def test_what_is_edited_while_it_is_compiled_is_in_no_bundle(bench: Bench) -> None:
    job = Job(msgspec.structs.replace(bench.jobs["Left"].case, seed=5), bench.jobs["Left"].target)
    [reply] = bench.build(job, tools=bench.tools(as_of_ns=1))
    assert (reply.ok, reply.infra) == (False, True)
    assert "was changed after the start of the run" in reply.reason


@pytest.mark.whole
def test_a_job_that_ends_its_fork_fails_alone_as_without_one(bench: Bench) -> None:
    exits = "the compiler called exit(7)"
    crashed = "the compiler crashed (SIGSEGV)"
    assert [(one.reason, one.infra) for one in bench.ended] == [(exits, False), (crashed, False)]
    assert [*bench.cache.root.glob("builders/*"), *bench.cache.root.glob("bundles/*/*.partial")] == []


SILENT = "def f():\n    ...\ndef g():\n    global x\ndef h(): return 1\n"


@pytest.mark.parametrize("tells_nothing", ["...", "global x", "return 1"])
def test_a_function_whose_lines_tell_nothing_is_taken_to_have_run(tells_nothing: str) -> None:
    edit = edit_between(SILENT.encode(), SILENT.replace(tells_nothing, "return 2").encode())
    assert not edit.everywhere
    assert edit.concerns(FileTrace("", to_bits([1, 3, 5])))


def test_a_file_that_this_python_cannot_read_concerns_all() -> None:
    assert edit_between(b"x = 1\n", b"x = = 1\n").everywhere
