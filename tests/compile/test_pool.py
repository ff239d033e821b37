"""Real builder processes, real ExecuTorch: when the compiler works, refuses, crashes, is killed."""

from __future__ import annotations

import errno
import os
import signal
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from builder_runs import request_of, run_builders
from foreign_bytecode import write_foreign_bytecode
from made import job
from waiting import until

from farm.base.processes import Supervisor
from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import relevant_versions
from farm.builds.compile.pool import BuilderPool, MemoryLimits, case_of, take_next
from farm.builds.compile.protocol import TEMPLATE_NAME, BuildReply, BuildRequest
from farm.builds.toolchains.toolchain import Toolchain
from farm.suites.suite import Case, InputSpec, Job, Target

OPS = """
import ctypes, os, pathlib, signal, sys, tempfile, time, torch
from .double import double
def slow():
    signal.pause()
def noisy():
    raise ValueError("two\\nlines")
class TwoOut(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x), double(x)
def eats_memory():
    eaten = [torch.ones(2**24) for _ in range(256)]
def starves(folder):
    # A stub of the kernel, which kills what takes too much: leaves how many others were busy then.
    folder = pathlib.Path(folder)
    while not any(folder.glob("*")):
        time.sleep(0.05)
    busy = len(list(folder.glob("busy-*")))
    (folder / f"starved-{time.monotonic_ns():020}").write_text(str(busy))
    os.kill(os.getpid(), signal.SIGKILL)
def is_busy(folder, number):
    # Until it happens a second time; not for ever, as that may wait for this.
    mark = pathlib.Path(folder, f"busy-{number}")
    mark.touch()
    deadline = time.monotonic() + 6
    while len(list(mark.parent.glob("starved-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    mark.unlink()
    raise ValueError("done")
def tells(number, mark):
    while not pathlib.Path(mark).exists():
        time.sleep(0.02)
    raise ValueError(f"number {number}")
def tells_parent(number):
    parent = pathlib.Path("/proc", str(os.getppid()), "comm").read_text().strip()
    threads = len(os.listdir("/proc/self/task"))
    raise ValueError(f"fork of {parent} with {threads} thread, {os.environ['FARM_KNOWN']}")
def waits_for_mark(mark):
    pathlib.Path(mark).with_suffix(f".{os.getpid()}").touch()
    while not pathlib.Path(mark).exists():
        time.sleep(0.05)
    raise ValueError("done")
def tells_priority():
    raise ValueError(f"niceness {os.nice(0)}")
left = []
def leaves_700_mb(number):
    left.append(b"x" * 700_000_000)
    if len(left) > 1:
        signal.pause()  # until its memory is looked at
    raise ValueError(f"process {os.getpid()}")
def ends(how):
    {"sys.exit": sys.exit, "os._exit": os._exit, "exit": ctypes.CDLL(None).exit}[how](7)
def litters(how):
    # What tools do: files where they stand, and in TMPDIR; then it ends as it is told.
    pathlib.Path("here").write_text("x" * 1000)
    pathlib.Path(tempfile.mkdtemp(), "there").write_text("y" * 1000)
    if how in ("hang", "stop"):
        signal.pause()
    if how in ("kill", "crash"):
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSEGV)
    if how == "exit":
        os._exit(0)
    raise ValueError(f"left in {os.getcwd()} and {tempfile.gettempdir()}")
"""


class Builds:
    """Runs requests through a pool of its own."""

    def __init__(self, tools: Toolchain, folder: Path) -> None:
        self.tools, self.cache, self.scratch = tools, BundleCache(folder / "cache"), folder
        self.started: list[str] = []
        self.suite = folder / "suite"
        self.suite.mkdir()
        (self.suite / "ops.py").write_text(OPS)
        (self.suite / "double.py").write_text("def double(x):\n    return x * 2\n")
        write_foreign_bytecode(self.suite / "double.py", "def double(x):\n    return x * 3\n")

    def request(self, module: str, *args: object, precision: str = "fp32", backend: str = "xnnpack") -> BuildRequest:
        """Return the request for a case whose module is in ops.py unless its name has another file."""
        name = module if ":" in module else f".ops:{module}"
        case = {"module": name, "args": args, "inputs": (InputSpec((1, 3, 8, 8)),), "folder": str(self.suite)}
        made = job(backend=backend, precision=precision, samples=2, **case)
        return request_of(made, self.tools.versions, self.scratch)

    def run(self, *requests: BuildRequest, width: int = 2, **options: Any) -> list[BuildReply]:
        return run_builders(
            requests, self.tools.compiler, self.cache.root, self.scratch, width=width, on_start=self.started.append,
            **options,
        )  # fmt: skip

    def bundle(self, reply: BuildReply) -> Bundle:
        assert reply.ok, reply.reason
        return self.cache.lookup(reply.key)


