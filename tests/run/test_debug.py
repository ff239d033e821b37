"""`farm debug` as a user calls it: real compiler, real simulator behind a virtual device, real store."""

from __future__ import annotations

import csv
import json
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from attached import attach
from farm_home import FarmHome, processes_of, wait_for_no_process
from warm_torch import run_script
from wrong_operator import SUITE, write_wrong_suite

from farm.base.config.settings import load_config
from farm.base.errors import UnknownNameError, UsageError
from farm.builds.compile.debug.protocol import DebugReply
from farm.builds.program.layers import Gap, Layer, LayerStep
from farm.dispatch.request.records import leave_intent
from farm.replay.debug import DebugOutcome, DebugRequest, debug, job_to_debug, verdict_of
from farm.replay.stored_result import find_recorded_job
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.artifacts import ArtifactStore
from farm.store.records import RunRecord, RunView
from farm.store.store import open_store


@pytest.fixture
def home(home: FarmHome, tmp_path: Path) -> FarmHome:
    """Home with all shared caches, and its own folder of virtual devices, as other tests start these as well."""
    return home.without(folder=tmp_path / "cache")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_wrong_suite(tmp_path / "wrong")


def test_a_suite_that_was_run_by_its_path_is_known_by_its_name_as_to_repro_and_profile(suite: Path) -> None:
    config, name = load_config(folder=suite.parent), "wrong/broken[SM8650-htp-8a8w]"
    with pytest.raises(UnknownNameError, match="unknown suite 'wrong'"):
        job_to_debug(config, name)
    config.state_dir.mkdir(parents=True)
    job = job_to_debug(config, f"{suite}/broken[SM8650-htp-8a8w]")
    with open_store(config.store_url) as store:
        run_id = store.begin_run(RunRecord("farm run --suite ./wrong", "ada", "bench", {}))
        leave_intent(config.run_folder(run_id), None, [job])
        store.plan_jobs(run_id, [job])
        store.record_attempt(run_id, Attempt(job.id, Verdict.FAILED, Stage.NUMERICS, "sqnr", bundle_key="b" * 64))
        for named in (name, "wrong/broken", "./wrong/broken", f"{suite}/broken"):
            assert find_recorded_job(store, named, None, "shown")[1].id == name
    assert job_to_debug(config, name) == job
    # The SoC comes from the results of the case.
    assert job_to_debug(config, "wrong/broken") == job_to_debug(config, f"{suite}/broken") == job
    other = msgspec.structs.replace(job, target=msgspec.structs.replace(job.target, soc="SM8750"))
    with open_store(config.store_url) as store:
        store.plan_jobs(run_id, [other])
    with pytest.raises(UsageError, match="has no target, and there are results on SM8650, SM8750: name the SoC with"):
        job_to_debug(config, "wrong/broken")
    # The definition of today counts, and a deleted suite is unknown.
    (suite / "suite.toml").write_text(SUITE.replace("4, 4]", "8, 8]"))
    assert job_to_debug(config, name).case.inputs[0].shape == (1, 3, 8, 8)
    (suite / "suite.toml").unlink()
    with pytest.raises(UnknownNameError, match="unknown suite 'wrong'"):
        job_to_debug(config, name)


def test_what_it_would_compile_otherwise_than_farm_run_is_refused(suite: Path) -> None:
    with (suite / "suite.toml").open("a") as file:
        file.write("features = { skip_node_ops = ['aten.relu.default'] }\n")
    with pytest.raises(UsageError, match="compiles without features, and wrong/broken has skip_node_ops"):
        job_to_debug(load_config(folder=suite.parent), f"{suite}/broken[SM8650-htp-8a8w]")


def test_one_method_of_a_program_is_debugged_with_what_it_takes(tmp_path: Path) -> None:
    config = load_config(folder=tmp_path)
    name = "features/methods_inputs[SM8650-htp-8a8w]"
    own = job_to_debug(config, name).case
    assert (own.method, own.methods, own.inputs[0].shape) == ("down", {}, (1, 16, 256))
    other = job_to_debug(config, name, method="forward").case
    assert (other.method, other.methods, other.inputs[0].shape) == ("forward", {}, (1, 16, 64))
    with pytest.raises(UnknownNameError, match="unknown method 'up': known are down, forward of features"):
        job_to_debug(config, name, method="up")
    # Features that change no layer of the method are left out, as a single method shares nothing with others.
    assert not job_to_debug(config, "features/weight_sharing[SM8650-htp-8a8w]").case.features.named


@pytest.mark.whole
def test_the_layers_of_a_method_are_compared(home: FarmHome) -> None:
    output = home.json("debug", "features/methods_inputs[SM8650-htp-8a8w]", "--virtual", timeout_s=300)
    operators = {layer["operator"] for layer in output["layers"]}
    assert any("relu" in one for one in operators), "of down alone, which ends in one"
    assert "farm debug: compiled to keep every tensor, the method down alone" in output["notes"]


