"""Options of targets: valid values, the place where each is applied, and targets without a measured heap."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from executorch.backends.qualcomm.serialization import qc_schema
from made import device

from farm.base.backends.registry import BACKENDS
from farm.base.config.settings import load_config
from farm.base.errors import FarmError, IllegalTargetError, UnknownNameError, UsageError
from farm.base.socs import find_soc
from farm.devices.discovery import Scan
from farm.dispatch.cluster.client.devices import choose as devices_of_agents
from farm.dispatch.nightly.plan import command_of
from farm.dispatch.pool.fleet import Choice, choose
from farm.dispatch.request.choose import check_machine, jobs_of, select
from farm.dispatch.request.request import RunRequest
from farm.store.cluster.records import Agent, AgentDevice, AgentFacts
from farm.store.records import PROTOCOL
from farm.suites.manifests import find_suites, load_suite
from farm.suites.options import check_options, compile_options, parse_options, runtime_flags
from farm.suites.suite import Features, Target, plan

# Options of a backend: valid values, and the place where each is applied.


MANY = ",".join(map(str, range(1, 40)))


def test_every_combination_is_a_set_of_its_own() -> None:
    sets = parse_options(["lpai_fps=5,10", "affinity=hard"], "lpai")
    assert sets == ((("affinity", "hard"), ("lpai_fps", "5")), (("affinity", "hard"), ("lpai_fps", "10")))
    assert parse_options([], "htp") == ((),)


@pytest.mark.parametrize("spelling", ["burst", "BURST", "2", "2,burst"])
def test_a_value_has_one_spelling_however_it_is_given(spelling: str) -> None:
    assert parse_options([f"htp_performance_mode={spelling}"], "htp") == ((("htp_performance_mode", "burst"),),)


def test_options_go_to_the_compiler_or_to_the_runner_as_numbers() -> None:
    [options] = parse_options(["lpai_client_perf_type=non_real_time", "lpai_fps=007", "fps=3"], "lpai")
    target = Target("SM8850", "lpai", "8a8w", options)
    assert compile_options(target) == {"fps": "3"}
    assert runtime_flags(target) == {"lpai_client_perf_type": "2", "lpai_fps": "7"}
    assert str(target) == "SM8850-lpai-8a8w-fps=3-lpai_client_perf_type=non_real_time-lpai_fps=7"


@pytest.mark.parametrize(
    ("text", "backend", "error", "message"),
    [
        ("direct_mode=true", "gpu", IllegalTargetError, "is for htp, lpai, not for the gpu backend"),
        ("direct_mode=true,false", "htp", UsageError, "run direct_mode=true and =false apart"),
        ("direct_mode=true htp_performance_mode=burst", "htp", IllegalTargetError, "has no such flag"),
        ("direct_mode=true lpai_fps=5", "lpai", IllegalTargetError, "option lpai_fps is a flag of the runner"),
        ("lpai_fps=1 lpai_fps=2", "lpai", UsageError, "given twice: write lpai_fps=value,value"),
        (f"lpai_fps={MANY} lpai_ftrt_ratio={MANY}", "lpai", UsageError, "more than 1000 combinations"),
        ("htp_performance_mod=burst", "htp", UnknownNameError, "did you mean 'htp_performance_mode'"),
        ("htp_performance_mode=brust", "htp", UnknownNameError, "did you mean 'burst'"),
        ("lpai_fps=5", "htp", IllegalTargetError, "is for lpai, not for the htp backend"),
        ("lpai_fps", "lpai", UsageError, "expected name=value"),
        ("lpai_fps=0", "lpai", UsageError, "expected a number from 1 to"),
        ("lpai_fps=\N{ARABIC-INDIC DIGIT FIVE}", "lpai", UsageError, "expected a number"),
        ("lpai_fps=" + "0" * 12 + "9" * 5000, "lpai", UsageError, "expected a number"),
        ("lpai_fps=2147483648", "lpai", UsageError, "expected a number"),
        ("profile_level=optrace", "htp", IllegalTargetError, "set by --profile optrace"),
        ("fps=1", "hpt", UnknownNameError, "did you mean 'htp'"),
        ("lpai_fps=1,,2", "lpai", UsageError, "expected a number"),
        ("weight_cache_enabled=2", "xnnpack", UnknownNameError, "known are false, true"),
        ("workspace_sharing_mode=3", "xnnpack", UnknownNameError, "value of option workspace_sharing_mode"),
        ("packed_cache_path=w.packed", "xnnpack", UsageError, "no effect without weight_cache_enabled=true: give both"),
        ("packed_cache_path=../w.packed", "xnnpack", UsageError, "expected the name of a file, as weights.packed"),
    ],
)
def test_what_cannot_be_is_said_with_what_can(text: str, backend: str, error: type[FarmError], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_options(text.split(" "), backend)


def test_xnnpack_gets_a_number_a_switch_and_a_text() -> None:
    texts = ["workspace_sharing_mode=per_model,2", "weight_cache_enabled=1", "packed_cache_path=w.packed"]
    per_model, everything = parse_options(texts, "xnnpack")
    target = Target("SM8650", "xnnpack", "fp32", per_model)
    flags = {"workspace_sharing_mode": "1", "weight_cache_enabled": "1", "packed_cache_path": "w.packed"}
    assert runtime_flags(target) == flags
    assert compile_options(target) == {}
    assert ("workspace_sharing_mode", "global") in everything
    with pytest.raises(UsageError, match="no effect without"):
        check_options(Target("SM8650", "xnnpack", "fp32", (("packed_cache_path", "w.packed"),)))


def test_a_sweep_makes_the_plan_wider_and_keeps_each_set_together() -> None:
    smoke = load_suite(find_suites()["smoke"])
    soc = find_soc("SM8650")
    sets = parse_options(["htp_performance_mode=burst,balanced"], "htp")
    jobs = plan([smoke], [soc], "htp", option_sets=sets)
    assert len({job.id for job in jobs}) == len(jobs) == 2 * len(plan([smoke], [soc], "htp"))
    modes = [dict(job.target.options)["htp_performance_mode"] for job in jobs]
    assert modes == sorted(modes, key=["burst", "balanced"].index)


def test_words_are_those_of_executorch() -> None:
    def folded(name: str) -> str:
        return name.removeprefix("k").lower().replace("_", "")

    for words, enum, prefix in (
        (BACKENDS["htp"].options["htp_performance_mode"].words, qc_schema.QnnExecuTorchHtpPerformanceMode, "htp"),
        (BACKENDS["lpai"].options["client_perf_type"].words, qc_schema.QnnExecuTorchLpaiClientPerf, ""),
        (BACKENDS["lpai"].options["affinity"].words, qc_schema.QnnExecuTorchLpaiCoreAffinity, ""),
        (BACKENDS["gpu"].options["precision"].words, qc_schema.QnnExecuTorchGpuPrecision, "gpuprecision"),
        (BACKENDS["lpai"].host_cpus, qc_schema.QnnExecuTorchLpaiTargetEnv, ""),
    ):
        theirs = {folded(one.name).removeprefix(prefix): int(one) for one in enum if one.name != "kUndefined"}
        assert {folded(word): number for word, number in words.items()} == theirs
    types = {backend.name: backend.qnn_type for backend in BACKENDS.values() if backend.qnn_type is not None}
    named = {folded(one.name).removesuffix("backend"): int(one) for one in qc_schema.QnnExecuTorchBackendType}
    assert types.items() <= named.items()


def test_direct_mode_is_an_option_of_the_target_and_parts_bundles() -> None:
    [options] = parse_options(["direct_mode=1", "use_dlbc=true"], "htp")
    target = Target("SM8650", "htp", "8a8w", options)
    assert str(target) == "SM8650-htp-8a8w-direct_mode=true-use_dlbc=true"
    assert (target.direct, target.mode) == (True, "direct")
    assert compile_options(target) == {"direct_mode": "true", "use_dlbc": "true"}
    [off] = parse_options(["direct_mode=false"], "htp")
    assert Target("SM8650", "htp", "8a8w", off).mode == Target("SM8650", "htp", "8a8w").mode == "traditional"


def test_direct_mode_has_no_sizes_that_are_not_fixed() -> None:
    suite = load_suite(find_suites()["quantized_ops"])
    dynamic = [case for case in suite.cases if any(spec.dynamic for spec in case.inputs)]
    assert dynamic
    narrowed = msgspec.structs.replace(suite, cases=(dynamic[0],))
    with pytest.raises(IllegalTargetError, match=rf"{dynamic[0].name} has dynamic sizes"):
        plan([narrowed], [find_soc("SM8650")], "htp", option_sets=((("direct_mode", "true"),),))


# Targets whose heap ExecuTorch does not measure are refused before a run begins.


HEAP = RunRequest(socs=("SM8650",), suites=("smoke",), heap=True)
PHONE = device("phone", "QCS9100")
BOARD = msgspec.structs.replace(PHONE, serial="board", os="linux")


def test_a_linux_board_is_left_out_and_refused_where_it_is_alone() -> None:
    wanted = Choice(heap=True)
    devices, refused = choose(Scan([PHONE, BOARD], [], []), {}, ["QCS9100"], wanted)
    assert [device.serial for device in devices] == ["phone"]
    assert refused == ["board (QCS9100: ExecuTorch measures the DSP's heap on Android and QNX, not on Linux)"]
    with pytest.raises(IllegalTargetError, match="--heap: board: ExecuTorch measures .* not on Linux: attach a device"):
        choose(Scan([BOARD], [], []), {}, ["QCS9100"], wanted)
    assert choose(Scan([BOARD], [], []), {}, ["QCS9100"], Choice())[0] == [BOARD]


def test_a_shared_farm_leaves_out_linux_boards_as_well() -> None:
    facts = [AgentDevice(one.id, one.serial, one.soc, one.kind, one.os or "android") for one in (PHONE, BOARD)]
    both, alone = (
        Agent("lab", "farm", 0, 0, True, AgentFacts(host="lab", pid=1, version="1", protocol=PROTOCOL, devices=devices))
        for devices in (tuple(facts), tuple(facts[1:]))
    )
    devices, refused = devices_of_agents([both], {}, ["QCS9100"], Choice(heap=True))
    assert [device.serial for device in devices] == ["phone"]
    assert refused == ["board (QCS9100 of lab: ExecuTorch measures the DSP's heap on Android and QNX, not on Linux)"]
    with pytest.raises(IllegalTargetError, match="--heap: board: ExecuTorch measures .* not on Linux: attach a device"):
        devices_of_agents([alone], {}, ["QCS9100"], Choice(heap=True))


def test_programs_that_make_their_contexts_on_the_device_are_refused(tmp_path: Path) -> None:
    config = load_config(folder=tmp_path)
    one, other, *_ = jobs_of(config, HEAP)
    online = msgspec.structs.replace(
        one, case=msgspec.structs.replace(one.case, features=Features(online_prepare=True))
    )
    assert select(HEAP, [other], judged=False) == (other,)
    with pytest.raises(UsageError, match=r"makes its own on the device \(online_prepare\): leave it out with -k 'not "):
        select(HEAP, [online, other], judged=False)


def test_the_simulator_is_refused_and_a_stub_in_its_place_is_not(tmp_path: Path) -> None:
    virtual = msgspec.structs.replace(HEAP, virtual=1)
    config = load_config(folder=tmp_path)
    with pytest.raises(IllegalTargetError, match="the simulator has none: attach a device"):
        check_machine(config, virtual)
    stub = tmp_path / "sdk"
    stub.mkdir()
    (stub / "sdk.yaml").write_text("product: stub\n")
    check_machine(msgspec.structs.replace(config, sdk_root=stub), virtual)


def test_a_night_measures_the_heap_as_often_as_its_cell_states() -> None:
    assert "--heap --iterations 5" in command_of(msgspec.structs.replace(HEAP, iterations=5))
    assert "--iterations" not in command_of(msgspec.structs.replace(HEAP, reducible=True))
