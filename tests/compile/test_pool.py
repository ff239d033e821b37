"""Real builder processes, real ExecuTorch: when the compiler works, refuses, crashes, is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from foreign_bytecode import write_foreign_bytecode
from waiting import until

from farm.base.processes import Supervisor
from farm.builds.bundles.cache import BundleCache, leftovers
from farm.builds.bundles.key import bundle_key, relevant_versions
from farm.builds.compile.pool import BuilderPool, BuilderSettings, MemoryLimits
from farm.builds.compile.protocol import TEMPLATE_NAME, BuildReply, BuildRequest
from farm.builds.toolchains.toolchain import Toolchain
from farm.suites.suite import Case, InputSpec, Job, Target

OPS = """
import ctypes, os, pathlib, signal, sys, tempfile, time, torch
from .double import double
class Slow(torch.nn.Module):
    def __init__(self):
        super().__init__()
        signal.pause()
class Crash(torch.nn.Module):
    def __init__(self):
        super().__init__()
        os.kill(os.getpid(), signal.SIGSEGV)
class Noisy(torch.nn.Module):
    def forward(self, x):
        raise ValueError("two\\nlines")
class TwoOut(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x), double(x)
class EatsMemory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.eaten = [torch.ones(2**24) for _ in range(256)]
class Starves(torch.nn.Module):
    # A stub of the kernel, which kills what takes too much: leaves how many others were busy then.
    def __init__(self, folder):
        super().__init__()
        folder = pathlib.Path(folder)
        while not any(folder.glob("*")):
            time.sleep(0.05)
        busy = len(list(folder.glob("busy-*")))
        (folder / f"starved-{time.monotonic_ns()}").write_text(str(busy))
        os.kill(os.getpid(), signal.SIGKILL)
