"""`farm jobs rerun` as a user calls it: the exact bundle, the same device, and both results."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from attached import Attached, attach
from farm_home import FarmHome

from farm.base.config.settings import load_config
from farm.base.errors import UnknownNameError, UsageError
from farm.base.processes import Supervisor
from farm.base.socs import find_soc
from farm.builds.bundles.cache import BundleCache
from farm.builds.runtime.runtime import android_places, device_parts
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.replay.one_off import LlamaProgram, OneOffOutcome, OneOffRequest
from farm.replay.repro import compare_outputs, differences, repro, rows
from farm.replay.stored_result import StoredResult, find_bundle, find_job, find_stored_result, stored_bundle
from farm.results.attempt import Attempt, Comparison, Direction, Measurement, Stage, Verdict
from farm.store.store import Store, open_store
from farm.suites.suite import Features, InputSpec, Job, MethodInputs, OpPackage

JOB = "smoke/conv2d[SM8650-htp-8a8w]"
RUN = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "conv2d")


@pytest.fixture(scope="module")
def home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    """Home for all tests of this module."""
    return FarmHome.make(farm_cache, tmp_path_factory.mktemp("repro"))


@pytest.fixture(scope="module")
def bench(home: FarmHome, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attached]:
    """Virtual devices that are attached as phones are."""
    with attach(home, tmp_path_factory.mktemp("bench"), ["SM8650", "SM8650", "SM8750"]) as attached:
        yield attached


@pytest.fixture(scope="module")
def done(home: FarmHome, bench: Attached) -> FarmHome:
    """Home with a run of a job on the second attached device, and its result run again on a virtual device."""
    bench.farm(*RUN, "--device", bench.devices[1].serial, timeout_s=300, code=0)
    ran = home.farm("jobs", "rerun", "smoke/*", "--json", code=0)
    (home.cwd / "repro.json").write_text(ran.stdout)
    return home


@pytest.fixture(scope="module")
def copied(done: FarmHome) -> Path:
    """Folder written by `farm jobs bundle`."""
    ran = done.farm("jobs", "bundle", JOB, "--to", "it's a bundle", code=0)
    assert ran.stdout.startswith(f"The bundle of {JOB}: run ")
    return done.cwd / "it's a bundle"


@pytest.fixture
def store(done: FarmHome, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Store of that home, used by this process as well."""
    monkeypatch.setenv("FARM_STATE_DIR", str(done.state))
    with open_store(f"sqlite:///{done.state / 'farm.db'}", readonly=True) as store:
        yield store


def test_a_result_is_run_again_from_its_bundle_and_both_are_recorded(done: FarmHome, store: Store) -> None:
    answer = json.loads((done.cwd / "repro.json").read_text())
    assert (answer["job"], answer["then"]["attempt_number"], answer["now"]["exit_code"]) == (JOB, 1, 0)
    assert answer["bundle"] == answer["now"]["attempt"]["bundle_key"] == answer["then"]["attempt"]["bundle_key"]
    figures = {row["name"]: row for row in answer["rows"]}
    assert figures["sqnr_fp32[0]"]["then"] == figures["sqnr_fp32[0]"]["now"] > 20
    assert {"latency", "htp_cycles", "pte_size"} <= figures.keys()
    assert answer["outputs"] == "no past output was kept: compare the figures"
    assert not {"executorch", "qnn", "native_runner", "device_kind"} & answer["differences"].keys()
    now = store.runs.view(answer["now"]["run"])
    assert (now.fingerprint["repro"], [job.id for job in now.jobs]) == (answer["then"]["run"], [JOB])
    assert "give its command again" in done.farm("run", "--resume", now.id, code=2).stderr


def test_it_runs_on_the_same_device_and_shows_both(done: FarmHome, bench: Attached, store: Store) -> None:
    answer = json.loads((done.cwd / "repro.json").read_text())
    then, serial = answer["then"]["run"], bench.devices[1].serial
    again = bench.farm("jobs", "rerun", JOB, "--run", then, "--device", "same", code=0)
    assert f"{JOB}: run {then}, attempt 1 of 1, on {serial} (virtual)" in again.stderr
    lines = again.stdout.splitlines()
    assert lines[:2] == [JOB, f"the same bundle, {answer['bundle'][:12]}"]
    assert ["device", serial, serial] in [line.split() for line in lines]
    assert any(line.startswith("sqnr_fp32[0]") and line.endswith("=") for line in lines)
    assert not any(line.startswith("differs:") for line in lines)
    assert all(len(line) <= 80 for line in lines if not line.startswith("report:"))
    assert [lease.device for lease in store.leases.all() if lease.token] == []


