"""Programs that are the same are known to be, and others are not: real ones, compiled in turns by one process."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import equal_programs
import msgspec
import pytest
import warm_torch
from builder_runs import request_of, run_builders
from made import manifest
from test_bench import DOCUMENTED

from farm.base.socs import find_soc
from farm.builds.bundles.bundle import MANIFEST, Bundle, Generation, TensorSpec, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.same import compare_hashes, data_hash, differences, program_of
from farm.builds.compile.pool import MemoryLimits
from farm.builds.program.canonical import program_hash
from farm.builds.program.pte import qnn_payloads
from farm.builds.toolchains.toolchain import Toolchain
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.suite import plan

VARIANTS = Path(__file__).with_name("variants.py")
MAGIC = (0x5678ABCD).to_bytes(4, "little")
TIME = range(4, 12)


@pytest.fixture(scope="session")
def programs(filled_by: Callable[[Path], Path]) -> dict[str, bytes]:
    """The `.pte` files of variants.py, by name."""
    return {path.stem: path.read_bytes() for path in filled_by(VARIANTS).glob("*.pte")}


def differing(one: bytes, other: bytes) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("name", "again"), [("first", "again"), ("split", "split_again")])
def test_compiled_again_after_others_it_is_the_same_program(programs: dict[str, bytes], name: str, again: str) -> None:
    one, other = programs[name], programs[again]
    payloads = qnn_payloads(one)
    # A program of two partitions has two contexts.
    assert len(payloads) == (2 if name == "split" else 1)
    assert all(one[start:].startswith(MAGIC) for start, _ in payloads)
    # Not its time alone.
    assert differing(one, other) > 8 * len(payloads) + 10
    assert program_hash(one) == program_hash(other) != hashlib.sha256(one).hexdigest()


@pytest.mark.parametrize("name", ["weight", "scale", "order"])
def test_changed_in_one_respect_it_is_another_program(programs: dict[str, bytes], name: str) -> None:
    assert len({program_hash(programs[one]) for one in ("first", "again", name)}) == 2


def test_every_byte_but_those_of_the_time_counts(programs: dict[str, bytes]) -> None:
    program = programs["first"]
    [(start, _)] = qnn_payloads(program)
    expected, draw = program_hash(program), random.Random(17)
    used = [place for place, byte in enumerate(program) if byte]
    for place in (*draw.sample(used, 200), *draw.sample(range(len(program)), 40), *(start + n for n in TIME)):
        changed = bytearray(program)
        changed[place] ^= 1 << draw.randrange(8)
        same = program_hash(bytes(changed)) == expected
        assert same is (place - start in TIME), f"byte {place - start} of the context"


def test_ids_that_are_connected_otherwise_are_another_program(programs: dict[str, bytes]) -> None:
    """Ids that moved together make no difference; an id that stayed behind does."""
    one, other = programs["first"], programs["again"]
    [(start, _)] = qnn_payloads(one)
    expected = program_hash(one)
    places = [n for n in range(0, len(one), 4) if one[n : n + 4] != other[n : n + 4] and n - start not in (4, 8)]
    assert len(places) > 10
    for place in places:
        mixed = one[:place] + other[place : place + 4] + one[place + 4 :]
        assert program_hash(mixed) != expected, f"word at {place - start} of the context"


def test_what_is_not_laid_out_as_known_is_hashed_as_it_is(programs: dict[str, bytes]) -> None:
    program = programs["first"]
    [(start, end)] = qnn_payloads(program)
    # ExecuTorch's magic number, the versions of the context and of HTP's part, the number of nodes.
    version = start + 256 + 4
    blob = start + 256 + int.from_bytes(program[start + 256 + 24 : start + 256 + 32], "little")
    nodes = program.index((0x1303EE71).to_bytes(4, "little"), start, end)
    for place in (start, version + 3, blob, blob + 16, nodes, nodes - 12):
        changed = bytearray(program)
        changed[place] ^= 0x40
        assert program_hash(bytes(changed)) == hashlib.sha256(changed).hexdigest(), place - start
        # The time changes as well.
        changed[start + 4] ^= 1
        assert program_hash(bytes(changed)) == hashlib.sha256(changed).hexdigest(), place - start


def test_what_is_cut_short_or_no_program_is_hashed_as_it_is(programs: dict[str, bytes], tmp_path: Path) -> None:
    program = programs["first"]
    draw = random.Random(17)
    for length in (0, 3, 8, 40, *(draw.randrange(len(program)) for _ in range(20))):
        cut = program[:length]
        assert program_hash(cut) == hashlib.sha256(cut).hexdigest(), length
    for _ in range(20):
        noise = bytearray(program)
        place = draw.randrange(len(program) - 64)
        noise[place : place + 64] = draw.randbytes(64)
        assert len(program_hash(bytes(noise))) == 64
    (tmp_path / "model.pte").write_bytes(program)
    assert program_hash(tmp_path / "model.pte") == program_hash(program)


def bundle(folder: Path, program: bytes, *, recorded: bool = True, **changes: object) -> Bundle:
    folder.mkdir(parents=True)
    (folder / "model.pte").write_bytes(program)
    facts: dict[str, object] = {
        "inputs": (TensorSpec((1, 3), "float32"),), "outputs": (TensorSpec((1, 3), "float32", 0.5),),
        "files": {"model.pte": "f", "inputs/input_0_0.raw": "a", "reference_fp32/output_0_0.raw": "b"},
        "program": program_hash(program) if recorded else "", "pte_bytes": len(program), **changes,
    }  # fmt: skip
    (folder / MANIFEST).write_bytes(msgspec.json.encode(manifest(key=folder.name, **facts)))
    return load_bundle(folder)


def compared(first: Bundle, second: Bundle) -> tuple[str, ...]:
    return differences(first.manifest, program_of(first), second)


def test_a_job_is_the_same_where_it_would_be_judged_the_same(programs: dict[str, bytes], tmp_path: Path) -> None:
    mine = bundle(tmp_path / "mine", programs["first"])
    again = bundle(tmp_path / "again", programs["again"])
    assert not compared(mine, again)
    assert compared(mine, bundle(tmp_path / "weight", programs["weight"]))
    judged_otherwise: list[dict[str, object]] = [
        {"files": {**mine.manifest.files, "reference_fp32/output_0_0.raw": "other"}},
        {"files": {**mine.manifest.files, "inputs/input_0_0.raw": "other"}},
        {"outputs": (TensorSpec((1, 3), "float32", 0.25),)},
        {"samples": 2},
        {"lost_writes": ("input x",)},
        {"generation": Generation("kv", context=8, prefill=0, decode=1, layers=1, vocabulary=4, cache_bits=8, new=2)},
    ]
    for number, change in enumerate(judged_otherwise):
        other = bundle(tmp_path / str(number), programs["again"], **change)
        assert program_of(other) == program_of(mine)
        assert compared(mine, other), change
    # A bundle from before has its program hashed when it is asked for.
    old = bundle(tmp_path / "old", programs["first"], recorded=False)
    assert (old.manifest.program, program_of(old)) == ("", program_of(mine))
    # Place and time of the compile make no difference.
    late = msgspec.structs.replace(
        mine.manifest, seconds={"total": 9.0}, files={**mine.manifest.files, "model.pte": "x"}
    )
    assert data_hash(late) == data_hash(mine.manifest)


def test_two_sides_are_compared_job_by_job(programs: dict[str, bytes], tmp_path: Path) -> None:
    first, again, weight = (bundle(tmp_path / name, programs[name]) for name in ("first", "again", "weight"))
    one, same, other = map(program_of, (first, again, weight))
    found = compare_hashes(
        {"a": one, "b": one, "gone": one, "broken": one, "red": "", "fixed": ""},
        {"a": same, "b": other, "new": one, "broken": "", "red": "", "fixed": same},
    )
    assert (found.same, found.changed) == (("a",), ("b",))
    assert (found.newly_failing, found.newly_compiling, found.failing) == (("broken",), ("fixed",), ("red",))
    assert (found.only_first, found.only_second) == (("gone",), ("new",))
    assert str(found) == (
        "1 of 2 programs are the same, 1 newly failing, 1 newly compiling, 1 failing, 1 only first, 1 only second"
    )
    nothing = compare_hashes({"a": "x", "b": "y", "red": ""}, {"a": "x", "b": "y", "red": ""})
    assert str(nothing) == "no program of 2 jobs has changed, 1 failing"


@pytest.mark.whole
def test_builders_that_had_other_jobs_before_make_the_same_of_a_job(tools: Toolchain, tmp_path: Path) -> None:
    suites = find_suites(())
    jobs = [
        job
        for soc in ("SM8350", "SM8550", "SM8850")
        for job in plan([resolve_suite("smoke", suites)], [find_soc(soc)], "htp", (), ((),))
        if job.case.name in ("conv2d", "softmax")
    ]
    # The program has gaps between its weights, which must not hold old content of the memory.
    operators = plan([resolve_suite("quantized_ops", suites)], [find_soc("SM8650")], "htp", ("8a8w",), ((),))
    jobs += [job for job in operators if job.case.name in ("conv2d_dilated", "conv2d_depthwise", "conv1d")]
    sides = []
    for name, order in (("one", jobs), ("other", jobs[::-1])):
        cache = BundleCache(tmp_path / name)
        requests = [request_of(job, tools.versions, tmp_path) for job in order]
        replies = run_builders(requests, tools.compiler, cache.root, tmp_path, limits=MemoryLimits(16_000, 16_000))
        assert [reply.reason for reply in replies if not reply.ok] == []
        sides.append({one.job.id: found for one in requests if (found := cache.lookup(one.key))})
    found = compare_hashes(*({job: program_of(one) for job, one in side.items()} for side in sides))
    assert found.changed == ()
    assert len(found.same) == len(jobs)
    # References do not depend on earlier compiles either.
    assert [job.id for job in jobs if compared(sides[0][job.id], sides[1][job.id])] == []


# Programs that are compiled with shortcuts equal programs that are compiled without.


# A small sample, as shortcuts change seldom: bench/equal_programs.py compares whole suites after such a change.
SEED = int(os.environ.get("FARM_SAMPLE_SEED", "739948"))


@pytest.mark.parametrize(
    ("suites", "count"),
    [
        (["quantized_ops", "fp_ops"], 3),
        pytest.param(["models_small"], 1, marks=pytest.mark.whole),
        pytest.param(["llm_tiny"], 1, marks=pytest.mark.soak),
    ],
)
def test_programs_and_references_are_equal_with_and_without_shortcuts(
    suites: list[str], count: int, farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def run_warm(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        warm_torch.run_script(Path(words[1]), *words[2:], cache=farm_cache, folder=tmp_path)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(equal_programs, "subprocess", SimpleNamespace(run=run_warm))
    drawn = ("--sample", str(count), "--seed", str(SEED), "--kept", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["equal_programs.py", *suites, *drawn])
    equal_programs.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == DOCUMENTED["equal_programs.py"]
    assert found["jobs"] == count
    # The hash of a program with blocks of weights differs from one compilation to the next, without shortcuts as well.
    assert [job for job in found["different"] if "_block" not in job] == [], f"FARM_SAMPLE_SEED={SEED}"


# Versions of the code that a compiler process imports, which decide about shortcuts. torch is a stub.


SAY = "import json\nfrom farm.builds.compile.flows.shortcuts.tried import installed\nprint(json.dumps(installed()))"


def versions(folder: Path) -> dict[str, str]:
    (folder / "torch.py").write_text("__version__ = '2.13.0'")
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", SAY], env=env, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_an_installed_package_has_its_version(tmp_path: Path) -> None:
    expected = {name: importlib.metadata.version(name) for name in ("executorch", "torchao")}
    assert versions(tmp_path) == {**expected, "torch": "2.13.0"}


def test_a_checkout_has_not_the_version_of_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "executorch" / "exir").mkdir(parents=True)
    assert versions(tmp_path)["executorch"] == ""


def test_a_link_to_the_installed_package_has_its_version(tmp_path: Path) -> None:
    package = importlib.metadata.distribution("executorch").locate_file("executorch")
    (tmp_path / "executorch").symlink_to(str(package))
    assert versions(tmp_path)["executorch"] == importlib.metadata.version("executorch")
