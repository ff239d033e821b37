"""`farm run` and `farm jobs rerun` in direct mode, on a virtual device with a stub of its runner; refusals."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from attached import attach
from farm_home import FarmHome
from log_lines import LogLines

from farm.base.config.settings import load_config
from farm.base.errors import IllegalTargetError, InfraError, UsageError
from farm.builds.bundles.bundle import Bundle, Manifest, TensorSpec
from farm.builds.runtime.runtime import Runtime
from farm.cli.options import executions
from farm.devices.execution.raw import RunnerOptions
from farm.dispatch.device_run.health_check import health_check_jobs
from farm.dispatch.pytest_plugin.bundles import Bundles
from farm.dispatch.pytest_plugin.runner import DeviceProgram, Runner
from farm.dispatch.request.choose import check_ready, jobs_of
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.request import RunRequest
from farm.numbers.regressions.confirm_job import require_bundles
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
from farm.replay.bundle_folder import readme
from farm.replay.debug_job import job_to_debug
from farm.replay.one_off import _require_executions
from farm.replay.one_off_request import OneOffRequest
from farm.replay.ready_program import ReadyRequest, plan_ready
from farm.suites.suite import Target

JOB = "smoke/linear[SM8650-htp-8a8w{}]"
DIRECT = ("--option", "direct_mode=true")
SUITE = ("--soc", "SM8650", "--suite", "smoke", "-k", "linear")


@pytest.fixture(scope="module")
def home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    return FarmHome.make(farm_cache, tmp_path_factory.mktemp("direct"))


@pytest.fixture(scope="module")
def runs(home: FarmHome) -> dict[str, Any]:
    """Results of a job in both modes."""
    found = {}
    for name, options in (("ordinary", ()), ("direct", DIRECT)):
        found[name] = home.json("run", "--virtual", "1", *SUITE, *options, "--iterations", "2", timeout_s=300)
    return found


def shown(home: FarmHome, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(home.farm("show", job, "--json").stdout)["job"]
    return found


@pytest.mark.whole
def test_the_outputs_are_those_of_a_session_and_the_program_is_another(home: FarmHome, runs: dict[str, Any]) -> None:
    assert runs
    ordinary, direct = shown(home, JOB.format("")), shown(home, JOB.format("-direct_mode=true"))
    attempts = [one["attempts"][-1] for one in (ordinary, direct)]
    assert [one["verdict"] for one in attempts] == ["passed", "passed"]
    # The simulator computes both; programs for direct mode have no planned memory for inputs and outputs.
    assert attempts[0]["comparisons"] == attempts[1]["comparisons"]
    assert attempts[0]["bundle_key"] != attempts[1]["bundle_key"]
    assert len(direct["attempts"]) == 1, "nothing is tried again"
    assert "STUB of direct mode, domain 3" in attempts[1]["log"]
    latency = {one["metric"]: one for one in attempts[1]["measurements"]}["latency"]
    assert len(latency["samples"]) == 1, "its runner says a mean alone"


@pytest.mark.whole
def test_it_runs_again_from_its_bundle_and_by_a_script(home: FarmHome, runs: dict[str, Any], tmp_path: Path) -> None:
    assert runs
    job = JOB.format("-direct_mode=true")
    home.farm("jobs", "rerun", job, "--virtual", "--json", code=0)
    refused = home.farm(
        "jobs", "rerun", job, "--script", str(tmp_path / "script"), "--iterations", "3", "--timeout", "9"
    )
    assert refused.returncode == 2, refused.stderr
    assert "executes every sample once, without a limit of time: leave --iterations and --timeout" in refused.stderr
    home.farm("jobs", "rerun", job, "--script", str(tmp_path / "script"), code=0)
    words = (tmp_path / "script/device/run.sh").read_text()
    assert "qnn_executor_direct_runner_stub --model_path" in words
    assert "--domain_id=3" in words
    assert "--iteration" not in words
    assert '--output_folder_path="$here/outputs"' in words
    with attach(home, tmp_path / "bench", ["SM8650"]) as bench:
        ran = subprocess.run(
            **bench.script(tmp_path / "script"), capture_output=True, text=True, timeout=120, check=False
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "STUB of direct mode, domain 3" in ran.stdout + ran.stderr
    ended, output = ran.stdout.splitlines()[-2:]
    assert ended == "exit code 0", "its runner writes no mean"
    assert output.startswith("output_0_0.raw: ")
    assert "No such file" not in ran.stderr


@pytest.mark.whole
def test_a_program_that_is_executed_too_often_is_refused_before_anything_is_recorded(
    home: FarmHome, models: Path
) -> None:
    model = str(models / "conv.pte")
    refused = home.farm("exec", model, "--virtual", *DIRECT, "--iterations", "1000", timeout_s=300, code=2)
    assert "ask for at most 1000, with --iterations and --warm-up together" in refused.stderr
    assert home.farm("show", "exec/conv[SM8650-htp-ready-direct_mode=true]").returncode != 0


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"heap": True}, "has no heap profile: leave --heap or direct_mode out"),
        ({"profile": Profile.DETAILED}, "takes no profile level: leave --profile or direct_mode out"),
        ({"profile": Profile.OPTRACE}, "takes no profile level"),
    ],
)
def test_what_it_cannot_measure_is_refused(asked: dict[str, Any], says: str, tmp_path: Path) -> None:
    request = RunRequest(socs=("SM8650",), suites=("smoke",), options=("direct_mode=true",), **asked)
    with pytest.raises(UsageError, match=says):
        jobs_of(load_config(folder=tmp_path), request)


def test_more_executions_than_its_runner_can_be_asked_for_are_refused_where_they_are_named(
    tmp_path: Path,
) -> None:
    asked = RunRequest(socs=("SM8650",), suites=("smoke",), options=("direct_mode=true",), iterations=1000)
    jobs = jobs_of(load_config(folder=tmp_path), asked)
    with pytest.raises(UsageError, match=r"ask for at most \d+, with --iterations and --warm-up together"):
        check_ready(jobs, asked)
    check_ready(jobs, msgspec.structs.replace(asked, reducible=True))
    check_ready(jobs, msgspec.structs.replace(asked, iterations=100))
    ordinary = msgspec.structs.replace(asked, options=())
    check_ready(jobs_of(load_config(folder=tmp_path), ordinary), ordinary)


def test_one_program_is_executed_less_often_only_where_nobody_named_how_often(
    manifest: Manifest, tmp_path: Path
) -> None:
    many = Bundle(tmp_path, msgspec.structs.replace(manifest, outputs=manifest.outputs * 400))
    runtime = Runtime({}, "d", "direct_runner", {}, "android", False, {}, one_shot=True)
    acquired: Any = SimpleNamespace(runtime=runtime)
    [job, *_] = jobs_of(load_config(folder=tmp_path), RunRequest(socs=("SM8650",), suites=("smoke",)))
    _require_executions(many, acquired, OneOffRequest(job=job, virtual=True, **executions(None, None)))
    _require_executions(many, acquired, OneOffRequest(job=job, virtual=True, **executions(1, 1)))
    for named in ((3, None), (None, 3), (3, 1)):
        with pytest.raises(UsageError, match="ask for at most 2, with --iterations and --warm-up together"):
            _require_executions(many, acquired, OneOffRequest(job=job, virtual=True, **executions(*named)))


def test_it_has_no_layers_to_debug(tmp_path: Path) -> None:
    with pytest.raises(IllegalTargetError, match="direct mode writes no layers"):
        job_to_debug(load_config(folder=tmp_path), JOB.format("-direct_mode=true"))


def test_a_device_is_tried_with_a_health_check_of_its_mode(tmp_path: Path) -> None:
    request = RunRequest(socs=("SM8650",), suites=("smoke",), options=("direct_mode=true",))
    [health_check] = health_check_jobs(jobs_of(load_config(folder=tmp_path), request))
    assert health_check.target.mode == "direct"


@pytest.fixture
def manifest() -> Manifest:
    tensor = TensorSpec((1,), "float32")
    return Manifest(
        key="k", job_id="s/c", soc="SM8650", backend="htp", precision="8a8w", samples=1, inputs=(tensor,),
        outputs=(tensor,), pte_bytes=1, delegates={}, delegated_ops=1, fallback_ops={}, seconds={}, versions={},
        files={},
    )  # fmt: skip


def test_a_bundle_says_how_it_is_run_by_hand(manifest: Manifest, tmp_path: Path) -> None:
    target = Target("SM8650", "htp", "8a8w", (("direct_mode", "true"),))
    text = readme(Bundle(tmp_path, manifest), "s/c[SM8650-htp-8a8w-direct_mode=true]", target, ())
    assert "./qnn_executor_direct_runner --domain_id 3 --model_path=model.pte" in text
    assert '"$DIRECT_BUILD/backends/qualcomm/libqnn_executorch_backend.so"' in text
    assert '"$QNN_SDK_ROOT/lib/hexagon-v75/unsigned/libQnnHtpV75.so"' in text
    assert "--output_folder_path=$D/outputs" in text
    assert "--iteration" not in text
    assert "farm exec model.pte --soc SM8650 --backend htp --option direct_mode=true" in text


def test_a_ready_program_is_not_profiled_either(models: Path) -> None:
    asked = ReadyRequest(model=models / "conv.pte", profile=Profile.DETAILED, options=("direct_mode=true",))
    with pytest.raises(UsageError, match="takes no profile level"):
        plan_ready(asked)


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("add_dynamic.pte", "has dynamic sizes"),
        ("conv_shared.pte", "shared_buffer is not for direct mode"),
        ("conv_dump.pte", "dump_intermediate_outputs is not for direct mode"),
    ],
)
def test_a_ready_program_that_its_runner_cannot_run_is_refused_either_way(
    models: Path, model: str, says: str, tmp_path: Path
) -> None:
    direct = ("direct_mode=true",)
    with pytest.raises(IllegalTargetError, match=f"{model}.*{says}"):
        plan_ready(ReadyRequest(model=models / model, profile=Profile.OFF, options=direct))
    suite = tmp_path / "ready"
    suite.mkdir()
    (suite / model).symlink_to(models / model)
    (suite / "suite.toml").write_text(
        'suite = { name = "ready", description = "d", backends = ["htp"] }\n'
        f'[case.net]\npte = "{model}"\ninputs = [{{ shape = [1] }}]\n'
    )
    request = RunRequest(socs=("SM8650",), suites=(str(suite),), options=direct)
    jobs = jobs_of(load_config(folder=tmp_path), request)
    with pytest.raises(IllegalTargetError, match=f"{model}.*{says}"):
        check_ready(jobs)


def test_a_session_of_pytest_has_the_ordinary_runner(tmp_path: Path) -> None:
    plan = SimpleNamespace(suite_folders=(), backend="htp", soc="SM8650", cache_root=tmp_path)
    worker: Any = SimpleNamespace(plan=plan)
    with pytest.raises(UsageError, match="direct_mode is for farm run and farm exec"):
        Bundles(worker).case("smoke/linear", options={"direct_mode": "true"})


def test_a_test_that_names_more_executions_than_the_runner_can_be_asked_for_is_refused(
    manifest: Manifest, tmp_path: Path
) -> None:
    many = msgspec.structs.replace(manifest, outputs=manifest.outputs * 400)
    runtime = Runtime({}, "d", "qnn_executor_runner", {}, "linux", False, {}, one_shot=True)
    run = SimpleNamespace(runtime=runtime, flags=lambda *_: {}, run=RunStub().run)
    info, plan = SimpleNamespace(soc="SM8650", serial="board"), SimpleNamespace(backend="htp", soc="SM8650")
    worker: Any = SimpleNamespace(run=run, info=info, plan=plan, scratch=tmp_path)
    program, runner = DeviceProgram(Bundle(tmp_path, many)), Runner(worker)
    with pytest.raises(UsageError, match="ask for at most 2, with iterations and warm_up together"):
        runner(program, iterations=2)
    for named in ({}, {"iterations": 1}, {"iterations": 2, "warm_up": 0}):
        with pytest.raises(InfraError, match="no device here"):
            runner(program, **named)


class RunStub:
    """Recorder of a bench's requests to a device that does not answer."""

    def __init__(self) -> None:
        self.asked: list[RunnerOptions] = []

    def flags(self, *_: object) -> dict[str, str]:
        return {}

    def run(self, _id: str, _bundle: Bundle, _folder: Path, options: RunnerOptions, **_: object) -> None:
        self.asked.append(options)
        raise InfraError("no device here")


