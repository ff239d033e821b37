"""Compilers of a run: replies of builders, `farm run --compile-only`, `--rebuild` and `--watch`."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from farm_home import FarmHome, wait_for_no_process
from in_process import refusal
from log_lines import LogLines
from made import job, write_bundle
from waiting import until

from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.protocol import BuildReply
from farm.builds.program.canonical import program_hash
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.cli.running.run import compiled_lines
from farm.dispatch.request.request import RunPlan
from farm.dispatch.run.compiling import Compilation, CompiledJob, CompileOutcome, Rebuild, _Builds, _Compiling

# How the replies of builders reach the workers that wait for them.


KEY = "a" * 64


def test_a_reply_that_cannot_be_written_is_left_as_soon_as_it_can(tmp_path: Path) -> None:
    plan = RunPlan("run", tmp_path, tmp_path, (), (), {}, tmp_path)
    nothing: Any = None
    builds = _Builds(plan, nothing, nothing, nothing, nothing)
    ending = threading.Thread(target=builds.ended, args=(BuildReply(KEY, ok=True, seconds=1.0),))
    ending.start()
    # The folder does not exist yet, which stands for a disk without room.
    ending.join(0.7)
    assert ending.is_alive()
    (tmp_path / "builds").mkdir()
    until((tmp_path / "builds" / f"{KEY}.json").exists, "the reply")
    ending.join()


# `farm run --compile-only` and `--rebuild` from the command line: no device, no run, and a list of differences.


_SCALED = job("scaled", backend="xnnpack", precision="fp32", suite="mine")
_JOB = _SCALED.id
_TOOLS = Toolchain({"executorch": "1.5.1"}, Compiler("", {}), "")

_LAYERS = """
from pathlib import Path
import torch
class Scaled(torch.nn.Module):
    def __init__(self, path):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(float(Path(path).read_text())))
    def forward(self, x):
        return x * self.weight