@pytest.mark.whole
def test_a_broken_layer_is_named_with_its_cause_everywhere(home: FarmHome, suite: Path) -> None:
    table = home.cwd / "layers.csv"
    asked = ("--virtual", "--csv-file", str(table))
    done = home.farm("debug", f"{suite}/broken[SM8650-htp-8a8w]", *asked, timeout_s=300, code=1)
    lines = done.stdout.splitlines()
    assert "first divergence: aten_convolution_default_1 (aten.convolution.default)" in lines
    assert any(line.startswith("likely cause: compiler (SQNR ") for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("> ")] == ["aten_convolution_default_1"]
    assert "device: not requested; only the simulator ran" in lines
    assert max(map(len, lines[:-1])) <= 80
    rows = {row["layer"]: row for row in csv.DictReader(table.open())}
    assert [name for name, row in rows.items() if row["compiler_diverges"] == "True"] == ["aten_convolution_default_1"]
    assert 5 < float(rows["aten_convolution_default_1"]["compiler_sqnr_db"]) < 15
    assert float(rows["aten_relu_default"]["compiler_sqnr_db"]) > 30
    assert {row["device_mse"] for row in rows.values()} == {""}

    with open_store(f"sqlite:///{home.state / 'farm.db'}", readonly=True) as store:
        view = store.runs.view(store.runs.resolve("latest", unbegun=True))
    assert (view.exit_code, view.command.split()[:2]) == (1, ["farm", "debug"])
    [job] = view.jobs
    [attempt] = job.attempts
    assert (job.id, attempt.verdict) == ("wrong/broken[SM8650-htp-8a8w]", Verdict.FAILED)
    assert "aten_convolution_default_1" in attempt.reason
    [marked] = [row for row in attempt.layers if row.diverges]
    assert (marked.layer, marked.step) == ("aten_convolution_default_1", LayerStep.COMPILER)
    kept = home.json("show", "wrong/broken")["files"]
    files = {file["kind"]: Path(file["path"]) for file in kept}
    assert files.keys() == {"etrecord", "simulator-etdump", "simulator-outputs", "layers.csv"}
    assert files["layers.csv"].read_text() == table.read_text()
    assert "aten_convolution_default_1" in (home.state / "runs" / view.id / "report.html").read_text()
    assert not list((home.cache / "virtual").glob("debug-*"))