def test_pairs_have_no_more_inferences_than_the_runner_can_be_asked_for(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = msgspec.structs.replace(manifest, outputs=manifest.outputs * 200)
    [job, *_] = jobs_of(
        load_config(folder=tmp_path), RunRequest(socs=("SM8650",), suites=("smoke",), options=("direct_mode=true",))
    )
    side, run = Side(job, Bundle(tmp_path, many)), RunStub()
    output = LogLines()
    nothing: Any = None
    runtime = Runtime({}, "d", "direct_runner", {}, "android", False, {}, one_shot=True)

    def bench_of(least: int) -> InterleavedBench:
        config = load_config(folder=tmp_path)
        bench = InterleavedBench(config, nothing, job.target, virtual=True, purpose="", least_inferences=least)
        bench.runtime = runtime
        monkeypatch.setattr(bench, "_device_run", lambda *_: run)
        monkeypatch.setattr(bench, "_acquirer", SimpleNamespace(folder=tmp_path))
        monkeypatch.setattr(bench, "side", lambda _: side)
        return bench

    bench = bench_of(0)
    for inferences in (100, 100, 4):
        with pytest.raises(InfraError, match="no device here"):
            bench._run(side, runtime, inferences, full=False, fresh=False)
    assert [(one.warm_up, one.iterations) for one in run.asked] == [(1, 4)] * 3
    assert output == [f"{job.id}: 4 inferences a turn, not 100: direct_runner writes the outputs of each"]
    # The named number is the least for the ends of `farm perf confirm` and `farm perf bisect`, and for each turn.
    require_bundles(bench.config, nothing, bench_of(4), [nothing])
    refusal = "ask for at most 5, with --inferences and 1 to warm up"
    with pytest.raises(UsageError, match=refusal):
        require_bundles(bench.config, nothing, bench_of(5), [nothing])
    with pytest.raises(InfraError, match="no device here"):
        bench_of(4)._run(side, runtime, 100, full=False, fresh=False)
    with pytest.raises(UsageError, match=refusal):
        bench_of(5)._run(side, runtime, 100, full=False, fresh=False)
