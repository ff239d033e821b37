"""`farm run` and `farm jobs rerun` in direct mode, on a virtual device with a stub of its runner; refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome
from log_lines import LogLines
from made import manifest

from farm.base.config.settings import load_config
from farm.base.errors import IllegalTargetError, InfraError, UsageError
from farm.builds.bundles.bundle import Bundle, TensorSpec
from farm.builds.runtime.runtime import Runtime
from farm.cli.options import executions
from farm.devices.execution.raw import RunnerOptions
from farm.dispatch.device_run.health_check import health_check_jobs
from farm.dispatch.pytest_plugin.runner import Bundles, Runner
from farm.dispatch.request.choose import check_ready, jobs_of
from farm.dispatch.request.profiling import Profile
from farm.dispatch.request.request import RunRequest
from farm.numbers.regressions.interleaved_ab import InterleavedBench, Side
from farm.numbers.regressions.stored_pairs import require_bundles
from farm.replay.bundle_folder import readme
from farm.replay.debug import job_to_debug
from farm.replay.one_off import OneOffRequest, _require_executions
from farm.replay.ready_program import ReadyRequest, plan_ready
from farm.suites.suite import Target

JOB = "smoke/linear[SM8650-htp-8a8w{}]"
DIRECT = ("--option", "direct_mode=true")
SUITE = ("--soc", "SM8650", "--suite", "smoke", "-k", "linear")
OUTPUTS = (TensorSpec((1,), "float32"),)
REQUEST = RunRequest(socs=("SM8650",), suites=("smoke",), options=("direct_mode=true",))
ONE_SHOT = Runtime({}, "d", "direct_runner", {}, "android", False, {}, one_shot=True)


@pytest.fixture(scope="module")
def home(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> FarmHome:
    return FarmHome.make(farm_cache, tmp_path_factory.mktemp("direct"))


@pytest.fixture(scope="module")
def runs(home: FarmHome) -> dict[str, Any]:
    """Last attempt of a job in both modes."""
    found = {}
    for name, options in (("ordinary", ()), ("direct", DIRECT)):
        [job] = home.json("run", "--virtual", "1", *SUITE, *options, "--iterations", "2", timeout_s=300)["jobs"]
        [found[name]] = job["attempts"]
    return found


@pytest.mark.whole
def test_the_outputs_are_those_of_a_session_and_the_program_is_another(runs: dict[str, Any]) -> None:
    ordinary, direct = runs["ordinary"], runs["direct"]
    assert ordinary["verdict"] == direct["verdict"] == "passed"
    # The simulator computes both; programs for direct mode have no planned memory for inputs and outputs.
    assert ordinary["comparisons"] == direct["comparisons"]
    assert ordinary["bundle_key"] != direct["bundle_key"]
    assert "STUB of direct mode, domain 3" in direct["log"]
    [latency] = [one["samples"] for one in direct["measurements"] if one["metric"] == "latency"]
    assert len(latency) == 1, "its runner says a mean alone"


@pytest.mark.whole
def test_it_runs_again_from_its_bundle(home: FarmHome, runs: dict[str, Any]) -> None:
    assert runs
    job = JOB.format("-direct_mode=true")
    home.farm("jobs", "rerun", job, "--virtual", "--json", code=0)


@pytest.mark.whole
def test_too_many_executions_are_refused_before_a_record(home: FarmHome, models: Path) -> None:
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
def test_heap_and_profile_are_refused(asked: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        jobs_of(load_config(folder=tmp_path), msgspec.structs.replace(REQUEST, **asked))


def test_more_executions_than_its_runner_can_be_asked_for_are_refused_where_they_are_named(tmp_path: Path) -> None:
    asked = msgspec.structs.replace(REQUEST, iterations=1000)
    jobs = jobs_of(load_config(folder=tmp_path), asked)
    with pytest.raises(UsageError, match=r"ask for at most \d+, with --iterations and --warm-up together"):
        check_ready(jobs, asked)
    check_ready(jobs, msgspec.structs.replace(asked, reducible=True))
    check_ready(jobs, msgspec.structs.replace(asked, iterations=100))
    ordinary = msgspec.structs.replace(asked, options=())
    check_ready(jobs_of(load_config(folder=tmp_path), ordinary), ordinary)


def test_only_executions_that_nobody_named_are_reduced(tmp_path: Path) -> None:
    many = Bundle(tmp_path, manifest(outputs=OUTPUTS * 400))
    acquired: Any = SimpleNamespace(runtime=ONE_SHOT)
    [job, *_] = jobs_of(load_config(folder=tmp_path), REQUEST)
    _require_executions(many, acquired, OneOffRequest(job=job, virtual=True, **executions(None, None)))
    _require_executions(many, acquired, OneOffRequest(job=job, virtual=True, **executions(1, 1)))
    for named in ((3, None), (None, 3), (3, 1)):
        with pytest.raises(UsageError, match="ask for at most 2, with --iterations and --warm-up together"):
            _require_executions(many, acquired, OneOffRequest(job=job, virtual=True, **executions(*named)))


def test_it_has_no_layers_to_debug(tmp_path: Path) -> None:
    with pytest.raises(IllegalTargetError, match="direct mode writes no layers"):
        job_to_debug(load_config(folder=tmp_path), JOB.format("-direct_mode=true"))


def test_a_device_is_tried_with_a_health_check_of_its_mode(tmp_path: Path) -> None:
    [health_check] = health_check_jobs(jobs_of(load_config(folder=tmp_path), REQUEST))
    assert health_check.target.mode == "direct"


def test_a_bundle_says_how_it_is_run_by_hand(tmp_path: Path) -> None:
    target = Target("SM8650", "htp", "8a8w", (("direct_mode", "true"),))
    text = readme(Bundle(tmp_path, manifest()), "s/c[SM8650-htp-8a8w-direct_mode=true]", target, ())
    assert "./qnn_executor_direct_runner --domain_id 3 --model_path=model.pte" in text
    assert '"$DIRECT_BUILD/backends/qualcomm/libqnn_executorch_backend.so"' in text
    assert '"$QNN_SDK_ROOT/lib/hexagon-v75/unsigned/libQnnHtpV75.so"' in text
    assert "--output_folder_path=$D/outputs" in text
    assert "--iteration" not in text
    assert "farm exec model.pte --soc SM8650 --backend htp --option direct_mode=true" in text


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("add_dynamic.pte", "has dynamic sizes"),
        ("conv_shared.pte", "shared_buffer is not for direct mode"),
        ("conv_dump.pte", "dump_intermediate_outputs is not for direct mode"),
    ],
)
def test_an_unsuitable_ready_program_is_refused(models: Path, model: str, says: str, tmp_path: Path) -> None:
    asked = ReadyRequest(model=models / model, profile=Profile.OFF, options=REQUEST.options)
    with pytest.raises(IllegalTargetError, match=f"{model}.*{says}"):
        plan_ready(asked)
    with pytest.raises(UsageError, match="takes no profile level"):
        plan_ready(msgspec.structs.replace(asked, profile=Profile.DETAILED))
    (suite := tmp_path / "ready").mkdir()
    (suite / model).symlink_to(models / model)
    (suite / "suite.toml").write_text(
        'suite = { name = "ready", description = "d", backends = ["htp"] }\n'
        f'[case.net]\npte = "{model}"\ninputs = [{{ shape = [1] }}]\n'
    )
    request = msgspec.structs.replace(REQUEST, suites=(str(suite),))
    with pytest.raises(IllegalTargetError, match=f"{model}.*{says}"):
        check_ready(jobs_of(load_config(folder=tmp_path), request))


def test_a_session_of_pytest_has_the_ordinary_runner(tmp_path: Path) -> None:
    plan = SimpleNamespace(suite_folders=(), backend="htp", soc="SM8650", cache_root=tmp_path)
    worker: Any = SimpleNamespace(plan=plan)
    with pytest.raises(UsageError, match="direct_mode is for farm run and farm exec"):
        Bundles(worker).case("smoke/linear", options={"direct_mode": "true"})


def test_a_test_that_names_more_executions_than_the_runner_takes_is_refused() -> None:
    worker: Any = SimpleNamespace(run=SimpleNamespace(runtime=ONE_SHOT))
    runner, many = Runner(worker), manifest(outputs=OUTPUTS * 400)
    for options in (RunnerOptions(1, 1), RunnerOptions(2, 0), RunnerOptions(2, 1, reducible=True)):
        runner._require_executions(many, options)
    with pytest.raises(UsageError, match="ask for at most 2, with iterations and warm_up together"):
        runner._require_executions(many, RunnerOptions(2, 1))


def test_pairs_have_no_more_inferences_than_the_runner_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = manifest(outputs=OUTPUTS * 200)
    config, output = load_config(folder=tmp_path), LogLines()
    [job, *_] = jobs_of(config, REQUEST)
    side = Side(job, Bundle(tmp_path, many))
    asked: list[tuple[int, int]] = []
    nothing: Any = None

    def run(_id: str, _bundle: Bundle, _folder: Path, options: RunnerOptions, **_: object) -> None:
        asked.append((options.warm_up, options.iterations))
        raise InfraError("no device here")

    def bench_of(least: int) -> InterleavedBench:
        bench = InterleavedBench(config, nothing, job.target, virtual=True, purpose="", least_inferences=least)
        bench.runtime = ONE_SHOT
        device_run = SimpleNamespace(run=run, flags=lambda *_: {})
        monkeypatch.setattr(bench, "_device_run", lambda *_: device_run)
        monkeypatch.setattr(bench, "_acquirer", SimpleNamespace(folder=tmp_path))
        monkeypatch.setattr(bench, "side", lambda _: side)
        return bench

    bench = bench_of(0)
    for inferences in (100, 100, 4):
        with pytest.raises(InfraError, match="no device here"):
            bench._run(side, ONE_SHOT, inferences, full=False, fresh=False)
    assert asked == [(1, 4)] * 3
    assert output == [f"{job.id}: 4 inferences a turn, not 100: direct_runner writes the outputs of each"]
    # The named number is the least for the ends of `farm perf confirm` and `farm perf bisect`, and for each turn.
    require_bundles(config, nothing, bench_of(4), [nothing])
    refused = pytest.raises(UsageError, match="ask for at most 5, with --inferences and 1 to warm up")
    with refused:
        require_bundles(config, nothing, bench_of(5), [nothing])
    with refused:
        bench_of(5)._run(side, ONE_SHOT, 100, full=False, fresh=False)