@pytest.mark.whole
def test_an_attached_device_is_a_third_way_to_compute_every_layer(
    suite: Path, home: FarmHome, farm_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attached device is a virtual one, which computes the same values as the simulator."""
    with attach(home, tmp_path / "bench", ["SM8650"]) as attached:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(attached.port))
        job = job_to_debug(load_config(), f"{suite}/broken[SM8650-htp-8a8w]")
        outcome = debug(load_config(), DebugRequest(job=job, virtual=False))
    assert outcome.devices == {"simulator": "virtual-SM8650-0", "device": "virtual-SM8650-0"}
    assert outcome.attempt is not None
    assert outcome.attempt.device == "virtual-SM8650-0"
    rows = {(row.layer, row.step): row for row in outcome.attempt.layers}
    by_step = [{layer for layer, step in rows if step == wanted} for wanted in (LayerStep.COMPILER, LayerStep.DEVICE)]
    assert by_step[0] == by_step[1] != set()
    assert {row.mse for row in outcome.attempt.layers if row.step == LayerStep.DEVICE} == {0.0}
    [marked] = [row for row in outcome.attempt.layers if row.diverges]
    assert (marked.layer, marked.step) == ("aten_convolution_default_1", LayerStep.COMPILER)
    opened = opened_by_upstream(outcome, farm_cache, tmp_path)
    assert opened["simulator"] == opened["device"]
    assert {"aten_convolution_default", "aten_relu_default", "aten_convolution_default_1"} <= set(opened["device"])


OPENS = """
import json, sys
from executorch.devtools import Inspector
found = {}
for part, (etdump, outputs) in json.loads(sys.argv[2]).items():
    graph = "edge_after_transform/forward"
    inspector = Inspector(
        etdump_path=etdump, debug_buffer_path=outputs, etrecord=sys.argv[1], reference_graph_name=graph
    )
    table = inspector.calculate_numeric_gap("MSE", reference_graph=graph)
    found[part] = sorted(name for names in table["aot_ops"] for name in names)
print(json.dumps(found))
"""


def opened_by_upstream(outcome: DebugOutcome, cache: Path, folder: Path) -> dict[str, list[str]]:
    """Return the layers that ExecuTorch's Inspector compares in the artifacts, by part."""
    store = ArtifactStore(load_config().state_dir / "artifacts")
    paths = {kind: str(store.path(sha256)) for kind, sha256 in outcome.files.items()}
    parts = {part: (paths[f"{part}-etdump"], paths[f"{part}-outputs"]) for part in outcome.devices}
    (script := folder / "opens.py").write_text(OPENS)
    answer = run_script(script, paths["etrecord"], json.dumps(parts), cache=cache, folder=folder)
    return dict(json.loads(answer.splitlines()[-1]))


@pytest.mark.whole
def test_ctrl_c_ends_it_all_and_says_so(home: FarmHome, suite: Path) -> None:
    with home.running("debug", f"{suite}/broken[SM8650-htp-8a8w]", "--virtual") as process:
        assert process.stdout is not None
        while "virtual device" not in (line := process.stdout.readline()):
            assert line
        # The compiler process is loading torch at this time.
        assert any("farm.builds.compile.debug.debugger" in command for command in processes_of(home).values())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "interrupted" in process.stdout.read()
    assert wait_for_no_process(home) == {}
    assert not list((home.cache / "virtual").glob("debug-*"))
    with open_store(f"sqlite:///{home.state / 'farm.db'}", readonly=True) as store:
        view = store.runs.view(store.runs.resolve("latest", unbegun=True))
    assert (view.exit_code, view.jobs[0].attempts) == (130, ())


class CompilerStub:
    """Stub of the compiler process: it returns a given reply, and records the time limits."""

    reply = DebugReply(ok=False)

    limits_s: ClassVar[list[float]] = []

    def __init__(self, *_: object) -> None: ...
    def send(self, request: object) -> None: ...

    def receive(self, timeout_s: float) -> DebugReply:
        self.limits_s.append(timeout_s)
        return self.reply


@pytest.fixture
def stubbed(suite: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, RunView]]:
    monkeypatch.setattr("farm.replay.debug.DebugProcess", CompilerStub)
    monkeypatch.setattr(CompilerStub, "limits_s", [])

    def run(reply: DebugReply, until_s: float) -> tuple[int, RunView]:
        monkeypatch.setattr(CompilerStub, "reply", reply)
        config = load_config()
        job = job_to_debug(config, f"{suite}/broken[SM8650-htp-8a8w]")
        output = reply.reason
        try:
            code = debug(config, DebugRequest(job=job, virtual=True, until_s=until_s)).exit_code
        except UsageError as error:
            code, output = error.exit_code, str(error)
        assert reply.reason in output
        with open_store(config.store_url, readonly=True) as store:
            return code, store.runs.view(store.runs.resolve("latest", unbegun=True))

    return run


@pytest.mark.parametrize(
    ("written", "verdict", "text"),
    [
        ((), "failed", "no layer of the device could be compared: the program wrote no intermediate output|a, b"),
        (("a",), "passed", "|b"),
        (("a", "b"), "passed", ""),
    ],
)
def test_a_device_without_layers_does_not_pass(written: tuple[str, ...], verdict: str, text: str) -> None:
    equal = Gap(0.0, math.inf, 1.0)
    layers = [
        Layer(name, "aten.add.Tensor", (), {step: equal for step in LayerStep if step != "device" or name in written})
        for name in ("a", "b")
    ]
    ending = verdict_of(layers, with_device=True)
    reason, _, lacking = text.partition("|")
    notes = (f"not compared, as the device did not write them: {lacking}",) if lacking else ()
    assert (ending.verdict, ending.reason, ending.notes) == (verdict, reason, notes)
    alone = verdict_of(layers, with_device=False)
    assert (alone.verdict, alone.notes) == ("passed", ())


@pytest.mark.parametrize(
    ("reply", "verdict", "code"),
    [
        (DebugReply(ok=False, reason="ValueError: no such shape"), Verdict.FAILED, 1),
        (DebugReply(ok=False, reason="the compiler process ended with signal 9", infra=True), Verdict.INFRA, 4),
        (DebugReply(ok=False, reason="the program has 2 partitions", refused=True), Verdict.SKIPPED, 2),
    ],
    ids=["fails", "killed", "refused"],
)
def test_a_failed_compile_is_recorded(
    stubbed: Callable[..., tuple[int, RunView]], reply: DebugReply, verdict: Verdict, code: int
) -> None:
    # The time limit of the compiler is at most the rest of the whole time.
    until_s, limit_s = (time.monotonic(), 1.0) if reply.infra else (math.inf, load_config().build_timeout_s)
    returned, view = stubbed(reply, until_s)
    [attempt] = view.jobs[0].attempts
    assert (returned, view.exit_code) == (code, code)
    assert (attempt.verdict, attempt.stage, attempt.reason) == (verdict, Stage.BUILD, reply.reason)
    assert CompilerStub.limits_s == [limit_s]