def left(root: Path) -> list[Path]:
    """Return the folders that compiles make for a while."""
    return sorted(path for path in (*root.glob("bundles/*/*.partial"), *root.glob("builders/*")) if path.is_dir())


@pytest.fixture
def builds(tools: Toolchain, tmp_path: Path) -> Builds:
    return Builds(tools, tmp_path)


@pytest.fixture(scope="module")
def mixed(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> tuple[Builds, dict[str, BuildReply]]:
    """Pool with good and bad jobs side by side; loading torch for every test would take a minute."""
    builds = Builds(tools, tmp_path_factory.mktemp("mixed"))
    requests = {
        "noisy": builds.request("noisy"),
        "memory": builds.request("eats_memory"),
        "crash": builds.request("litters", "crash"),
        "no class": builds.request("Nope"),
        "no file": builds.request(".nope:Nope"),
        "htp": builds.request("TwoOut", precision="8a8w", backend="htp"),
        "cpu": builds.request("TwoOut"),
        "priority": builds.request("tells_priority"),
        "fp16": builds.request("torch.nn:ReLU", precision="fp16", backend="htp"),
        **{how: builds.request("ends", how) for how in ("sys.exit", "os._exit", "exit")},
    }
    replies = builds.run(*requests.values(), limits=MemoryLimits(2500, 2000))
    return builds, dict(zip(requests, replies, strict=True))


def test_a_module_becomes_a_bundle_with_inputs_and_both_references(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    bundle = builds.bundle(replies["htp"])
    bundle.verify()
    manifest = bundle.manifest
    assert (manifest.delegates, manifest.fallback_ops) == ({"QnnBackend": 1}, {})
    assert manifest.pte_bytes == bundle.model.stat().st_size > 1000
    assert {"export", "quantize", "lower", "serialize", "total"} <= set(manifest.seconds)
    assert manifest.versions == relevant_versions("htp", builds.tools.versions)
    inputs = [np.fromfile(*bundle.input_files(sample), np.float32).reshape(1, 3, 8, 8) for sample in range(2)]
    assert (inputs[0] != inputs[1]).any()
    for sample, x in enumerate(inputs):
        for index, expected in enumerate((np.maximum(x, 0), x * 2)):
            np.testing.assert_allclose(bundle.reference("fp32", sample, index), expected, rtol=1e-6)
            step = np.abs(bundle.reference("quantized", sample, index) - expected).max()
            assert 0 < step < 0.1
    assert (bundle.folder / "build.log").stat().st_size > 0


def test_on_the_cpu_nothing_is_quantized_and_no_qnn_takes_part(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    bundle = builds.bundle(replies["cpu"])
    manifest = bundle.manifest
    assert (manifest.backend, manifest.precision, manifest.references) == ("xnnpack", "fp32", ("fp32",))
    assert manifest.delegates == {"XnnpackBackend": 1}
    # The export turns the whole number 2 into a tensor, and that is cast.
    assert manifest.fallback_ops == {"dim_order_ops._to_dim_order_copy.default": 1}
    assert "quantize" not in manifest.seconds
    assert "qnn" not in manifest.versions
    assert not (bundle.folder / "reference_quantized").exists()
    # fp16 is not quantized either.
    manifest = builds.bundle(replies["fp16"]).manifest
    assert (manifest.references, manifest.delegates) == (("fp32",), {"QnnBackend": 1})


def test_a_compile_that_fails_fails_alone_with_its_reason(mixed: tuple[Builds, dict[str, BuildReply]]) -> None:
    builds, replies = mixed
    reasons = {
        "noisy": "ValueError: two lines",
        "memory": "more than 2500 MB of memory",
        "crash": "the compiler crashed (SIGSEGV)",
        "no class": "has no Nope",
        "no file": "nope",
        # Jobs of the user go before what compiles.
        "priority": f"ValueError: niceness {min(os.nice(0) + 10, 19)}",
        **dict.fromkeys(("sys.exit", "os._exit", "exit"), "the compiler called exit(7)"),
    }
    for name, reason in reasons.items():
        assert reason in replies[name].reason
        assert (replies[name].ok, replies[name].infra) == (False, False), name
    assert "raise build.memory_mb" in replies["memory"].reason
    assert "Traceback" in Path(builds.request("noisy").log).read_text()
    assert builds.started.count(replies["os._exit"].key) == 1
    assert left(builds.cache.root) == []


@pytest.mark.whole
def test_a_builder_that_is_killed_is_the_farms_fault_after_a_second_try_alone(builds: Builds) -> None:
    marks = builds.scratch / "marks"
    marks.mkdir()
    starves = builds.request("starves", str(marks))
    reply, *others = builds.run(starves, *(builds.request("is_busy", str(marks), number) for number in range(4)))
    assert reply.infra
    assert "killed (signal 9), most likely as the machine ran out of memory" in reply.reason
    assert builds.cache.lookup(starves.key) is None
    assert [mark.read_text() for mark in sorted(marks.glob("starved-*"))] == ["1", "0"]
    assert [other.reason for other in others] == ["ValueError: done"] * 4


@pytest.mark.whole
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(MemoryLimits(8192, 800), id="a builder that has grown is replaced before the next job"),
        pytest.param(MemoryLimits(1300, 4096), id="a job is not to blame for what others left in its builder"),
    ],
)
def test_a_job_runs_in_another_builder_where_the_first_has_too_little_memory(
    builds: Builds, limits: MemoryLimits
) -> None:
    requests = [builds.request("leaves_700_mb", number) for number in range(2)]
    first, second = (reply.reason for reply in builds.run(*requests, width=1, limits=limits))
    assert "process" in first
    assert "process" in second
    assert first != second


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

    monkeypatch.setattr("farm.base.machine.resident_bytes", resident_bytes)
    replies = builds.run(*(builds.request("tells", number, str(mark)) for number in range(4)), width=1)
    assert [reply.reason for reply in replies] == [f"ValueError: number {number}" for number in range(4)]


def test_several_builders_are_forks_of_one_process_and_a_single_builder_is_none(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_KNOWN", "with its environment")
    requests = [builds.request("tells_parent", number) for number in range(2)]
    expected = f"ValueError: fork of {TEMPLATE_NAME} with 1 thread, with its environment"
    assert [reply.reason for reply in builds.run(*requests)] == [expected] * 2
    # The process that they are forks of does not start.
    monkeypatch.setattr("farm.builds.compile.processes._MODULE", "farm.no_module")
    for reply in (*builds.run(requests[0]), *builds.run(*requests)):
        assert TEMPLATE_NAME not in reply.reason
        assert "with its environment" in reply.reason


def test_builders_whose_request_no_fork_server_takes_start_by_themselves(
    builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*_: object, **__: object) -> None:
        raise OSError(errno.EMSGSIZE, "Message too long: an environment of 200 kB")

    monkeypatch.setattr("farm.builds.compile.processes.BuilderTemplate.acquire", lambda *_: popen)
    monkeypatch.setenv("FARM_KNOWN", "with its environment")
    for reply in builds.run(*(builds.request("tells_parent", number) for number in range(2))):
        assert "with its environment" in reply.reason


def test_jobs_are_compiled_again_after_the_process_that_builders_are_forks_of_was_killed(builds: Builds) -> None:
    mark = builds.scratch / "mark"

    def kill(supervisor: Supervisor, _: BuilderPool) -> None:
        until(lambda: [*builds.scratch.glob("mark.*")], "a job in progress")
        template = supervisor.find(TEMPLATE_NAME)
        os.kill(template.pid, signal.SIGKILL)
        template.process.wait()
        mark.touch()

    requests = builds.request("waits_for_mark", str(mark)), builds.request("tells_priority")
    waiting, other = builds.run(*requests, meanwhile=kill)
    assert waiting.reason == "ValueError: done"
    assert len([*builds.scratch.glob("mark.*")]) == 2, "two attempts"
    assert "niceness" in other.reason


def test_a_compiler_that_does_not_finish_fails_in_its_time(builds: Builds) -> None:
    [reply] = builds.run(builds.request("slow"), timeout_s=1.0)
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
    options: dict[str, Any] = {"timeout_s": 5.0} if how == "hang" else {}

    def stop(_supervisor: Supervisor, pool: BuilderPool) -> None:
        until(lambda: [*builds.cache.root.glob("builders/*/*/there")], "a file of the compile")
        assert len(left(builds.cache.root)) == 2, "the folder of the builder, and that of the bundle"
        pool.stop()

    if how == "stop":
        options["meanwhile"] = stop
    replies = builds.run(builds.request("litters", how), **options)
    assert [reply.ok for reply in replies] == [False] * (how != "stop")
    if how == "raise":
        assert replies[0].reason.count(str(builds.cache.root / "builders")) == 2, replies[0].reason
    assert left(builds.cache.root) == []
    assert [*stood.iterdir(), *temporary.iterdir()] == []


def test_a_builder_that_cannot_be_started_is_a_reply_all_the_same(builds: Builds) -> None:
    nowhere = msgspec.structs.replace(builds.tools.compiler, python=str(builds.scratch / "no python"))
    builds.tools = msgspec.structs.replace(builds.tools, compiler=nowhere)
    replies = builds.run(builds.request("slow"), builds.request("torch.nn:ReLU"))
    assert [reply.infra for reply in replies] == [True, True]
    assert "no python" in replies[0].reason


def test_a_cache_that_cannot_be_written_is_the_farms_fault_and_says_why(builds: Builds) -> None:
    builds.cache.root.mkdir()
    (builds.cache.root / "builders").write_text("no folder")
    [reply] = builds.run(builds.request("torch.nn:ReLU"))
    assert (reply.ok, reply.infra) == (False, True)
    assert "builders" in reply.reason
    assert "File exists" in reply.reason or "Not a directory" in reply.reason


# Order in which builders take requests.


def requests(*names: str) -> deque[BuildRequest]:
    """Return requests by texts of case and precision."""
    made = deque[BuildRequest]()
    for name in names:
        case, precision = name.split()
        job = Job(Case("mine", case, module="any", inputs=()), Target("SM8650", "htp", precision))
        made.append(BuildRequest(job, name, {}, "log"))
    return made


def taken(queue: deque[BuildRequest], builders: int) -> list[list[str]]:
    """Return what each of `builders` compiles if all jobs take equally long."""
    own: list[tuple[str, str] | None] = [None] * builders
    lists: list[list[str]] = [[] for _ in own]
    while queue:
        for number in range(min(builders, len(queue))):
            others = [one for place, one in enumerate(own) if one is not None and place != number]
            request = take_next(queue, own[number], others)
            own[number] = case_of(request)
            lists[number].append(request.key)
    return lists


def test_a_builder_stays_with_its_case() -> None:
    queue = requests("add 8a8w", "add 16a8w", "mul 8a8w", "mul 16a8w", "relu 8a8w", "relu 16a8w")
    beside = [["add 8a8w", "add 16a8w", "relu 8a8w"], ["mul 8a8w", "mul 16a8w", "relu 16a8w"]]
    assert taken(queue, 2) == beside
    alone = requests("add 8a8w", "mul 8a8w", "add 16a8w", "mul 16a8w")
    assert taken(alone, 1) == [["add 8a8w", "add 16a8w", "mul 8a8w", "mul 16a8w"]]


def test_a_case_far_behind_does_not_pass_others() -> None:
    queue = requests("add 8a8w", *(f"other{number} 8a8w" for number in range(40)), "add 16a8w")
    [order] = taken(queue, 1)
    assert order.index("add 16a8w") >= 25
    assert len(order) == 42