def test_a_result_that_is_not_there_is_told(store: Store) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'smoke/conv2d'"):
        find_stored_result(store, "smoke/conv3d", None)
    with pytest.raises(UnknownNameError, match="unknown run 'nonsense'"):
        find_stored_result(store, "smoke/conv2d", "nonsense")


def measured_with(past: StoredResult, **facts: str) -> StoredResult:
    """Return the result of a phone in a run with other options."""
    run = msgspec.structs.replace(past.run, fingerprint=past.run.fingerprint | facts)
    return msgspec.structs.replace(past, kind="hardware", run=run)


def test_it_measures_as_its_run(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    past, asked = find_stored_result(store, JOB, None), []

    def stub_run_one(_: object, __: object, request: OneOffRequest, ___: object) -> OneOffOutcome:
        asked.append((request.heap, request.seconds))
        return OneOffOutcome(past.run.id, 0, None, "hardware", {}, Path())

    monkeypatch.setattr("farm.replay.repro.run_one", stub_run_one)
    how = {"virtual": False, "device": "", "command": "", "iterations": 1, "warm_up": 0, "timeout_s": 1.0}
    for facts in ({}, {"heap": "measured"}, {"seconds": "20"}):
        repro(load_config(), store, measured_with(past, **facts), **how)
    assert asked == [(False, None), (True, None), (False, 20)]
    assert not caplog.messages
    by = LlamaProgram(program=Path("program"), tokenizer=Path("tokenizer"))
    repro(load_config(), store, measured_with(past, heap="measured", seconds="20"), program=by, **how)
    assert asked[-1] == (False, None)
    assert caplog.messages == [
        f"qnn_llama_runner measures no DSP heap, as run {past.run.id} did: --heap is left out",
        f"qnn_llama_runner does not generate for 20 s, as run {past.run.id} did: --seconds is left out",
    ]


class TestWithoutItsBundle:
    @pytest.fixture
    def past(self, store: Store) -> StoredResult:
        return find_stored_result(store, JOB, None)

    @staticmethod
    def look(past: StoredResult, cache: Path, job: Job | None = None, **versions: str) -> str:
        """Return why no bundle is found for a job with the versions of its run, but for `versions`."""
        config = msgspec.structs.replace(load_config(), cache_dir=cache)
        had = {name: past.run.fingerprint[name] for name in ("executorch", "torch", "torchao", "qnn")}
        tools = Toolchain(had | versions, Compiler("", {}), "")
        with Supervisor() as supervisor, pytest.raises(UsageError) as caught:
            find_bundle(config, past, job or find_job(config, past), tools, supervisor)
        return str(caught.value)

    def test_another_program_in_its_place_is_refused(self, past: StoredResult, farm_cache: Path) -> None:
        assert isinstance(past.view.program, str)
        was = msgspec.structs.replace(past, view=msgspec.structs.replace(past.view, program="0" * 64))
        output = self.look(was, farm_cache)
        assert f"run {past.run.id} executed of {JOB} is gone: its bundle was compiled anew since" in output
        assert f"(000000000000 -> {past.view.program[:12]})" in output
        with pytest.raises(UsageError, match="its bundle was compiled anew since"):
            stored_bundle(load_config(), was, virtual=True)

    def test_another_version_is_named(self, past: StoredResult, tmp_path: Path) -> None:
        output = self.look(past, tmp_path, executorch="9.9")
        assert f"bundle {past.attempt.bundle_key[:12]} of {JOB} is no longer in the cache" in output
        assert f"executorch was {past.run.fingerprint['executorch']} and is 9.9" in output
        assert output.count(" was ") == 1

    def test_changed_code_is_named(self, past: StoredResult, tmp_path: Path) -> None:
        job = find_job(load_config(), past)
        (tmp_path / "layers.py").write_text("changed = True\n")
        case = msgspec.structs.replace(job.case, module=".layers:Net", folder=str(tmp_path))
        output = self.look(past, tmp_path / "cache", msgspec.structs.replace(job, case=case))
        assert re.search(r"the code of .*layers has changed", output)

    def test_a_program_whose_files_are_lost_as_well_is_another(
        self, past: StoredResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = find_job(load_config(), past)
        package = OpPackage("Package", "my_ops.mul3.default", "Mul3", "Provider", "gone.so")
        methods = {"forward": MethodInputs((InputSpec(files=("gone.npy",)),))}
        case = msgspec.structs.replace(job.case, features=Features(op_packages=(package,)), methods=methods)
        planned = msgspec.structs.replace(job, case=case)
        monkeypatch.setattr("farm.replay.stored_result.planned_jobs", lambda _: (planned,))
        assert "the case, or the way farm compiles it, has changed" in self.look(past, tmp_path)

    @pytest.mark.whole
    def test_it_is_built_again_from_the_same_code(self, done: FarmHome, past: StoredResult, tmp_path: Path) -> None:
        home = done.without("bundles", folder=tmp_path / "cache")
        assert BundleCache(home.cache).lookup(past.attempt.bundle_key) is None
        again = home.farm("jobs", "rerun", JOB, timeout_s=300, code=0)
        assert "building it again, from the same code and versions" in again.stderr
        assert "outputs: the same, byte by byte" in again.stdout
        assert BundleCache(home.cache).lookup(past.attempt.bundle_key) is not None


class TestBundleFolder:
    @staticmethod
    def blocks(folder: Path) -> list[str]:
        """Return the README's blocks of shell commands."""
        return [text.partition("```")[0] for text in (folder / "README.md").read_text().split("```sh\n")[1:]]

    def test_it_has_everything_and_overwrites_nothing(self, done: FarmHome, copied: Path) -> None:
        names = {"README.md", "model.pte", "manifest.json", "input_list.txt", "inputs", "build.log"}
        assert {path.name for path in copied.iterdir()} == names | {"reference_fp32", "reference_quantized"}
        cached = BundleCache(done.cache).folder(json.loads((copied / "manifest.json").read_bytes())["key"])
        for name in ("model.pte", "inputs/input_0_0.raw", "reference_fp32/output_0_0.raw"):
            assert (copied / name).read_bytes() == (cached / name).read_bytes()
        again = done.farm("jobs", "bundle", JOB, "--to", copied.name, code=2)
        assert again.stderr == f"farm: {copied.name} is there already: name another folder\n"

    def test_its_readme_runs_it_here_and_compares(self, done: FarmHome, copied: Path, tmp_path: Path) -> None:
        # A copy, as the outputs go beside the bundle's files, and other tests list these.
        folder = shutil.copytree(copied, tmp_path / copied.name)
        run, _, compare, _ = self.blocks(folder)
        for name, words in (("farm", "-m farm.cli.main "), ("python3", "")):
            (tmp_path / name).write_text(f'#!/bin/sh\nexec {shlex.quote(done.interpreter)} {words}"$@"\n')
            (tmp_path / name).chmod(0o755)
        ran = subprocess.run(
            ["sh", "-euc", run + compare], cwd=folder, env=done.env | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        shown = re.findall(r"(\S+) (\S+): SQNR ([\d.]+) dB", ran.stdout)
        assert [one[:2] for one in shown] == [
            ("output_0_0.raw", "reference_fp32"), ("output_0_0.raw", "reference_quantized"),
        ]  # fmt: skip
        assert all(float(sqnr_db) > 30 for _, _, sqnr_db in shown)

    def test_its_readme_pushes_to_a_phone_what_farm_would(self, copied: Path) -> None:
        android = self.blocks(copied)[1]
        subprocess.run(["sh", "-nc", android], check=True)
        [libraries] = [line for line in android.splitlines() if "$BUILD" in line]
        pushed = {Path(word).name for word in shlex.split(libraries)[2:-1]}
        _runner, *parts = device_parts(find_soc("SM8650"), "htp", android_places(load_config()))
        assert pushed == {"qnn_executor_runner", *(part.name for part in parts)}


def attempt(sqnr: float, latency: tuple[float, ...], *more: Measurement) -> Attempt:
    compared = Comparison(0, "fp32", sqnr, 0.99, 0.5, None)
    measured = Measurement("latency", "ns", Direction.LOWER, latency)
    own = Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (sqnr + 1, sqnr))
    return Attempt(JOB, Verdict.PASSED, Stage.DONE, "", comparisons=(compared,), measurements=(measured, own, *more))


def test_figures_of_both_are_side_by_side_and_what_one_lacks_is_none() -> None:
    load = Measurement("load_time", "ns", Direction.LOWER, (7.0,))
    found = {row.name: (row.then, row.now) for row in rows(attempt(20.0, (1, 2, 9)), attempt(math.inf, (5,), load))}
    assert found["sqnr_fp32[0]"] == (20.0, math.inf)
    assert found["latency"] == (2, 5)
    assert found["load_time"] == (None, 7.0)


def test_outputs_and_facts_that_differ_are_named() -> None:
    assert compare_outputs({}, {"a": "1"}) == "no past output was kept: compare the figures"
    assert compare_outputs({"a": "1"}, {}) == "there are no outputs now"
    assert compare_outputs({"a": "1", "b": "2"}, {"a": "1", "b": "2"}) == "all 2 the same, byte by byte"
    assert compare_outputs({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == "1 of 2 differ: b"
    then, now = {"qnn": "2.50", "farm": "1"}, {"qnn": "2.51", "farm": "1", "repro": "x", "profile": "basic"}
    assert differences(then, now) == {"qnn": ("2.50", "2.51"), "profile": ("", "basic")}
