"""`farm run --compile-only` and `--rebuild` from the command line: no device, no run, and a list of differences."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome
from log_lines import LogLines

from farm.base.hashes import sha256_of
from farm.builds.bundles.bundle import MANIFEST, Manifest, TensorSpec
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.builds.compile.protocol import BuildReply
from farm.builds.program.canonical import program_hash
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.cli.running.compile_only import compiled_lines
from farm.dispatch.run.compile_only import Compilation, CompiledJob, CompileOutcome
from farm.dispatch.run.rebuild import Rebuild
from farm.suites.suite import Case, InputSpec, Job, Target

_JOB = "mine/scaled[SM8650-xnnpack-fp32]"

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

[case.scaled]
module = ".layers:Scaled"
args = ["{scale}"]   # the file is no part of what farm knows of the module
inputs = [{{ shape = [4, 8] }}]

[case.broken]
module = ".layers:Broken"
inputs = [{{ shape = [4, 8] }}]
""")


def _asked(home: FarmHome, *more: str) -> tuple[int, list[dict[str, Any]], str]:
    done = home.farm("run", "--soc", "SM8650", "--suite", "./mine", "--backend", "xnnpack", "--json", *more)
    return done.returncode, json.loads(done.stdout)["jobs"], done.stderr


@pytest.mark.parametrize("wide", [80, 200])
def test_its_table_fits_and_cuts_no_title(wide: int) -> None:
    job = CompiledJob(
        job="quantized_ops/leaky_relu_inplace[SM8650-htp-16a16w]", outcome=CompileOutcome.COMPILED, seconds=12.3,
        folder="f", pte_bytes=123_456, partitions=1, fallback_ops={"aten::add": 2},
    )  # fmt: skip
    lines = compiled_lines(Compilation(jobs=(job, job)), wide)
    assert max(map(len, lines)) <= wide
    titles = next(line for line in lines if "took" in line)
    assert titles.endswith("left to the CPU")
    assert (len(lines), titles.startswith("job")) == ((8, False) if wide == 80 else (5, True))
    assert sum(line.endswith("aten::add x2") for line in lines) == 2


@dataclass(frozen=True)
class Compiled:
    """A suite whose jobs were compiled once by `--compile-only`."""

    home: FarmHome
    scale: Path
    """File with the number that the program of `scaled` multiplies by."""
    code: int
    jobs: list[dict[str, Any]]
    made_state: bool
    """The command left a state folder."""


@pytest.fixture(scope="module")
def compiled(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp("compile-only")
    home, scale = FarmHome.make(farm_cache, folder), folder / "scale.txt"
    scale.write_text("2.0")
    _write_suite(home.cwd / "mine", scale)
    code, jobs, _ = _asked(home, "--compile-only")
    return Compiled(home, scale, code, jobs, home.state.exists())


@pytest.mark.whole
def test_it_compiles_and_stops(compiled: Compiled) -> None:
    jobs = compiled.jobs
    assert compiled.code == 1
    assert [(job["job"], job["outcome"]) for job in jobs] == [
        (_JOB, "compiled"),
        ("mine/broken[SM8650-xnnpack-fp32]", "failed"),
    ]
    assert "this module is broken" in jobs[1]["reason"]
    with open(jobs[1]["log"]) as log:
        assert "RuntimeError: this module is broken" in log.read()
    # The pages of a nightly run and of a history do not show it.
    assert not compiled.made_state


@pytest.mark.whole
def test_a_bundle_that_is_compiled_again_is_compared_with_the_cached_one(compiled: Compiled) -> None:
    compiled.scale.write_text(str(float(compiled.scale.read_text()) + 1))
    code, [job], notes = _asked(compiled.home, "--compile-only", "--rebuild", "-k", "scaled")
    assert (code, job["outcome"]) == (0, "compiled")
    assert job["folder"] == compiled.jobs[0]["folder"]
    assert (
        "it differs from the cached bundle: another program; other inputs or references (1 of 2 files)" in job["reason"]
    )
    assert f"{_JOB}: compiled again, it differs" in notes
    assert "1 bundle, 1 of them cached before: 0 the same, 1 different" in notes


def _fill(folder: Path, key: str, program: bytes, reference: bytes = b"r") -> None:
    (folder / "reference_fp32").mkdir()
    files = {"model.pte": program, "reference_fp32/output_0_0.raw": reference}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    tensors = (TensorSpec((1,), "int8"),)
    manifest = Manifest(
        key=key, job_id=_JOB, soc="SM8650", backend="xnnpack", precision="fp32", samples=1, inputs=tensors,
        outputs=tensors, pte_bytes=len(program), delegates={"XnnpackBackend": 1}, delegated_ops=1, fallback_ops={},
        seconds={}, versions={}, files={name: sha256_of(folder / name) for name in files}, references=("fp32",),
        program=program_hash(folder / "model.pte"),
    )  # fmt: skip
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest))