class Broken(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("this module is broken")
"""


def _write_suite(folder: Path, scale: Path) -> None:
    folder.mkdir()
    (folder / "layers.py").write_text(_LAYERS)
    (folder / "suite.toml").write_text(f"""
[suite]
name = "mine"
description = "one that compiles, one that does not"

[case]
# The file is no part of what farm knows of the module.
scaled = {{ module = ".layers:Scaled", args = ["{scale}"], inputs = [{{ shape = [4, 8] }}] }}
broken = {{ module = ".layers:Broken", inputs = [{{ shape = [4, 8] }}] }}
""")


def _asked(home: FarmHome, *more: str) -> tuple[int, list[dict[str, Any]], str]:
    done = home.farm("run", "--soc", "SM8650", "--suite", "./mine", "--backend", "xnnpack", "--json", *more)
    return done.returncode, json.loads(done.stdout)["jobs"], done.stderr


def test_its_table_fits_and_cuts_no_title() -> None:
    job = CompiledJob(
        job="quantized_ops/leaky_relu_inplace[SM8650-htp-16a16w]", outcome=CompileOutcome.COMPILED, seconds=12.3,
        folder="f", pte_bytes=123_456, partitions=1, fallback_ops={"aten::add": 2},
    )  # fmt: skip
    for wide, count in ((80, 8), (200, 5)):
        lines = compiled_lines(Compilation(jobs=(job, job)), wide)
        assert (len(lines), max(map(len, lines)) <= wide) == (count, True)
        assert next(line for line in lines if "took" in line).endswith("left to the CPU")
        assert sum(line.endswith("aten::add x2") for line in lines) == 2


def _fill(folder: Path, key: str, program: bytes, reference: bytes = b"r", lost: tuple[str, ...] = ()) -> None:
    contents = {"model.pte": program, "reference_fp32/output_0_0.raw": reference}
    (folder / "model.pte").write_bytes(program)
    facts = {"references": ("fp32",), "program": program_hash(folder / "model.pte"), "lost_writes": lost}
    write_bundle(folder, contents, key=key, job_id=_JOB, backend="xnnpack", precision="fp32", **facts)


@pytest.mark.parametrize(
    ("program", "reference", "says", "counted"),
    [
        (b"old", b"r", "", "1 the same, 0 different"),
        (b"newer", b"r", "another program (bytes 3 -> 5)", "0 the same, 1 different"),
        (b"old", b"s", "other inputs or references (1 of 1 files)", "0 the same, 1 different"),
        (None, b"r", "did not compile again; the cached bundle stays in the cache", "0 the same, 0 different"),
    ],
)
def test_differences_of_a_new_bundle(
    tmp_path: Path, program: bytes | None, reference: bytes, says: str, counted: str
) -> None:
    cache, key, notes = BundleCache(tmp_path), bundle_key(_SCALED, _TOOLS.versions), LogLines()
    cache.build(key, lambda folder: _fill(folder, key, b"old"))
    rebuild = Rebuild(cache, is_wanted=True)
    assert rebuild.find([_SCALED], _TOOLS) == {_JOB: (key, False)}
    if program is not None:
        cache.build(key, lambda folder: _fill(folder, key, program, reference), anew=True)
    text = rebuild.ended(BuildReply(key, ok=program is not None, seconds=1.0))
    assert text.endswith(says)
    assert notes[-1].endswith(f"1 bundle, 1 of them cached before: {counted}")
    assert [note for note in notes[:-1] if says and says in note] == notes[:-1]
    bundle = cache.lookup(key)
    assert bundle is not None
    assert bundle.model.read_bytes() == (program or b"old")


def test_a_program_that_lacks_a_write_fails_as_in_a_run(tmp_path: Path) -> None:
    cache, key = BundleCache(tmp_path), bundle_key(_SCALED, _TOOLS.versions)
    config: Any = SimpleNamespace(cache_dir=tmp_path)
    listener: Any = None
    for lost, outcome in (((), CompileOutcome.CACHED), (("input x",), CompileOutcome.FAILED)):
        cache.build(key, lambda folder, lost=lost: _fill(folder, key, b"new", lost=lost), anew=True)
        found = _Compiling(config, [_SCALED], _TOOLS, listener, tmp_path, False)._outcome(_SCALED)
        assert found.outcome is outcome
        assert ("does not write to its input x" in found.reason) is bool(lost)


def test_its_exit_code_is_that_of_a_run() -> None:
    for outcomes, code in (
        (("compiled", "cached", "known issue"), 0),
        (("compiled", "infra"), 4),
        (("infra", "failed"), 1),
        (("compiled", "not begun"), 4),
    ):
        jobs = tuple(CompiledJob(job=f"s/{one}", outcome=CompileOutcome(one)) for one in outcomes)
        assert Compilation(jobs=jobs).exit_code == code


@pytest.mark.whole
def test_it_compiles_and_stops_and_a_run_with_rebuild_says_what_differs(home: FarmHome, tmp_path: Path) -> None:
    scale = tmp_path / "scale.txt"
    scale.write_text("2.0")
    _write_suite(home.cwd / "mine", scale)
    code, jobs, _ = _asked(home, "--compile-only")
    broken = "mine/broken[SM8650-xnnpack-fp32]"
    assert code == 1
    assert [(job["job"], job["outcome"]) for job in jobs] == [(_JOB, "compiled"), (broken, "failed")]
    assert "this module is broken" in jobs[1]["reason"]
    assert "RuntimeError: this module is broken" in Path(jobs[1]["log"]).read_text()
    # The pages of a nightly run and of a history do not show it.
    assert not home.state.exists()

    again = ("--virtual", "1", "--rebuild", "-k", "scaled")
    for value, answer in (("2.0", "1 the same, 0 different"), ("3.0", "0 the same, 1 different")):
        scale.write_text(value)
        code, [job], notes = _asked(home, *again)
        assert (code, job["attempts"][-1]["verdict"]) == (0, "passed"), notes
        assert answer in notes
    # A failed compile keeps the cached bundle, and reports that.
    scale.write_text("three")
    code, [job], notes = _asked(home, *again)
    assert (code, job["attempts"][-1]["stage"]) == (1, "build")
    assert "did not compile again; the cached bundle stays in the cache" in notes


def test_options_of_a_device_are_refused() -> None:
    for given in (("--device", "pixel"), ("--budget", "30m"), ("--html", "out.html"), ("--collect-only",)):
        said = refusal("run", "--soc", "SM8650", "--suite", "smoke", "--compile-only", *given)
        assert said == (2, f"--compile-only runs nothing on a device: leave {given[0]} out")


# `farm run --watch`: an edit runs the jobs concerned, a mistake is reported, Ctrl-C ends it with nothing left.


RUN = ("run", "--soc", "SM8650", "--backend", "xnnpack", "--virtual", "1", "--suite", "./mine", "--watch")
SUITE = """
[suite]
name = "mine"
description = "two jobs"
precisions = ["fp32"]
"""
CASE = """
[case.{name}]
module = "torch.nn:Hardtanh"
kwargs = {{ min_val = -{limit}, max_val = {limit} }}
inputs = [{{ shape = [1, 8] }}]
"""
WAITING = "waiting for a change"


class Lines(threading.Thread):
    """Output of a process while it runs."""

    def __init__(self, pipe: IO[str]) -> None:
        super().__init__(daemon=True)
        self._pipe, self.text = pipe, ""
        self.start()

    def run(self) -> None:
        for line in self._pipe:
            self.text += line

    def wait_for(self, words: str, times: int) -> str:
        until(lambda: self.text.count(words) >= times, lambda: f"{words}: {self.text}", 240)
        return self.text


def write(home: FarmHome, **limits: float) -> None:
    folder = home.cwd / "mine"
    folder.mkdir(exist_ok=True)
    cases = "".join(CASE.format(name=name, limit=limit) for name, limit in limits.items())
    (folder / "suite.toml").write_text(SUITE + cases)


@pytest.mark.whole
def test_an_edit_runs_what_it_concerns_and_ctrl_c_ends_it(home: FarmHome) -> None:
    write(home, one=1.25, two=2.25)
    with home.running(*RUN) as process:
        assert process.stdout is not None
        lines = Lines(process.stdout)
        assert "2 passed" in lines.wait_for(WAITING, 1)
        write(home, one=1.25, two=2.75)
        text = lines.wait_for(WAITING, 2)
        assert "changed: suite.toml" in text
        assert "1 of 2 jobs are concerned, 1 bundles to compile: mine/two[" in text
        assert "1 passed" in text
        # An invalid suite is reported, and the command waits for the next change.
        (home.cwd / "mine" / "suite.toml").write_text("[suite")
        assert "suite.toml" in lines.wait_for(WAITING, 3).split(WAITING)[2]
        write(home, one=1.25, two=2.75)
        assert "none of 2 jobs is concerned" in lines.wait_for(WAITING, 4)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) == 0
        assert "Traceback" not in lines.text
    assert wait_for_no_process(home) == {}


def test_json_is_refused() -> None:
    assert refusal(*RUN, "--json") == (2, "--watch runs changed jobs until Ctrl-C: leave --json out")