class Busy(torch.nn.Module):
    # Until it happens a second time; not for ever, as that may wait for this.
    def __init__(self, folder, number):
        super().__init__()
        mark = pathlib.Path(folder, f"busy-{number}")
        mark.touch()
        deadline = time.monotonic() + 6
        while len(list(mark.parent.glob("starved-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        mark.unlink()
        raise ValueError("done")
class Tells(torch.nn.Module):
    def __init__(self, number, mark):
        super().__init__()
        while not pathlib.Path(mark).exists():
            time.sleep(0.02)
        raise ValueError(f"number {number}")
class TellsParent(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        parent = pathlib.Path("/proc", str(os.getppid()), "comm").read_text().strip()
        threads = len(os.listdir("/proc/self/task"))
        raise ValueError(f"fork of {parent} with {threads} thread, {os.environ['FARM_KNOWN']}")
class WaitsForMark(torch.nn.Module):
    def __init__(self, mark):
        super().__init__()
        pathlib.Path(mark).with_suffix(f".{os.getpid()}").touch()
        while not pathlib.Path(mark).exists():
            time.sleep(0.05)
        raise ValueError("done")
class TellsPriority(torch.nn.Module):
    def __init__(self):
        super().__init__()
        raise ValueError(f"niceness {os.nice(0)}")
left = []
class Leaves700MB(torch.nn.Module):
    def __init__(self, number):
        super().__init__()
        left.append(b"x" * 700_000_000)
        if len(left) > 1:
            signal.pause()  # until its memory is looked at
        raise ValueError(f"process {os.getpid()}")
class Exits(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        {"sys.exit": sys.exit, "os._exit": os._exit, "exit": ctypes.CDLL(None).exit}[how](7)
class Litters(torch.nn.Module):
    # What tools do: files where they stand, and in TMPDIR; then it ends as it is told.
    def __init__(self, how):
        super().__init__()
        pathlib.Path("here").write_text("x" * 1000)
        pathlib.Path(tempfile.mkdtemp(), "there").write_text("y" * 1000)
        if how in ("hang", "stop"):
            signal.pause()
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "exit":
            os._exit(0)
        raise ValueError(f"left in {os.getcwd()} and {tempfile.gettempdir()}")
class NoDelegate(torch.nn.Module):
    def forward(self, x):
        return torch.cumsum(x, 1)
"""


class Builds:
    """Runs requests through a pool of its own and keeps the replies."""

    def __init__(self, tools: Toolchain, cache: Path, scratch: Path) -> None:
        self.tools, self.cache, self.scratch = tools, BundleCache(cache), scratch
        self.folder = scratch / "suite"
        self.timeout_s, self.limits = 600.0, MemoryLimits(8192, 4096)
        self.folder.mkdir()
        (self.folder / "ops.py").write_text(OPS)
        (self.folder / "double.py").write_text("def double(x):\n    return x * 2\n")
        write_foreign_bytecode(self.folder / "double.py", "def double(x):\n    return x * 3\n")

    def request(
        self, module: str, *, args: tuple[object, ...] = (), samples: int = 1, precision: str = "8a8w",
        backend: str = "htp",
    ) -> BuildRequest:  # fmt: skip
        case = Case(
            suite="s", name="c", module=module, args=args, inputs=(InputSpec(shape=(1, 3, 8, 8)),), samples=samples,
            folder=str(self.folder),
        )  # fmt: skip
        job = Job(case, Target("SM8650", backend, precision))
        key = bundle_key(job, self.tools.versions)
        return BuildRequest(job, key, self.tools.versions, str(self.scratch / f"{key[:8]}.log"))

    def run(
        self,
        *requests: BuildRequest,
        width: int = 2,
        meanwhile: Callable[[Supervisor, BuilderPool], None] | None = None,
    ) -> list[BuildReply]:
        replies: list[BuildReply] = []
        with Supervisor() as supervisor:
            pool = BuilderPool(
                requests, self.tools.compiler,
                BuilderSettings(self.limits, self.timeout_s, self.cache.root, supervisor, self.scratch),
                width=width, on_start=self.started.append, on_done=replies.append,
            )  # fmt: skip
            pool.start()
            if meanwhile is not None:
                meanwhile(supervisor, pool)
            pool.join()
        order = [request.key for request in requests]
        return sorted(replies, key=lambda reply: order.index(reply.key))

    @property
    def started(self) -> list[str]:
        return self.__dict__.setdefault("_started", [])


@pytest.fixture
def builds(tools: Toolchain, tmp_path: Path) -> Builds:
    return Builds(tools, tmp_path / "cache", tmp_path)


@pytest.fixture(scope="module")
def mixed(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> tuple[Builds, dict[str, BuildReply]]:
    """Pool with good and bad jobs side by side; loading torch for every test would take a minute."""
    folder = tmp_path_factory.mktemp("mixed")
    builds = Builds(tools, folder / "cache", folder)
    builds.limits = MemoryLimits(3000, 2500)
    exits = [(".ops:Exits", how) for how in ("sys.exit", "os._exit", "exit")]
    names = (".ops:Noisy", ".ops:EatsMemory", ".ops:Crash", ".ops:Nope", ".nope:Nope", "torch.nn:ReLU", ".ops:TwoOut")
    requests = [builds.request(name, samples=2) for name in names]
    on_cpu = (".ops:TwoOut", ".ops:NoDelegate", ".ops:TellsPriority")
    requests += [builds.request(name, precision="fp32", backend="xnnpack") for name in on_cpu]
    requests.append(builds.request("torch.nn:ReLU", precision="fp16"))
    requests += [builds.request(name, args=(how,), precision="fp32", backend="xnnpack") for name, how in exits]
    replies = builds.run(*requests)
    keys = (*names, *(f"{name} on the CPU" for name in on_cpu), "fp16", *(how for _, how in exits))
    return builds, dict(zip(keys, replies, strict=True))


def test_a_module_becomes_a_bundle_with_inputs_and_both_references(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    reply = replies[".ops:TwoOut"]
    assert reply.ok, reply.reason
    bundle = builds.cache.lookup(reply.key)
    assert bundle is not None
    bundle.verify()
    manifest = bundle.manifest
    assert manifest.delegates == {"QnnBackend": 1}
    assert manifest.fallback_ops == {}
    assert manifest.pte_bytes == bundle.model.stat().st_size > 1000
    assert {"export", "quantize", "lower", "serialize", "total"} <= set(manifest.seconds)
    assert manifest.versions == relevant_versions("htp", builds.tools.versions)
    for sample in range(2):
        [path] = bundle.input_files(sample)
        x = np.fromfile(path, np.float32).reshape(1, 3, 8, 8)
        for index, expected in enumerate((np.maximum(x, 0), x * 2)):
            np.testing.assert_allclose(bundle.reference("fp32", sample, index), expected, rtol=1e-6)
            step = np.abs(bundle.reference("quantized", sample, index) - expected).max()
            assert 0 < step < 0.1
    first, second = (path.read_bytes() for sample in range(2) for path in bundle.input_files(sample))
    assert first != second
    assert (bundle.folder / "build.log").stat().st_size > 0


def test_on_the_cpu_nothing_is_quantized_and_no_qnn_takes_part(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    reply = replies[".ops:TwoOut on the CPU"]
    assert reply.ok, reply.reason
    bundle = builds.cache.lookup(reply.key)
    assert bundle is not None
    manifest = bundle.manifest
    assert (manifest.backend, manifest.precision, manifest.references) == ("xnnpack", "fp32", ("fp32",))
    assert manifest.delegates == {"XnnpackBackend": 1}
    # The export turns the whole number 2 into a tensor, and that is cast.
    assert manifest.fallback_ops == {"dim_order_ops._to_dim_order_copy.default": 1}
    assert "quantize" not in manifest.seconds
    assert "qnn" not in manifest.versions
    assert not (bundle.folder / "reference_quantized").exists()
    [path] = bundle.input_files(0)
    x = np.fromfile(path, np.float32).reshape(1, 3, 8, 8)
    np.testing.assert_array_equal(bundle.reference("fp32", 0, 0), np.maximum(x, 0))


def test_what_xnnpack_does_not_take_stays_an_operator(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    reply = replies[".ops:NoDelegate on the CPU"]
    assert reply.ok, reply.reason
    bundle = builds.cache.lookup(reply.key)
    assert bundle is not None
    assert (bundle.manifest.delegates, bundle.manifest.delegated_ops) == ({}, 0)
    assert bundle.manifest.fallback_ops == {"aten.cumsum.default": 1}


def test_fp16_is_not_quantized_either(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    assert replies["fp16"].ok, replies["fp16"].reason
    bundle = builds.cache.lookup(replies["fp16"].key)
    assert bundle is not None
    assert (bundle.manifest.references, bundle.manifest.delegates) == (("fp32",), {"QnnBackend": 1})


def test_a_refusal_of_the_compiler_is_that_jobs_alone(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    assert replies[".ops:Noisy"].reason == "ValueError: two lines"
    assert "Traceback" in Path(builds.request(".ops:Noisy", samples=2).log).read_text()
    assert "has no Nope" in replies[".ops:Nope"].reason
    assert "nope" in replies[".nope:Nope"].reason
    assert replies["torch.nn:ReLU"].ok
    assert not any(reply.infra for reply in replies.values())


def test_what_runs_jobs_goes_before_what_compiles(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    _, replies = mixed
    assert replies[".ops:TellsPriority on the CPU"].reason == f"ValueError: niceness {min(os.nice(0) + 10, 19)}"


def test_a_module_that_eats_all_memory_fails_alone(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    _, replies = mixed
    eater = replies[".ops:EatsMemory"]
    assert (eater.ok, eater.infra) == (False, False)
    assert "more than 3000 MB of memory" in eater.reason
    assert "raise build.memory_mb" in eater.reason
    assert replies["torch.nn:ReLU"].ok
    assert replies[".ops:TwoOut"].ok


def test_a_crash_of_the_compiler_is_that_jobs_alone(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    _, replies = mixed
    crash = replies[".ops:Crash"]
    assert (crash.ok, crash.infra) == (False, False)
    assert crash.reason == "the compiler crashed (SIGSEGV)"
    assert replies["torch.nn:ReLU"].ok
    assert replies[".ops:TwoOut"].ok


def test_a_compiler_that_calls_exit_is_that_jobs_alone(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    for how in ("sys.exit", "os._exit", "exit"):
        reply = replies[how]
        assert (reply.ok, reply.infra, reply.reason) == (False, False, "the compiler called exit(7)"), how
    assert builds.started.count(replies["os._exit"].key) == 1


def test_nothing_is_left_by_compiles_whatever_ended_them(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, _ = mixed
    assert left(builds.cache.root) == []


@pytest.mark.whole
def test_a_builder_that_is_killed_is_the_farms_fault_after_a_second_try_alone(builds: Builds) -> None:
    marks = builds.scratch / "marks"
    marks.mkdir()
    starves = builds.request(".ops:Starves", args=(str(marks),))
    busy = [builds.request(".ops:Busy", args=(str(marks), number)) for number in range(4)]
    reply, *others = builds.run(starves, *busy)
    assert reply.infra
    assert "killed (signal 9), most likely as the machine ran out of memory" in reply.reason
    assert builds.cache.lookup(starves.key) is None
    assert [mark.read_text() for mark in sorted(marks.glob("starved-*"))] == ["1", "0"]
    assert [other.reason for other in others] == ["ValueError: done"] * 4


@pytest.mark.whole
def test_a_builder_that_has_grown_is_replaced_before_the_next_job(builds: Builds) -> None:
    builds.limits = MemoryLimits(8192, 800)
    first, second = builds.run(*_leaving(builds), width=1)
    assert "process" in first.reason
    assert first.reason != second.reason


@pytest.mark.whole
def test_a_job_is_not_to_blame_for_what_others_left_in_its_builder(builds: Builds) -> None:
    builds.limits = MemoryLimits(1300, 4096)
    first, second = builds.run(*_leaving(builds), width=1)
    assert "process" in first.reason
    assert "process" in second.reason
    assert first.reason != second.reason


@pytest.mark.whole
def test_every_job_has_its_own_answer_also_when_its_builder_could_not_be_looked_at(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, mark = [], builds.scratch / "mark"

    def resident_bytes(pid: int) -> int:
        looks.append(pid)
        if len(looks) == 2:
            mark.touch()
            raise FileNotFoundError("a process that has just ended")
        return 0

    monkeypatch.setattr("farm.base.memory.resident_bytes", resident_bytes)
    requests = [
        builds.request(".ops:Tells", args=(n, str(mark)), precision="fp32", backend="xnnpack") for n in range(4)
    ]
    replies = builds.run(*requests, width=1)
    output = {reply.key: reply.reason for reply in replies}
    assert output == {request.key: f"ValueError: number {n}" for n, request in enumerate(requests)}


def test_several_builders_are_forks_of_one_process_and_a_single_builder_is_none(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_KNOWN", "with its environment")
    requests = [builds.request(".ops:TellsParent", args=(n,), precision="fp32", backend="xnnpack") for n in range(2)]
    expected = f"ValueError: fork of {TEMPLATE_NAME} with 1 thread, with its environment"
    assert [reply.reason for reply in builds.run(*requests)] == [expected] * 2
    [alone] = builds.run(requests[0])
    assert TEMPLATE_NAME not in alone.reason
    assert "with its environment" in alone.reason


def test_jobs_are_compiled_again_after_the_process_that_builders_are_forks_of_was_killed(builds: Builds) -> None:
    mark = builds.scratch / "mark"
    requests = [
        builds.request(name, args=args, precision="fp32", backend="xnnpack")
        for name, args in ((".ops:WaitsForMark", (str(mark),)), (".ops:TellsPriority", ()))
    ]

    def kill(supervisor: Supervisor, _: BuilderPool) -> None:
        until(lambda: [*builds.scratch.glob("mark.*")], "a job in progress")
        template = supervisor.find(TEMPLATE_NAME)
        os.kill(template.pid, signal.SIGKILL)
        template.process.wait()
        mark.touch()

    waiting, other = builds.run(*requests, meanwhile=kill)
    assert waiting.reason == "ValueError: done"
    assert len([*builds.scratch.glob("mark.*")]) == 2, "two attempts"
    assert "niceness" in other.reason


def test_builders_start_by_themselves_if_the_process_that_they_are_forks_of_does_not_start(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_KNOWN", "as ever")
    monkeypatch.setattr("farm.builds.compile.template._MODULE", "farm.no_module")
    requests = [builds.request(".ops:TellsParent", args=(n,), precision="fp32", backend="xnnpack") for n in range(2)]
    replies = builds.run(*requests)
    assert ["as ever" in reply.reason and TEMPLATE_NAME not in reply.reason for reply in replies] == [True] * 2


def _leaving(builds: Builds) -> list[BuildRequest]:
    return [builds.request(".ops:Leaves700MB", args=(n,), precision="fp32", backend="xnnpack") for n in range(2)]


def test_a_compiler_that_does_not_finish_fails_in_its_time(builds: Builds) -> None:
    builds.timeout_s = 1.0
    [reply] = builds.run(builds.request(".ops:Slow"))
    assert (reply.ok, reply.infra) == (False, False)
    assert "did not finish in 1 s" in reply.reason


@pytest.mark.parametrize(
    "how", ["crash", *(pytest.param(how, marks=pytest.mark.whole) for how in ("stop", "hang", "kill", "exit", "raise"))]
)
def test_what_a_compile_wrote_goes_with_its_builder(
    builds: Builds, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stood, temporary = tmp_path / "stood", tmp_path / "temporary"
    stood.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(stood)
    monkeypatch.setenv("TMPDIR", str(temporary))
    builds.timeout_s = 5.0 if how == "hang" else builds.timeout_s
    seen: list[Path] = []

    def stop(_supervisor: Supervisor, pool: BuilderPool) -> None:
        files = until(lambda: [*builds.cache.root.glob("builders/*/*/there")], "a file of the compile")
        seen.extend((files[0].parent.parent, *left(builds.cache.root)))
        pool.stop()

    request = builds.request(".ops:Litters", args=(how,), precision="fp32", backend="xnnpack")
    replies = builds.run(request, meanwhile=stop if how == "stop" else None)
    assert not any(reply.ok for reply in replies)
    if how == "stop":
        assert len(set(seen)) == 2, "the folder of the builder, and that of the bundle"
    if how == "raise":
        [reply] = replies
        assert reply.reason.count(str(builds.cache.root / "builders")) == 2, reply.reason
    assert left(builds.cache.root) == []
    assert list(stood.iterdir()) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.whole
def test_what_a_killed_farm_left_is_counted_and_goes_with_the_next_one(builds: Builds) -> None:
    root = builds.cache.root
    code = (
        "import signal, sys; from pathlib import Path; from farm.builds.bundles.cache import BundleCache\n"
        "from farm.base.publish import own_folder\n"
        "def fill(folder):\n"
        "    (folder / 'model.pte').write_bytes(b'half'); print('building', flush=True); signal.pause()\n"
        f"with own_folder(Path({str(root)!r}, 'builders'), sys.argv[1]) as folder:\n"
        "    (folder / 'dump').write_bytes(b'1234567890')\n"
        f"    BundleCache(Path({str(root)!r})).build(sys.argv[2] * 64, fill)\n"
    )
    stubs = [
        subprocess.Popen([sys.executable, "-c", code, name, key], stdout=subprocess.PIPE)
        for name, key in (("killed", "a"), ("living", "b"))
    ]
    try:
        for stub in stubs:
            assert stub.stdout is not None
            assert stub.stdout.readline() == b"building\n"
        assert leftovers(root) == []
        stubs[0].kill()
        stubs[0].wait()
        living = [path for path in left(root) if path.name == "living" or path.name.startswith("b")]
        counted = leftovers(root)
        assert sorted((one.files, one.nbytes) for one in counted) == [(1, 4), (1, 10)]
        assert not {one.path for one in counted} & set(map(str, living))
        [reply] = builds.run(builds.request(".nope:Nope", precision="fp32", backend="xnnpack"))
        assert "nope" in reply.reason
        assert leftovers(root) == []
        assert left(root) == living
        assert len(living) == 2
    finally:
        for stub in stubs:
            stub.kill()
            stub.wait()
            assert stub.stdout is not None
            stub.stdout.close()


def test_a_builder_that_cannot_be_started_is_a_reply_all_the_same(builds: Builds) -> None:
    nowhere = msgspec.structs.replace(builds.tools.compiler, python=str(builds.scratch / "no python"))
    builds.tools = msgspec.structs.replace(builds.tools, compiler=nowhere)
    replies = builds.run(builds.request(".ops:Slow"), builds.request("torch.nn:ReLU"))
    assert [reply.infra for reply in replies] == [True, True]
    assert "no python" in replies[0].reason


def test_a_cache_that_cannot_be_written_is_the_farms_fault_and_says_why(builds: Builds) -> None:
    builds.cache.root.mkdir()
    (builds.cache.root / "builders").write_text("no folder")
    [reply] = builds.run(builds.request("torch.nn:ReLU"))
    assert (reply.ok, reply.infra) == (False, True)
    assert "builders" in reply.reason
    assert "File exists" in reply.reason or "Not a directory" in reply.reason


@pytest.mark.whole
def test_stopping_ends_the_builders_at_once(builds: Builds) -> None:
    stopped = threading.Event()

    def stop(_supervisor: Supervisor, pool: BuilderPool) -> None:
        until(lambda: _is_building(builds.cache.root), "a compile")
        pool.stop()
        stopped.set()

    replies = builds.run(builds.request(".ops:Slow"), meanwhile=stop)
    assert replies == []
    assert stopped.is_set()
    assert left(builds.cache.root) == []


def left(root: Path) -> list[Path]:
    """Return the folders that compiles make for a while."""
    return sorted(path for path in (*root.glob("bundles/*/*.partial"), *root.glob("builders/*")) if path.is_dir())


def _is_building(root: Path) -> bool:
    return any(root.glob("bundles/*/*.partial"))