@pytest.mark.parametrize(
    ("program", "reference", "says", "counted"),
    [
        (b"old", b"r", "", "1 the same, 0 different"),
        (b"newer", b"r", "another program (bytes 3 -> 5)", "0 the same, 1 different"),
        (b"old", b"s", "other inputs or references (1 of 1 files)", "0 the same, 1 different"),
        (None, b"r", "did not compile again; the cached bundle stays in the cache", "0 the same, 0 different"),
    ],
)
def test_how_a_new_bundle_differs_from_the_cached_one(
    tmp_path: Path, program: bytes | None, reference: bytes, says: str, counted: str
) -> None:
    case = Case(suite="mine", name="scaled", module="torch.nn:ReLU", inputs=(InputSpec((1,)),))
    job, cache, notes = Job(case, Target("SM8650", "xnnpack", "fp32")), BundleCache(tmp_path), LogLines()
    tools = Toolchain({"executorch": "1.5.1"}, Compiler("", {}), "")
    key = bundle_key(job, tools.versions)
    cache.build(key, lambda folder: _fill(folder, key, b"old"))
    rebuild = Rebuild(cache)
    assert rebuild.find([job], tools) == {job.id: (key, False)}
    if program is not None:
        cache.build(key, lambda folder: _fill(folder, key, program, reference), anew=True)
    text = rebuild.ended(BuildReply(key, ok=program is not None, seconds=1.0))
    assert text.endswith(says)
    assert notes[-1].endswith(f"1 bundle, 1 of them cached before: {counted}")
    assert [note for note in notes[:-1] if says and says in note] == notes[:-1]
    bundle = cache.lookup(key)
    assert bundle is not None
    assert bundle.model.read_bytes() == (program or b"old")


@pytest.mark.whole
def test_a_run_with_rebuild_runs_what_it_compiled_and_says_what_differs(compiled: Compiled) -> None:
    home, scale = compiled.home, compiled.scale
    same, other = scale.read_text(), str(float(scale.read_text()) + 1)
    for value, answer in ((same, "1 the same, 0 different"), (other, "0 the same, 1 different")):
        scale.write_text(value)
        code, [job], notes = _asked(home, "--virtual", "1", "--rebuild", "-k", "scaled")
        assert code == 0, notes
        assert job["attempts"][-1]["verdict"] == "passed"
        assert answer in notes
    # A failed compile keeps the cached bundle, and reports that.
    scale.write_text("three")
    code, [job], notes = _asked(home, "--virtual", "1", "--rebuild", "-k", "scaled")
    # The cache still has the program of the last number.
    scale.write_text(other)
    assert (code, job["attempts"][-1]["stage"]) == (1, "build")
    assert "did not compile again; the cached bundle stays in the cache" in notes


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (("--device", "pixel"), "--device"),
        (("--budget", "30m"), "--budget"),
        (("--html", "out.html"), "--html"),
        (("--collect-only",), "--collect-only"),
    ],
)
def test_what_only_a_device_could_do_is_refused(home: FarmHome, given: tuple[str, ...], refused: str) -> None:
    done = home.farm("run", "--soc", "SM8650", "--suite", "smoke", "--compile-only", *given, code=2)
    assert done.stderr == f"farm: --compile-only runs nothing on a device: leave {refused} out\n"
