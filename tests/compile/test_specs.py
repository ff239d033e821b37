"""Settings of a target in ExecuTorch's compile specs, decoded from the bytes of a .pte; no QNN is started."""

from __future__ import annotations

from typing import Any

import pytest

from farm.base.backends.registry import BACKENDS

# QnnExecuTorch* of ExecuTorch 1.5, qc_schema: backend, chipset, precisions.
GPU, HTP, LPAI = 1, 2, 4


@pytest.fixture
def specs(lowered: dict[str, Any]) -> dict[str, Any]:
    return dict(lowered["specs"])


def test_lpai_has_executorchs_defaults_and_is_prepared_here(specs: dict[str, Any]) -> None:
    plain = specs["lpai"]
    assert plain["backend_options"]["backend_type"] == LPAI
    assert plain["online_prepare"] is False
    assert plain["backend_options"]["lpai_options"] == {
        "fps": 1, "ftrt_ratio": 10, "client_perf_type": 1, "affinity": 1, "core_selection": 0, "target_env": 1,
    }  # fmt: skip
    frame, options = BACKENDS["lpai"].frame_options, BACKENDS["lpai"].options
    assert frame is not None
    for name, value in frame.defaults.items():
        number = options[name].words.get(value, value)
        assert plain["backend_options"]["lpai_options"][name] == int(number), name


def test_lpai_of_a_virtual_device_is_for_x86(specs: dict[str, Any]) -> None:
    virtual = specs["lpai virtual"]["backend_options"]["lpai_options"]
    assert virtual == {**specs["lpai"]["backend_options"]["lpai_options"], "target_env": 0}


def test_lpai_options_are_compiled_in_and_those_of_run_time_are_not(specs: dict[str, Any]) -> None:
    assert specs["lpai options"]["backend_options"]["lpai_options"] == {
        "fps": 9, "ftrt_ratio": 30, "client_perf_type": 2, "affinity": 2, "core_selection": 2, "target_env": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("name", "precision"), [("gpu fp32", 0), ("gpu fp16", 1)])
def test_gpu_is_prepared_on_the_device_in_the_precision_of_the_job(
    specs: dict[str, Any], name: str, precision: int
) -> None:
    gpu = specs[name]
    assert gpu["online_prepare"] is True
    assert gpu["backend_options"]["backend_type"] == GPU
    options = gpu["backend_options"]["gpu_options"]
    assert options["precision"] == precision
    assert options["use_memory_optimizations"] is options["use_node_optimizations"] is True
    assert (options["use_queue_recording"], options["use_weight_sharing"]) == (True, False)


def test_gpu_options_are_compiled_in_and_precision_is_overridden(specs: dict[str, Any]) -> None:
    options = specs["gpu options"]["backend_options"]["gpu_options"]
    assert options["precision"] == 2
    assert (options["use_memory_optimizations"], options["use_weight_sharing"]) == (False, True)
    assert options["use_node_optimizations"] is True


def test_htp_options_are_compiled_in(specs: dict[str, Any]) -> None:
    plain, chosen = specs["htp fp16"], specs["htp options"]
    assert plain["backend_options"]["backend_type"] == chosen["backend_options"]["backend_type"] == HTP
    assert (plain["online_prepare"], plain["profile_level"], chosen["profile_level"]) == (False, 0, 3)
    of_plain, of_chosen = plain["backend_options"]["htp_options"], chosen["backend_options"]["htp_options"]
    assert (of_plain["precision"], of_plain["use_dlbc"]) == (1, False)
    assert (of_chosen["precision"], of_chosen["use_dlbc"]) == (0, True)
    # How fast it runs is a matter of run time.
    assert of_chosen["performance_mode"] == of_plain["performance_mode"]


def test_gpu_cannot_be_compiled_for_with_the_library_of_the_wheel_and_the_reason_is_said(
    lowered: dict[str, Any],
) -> None:
    assert lowered["gpu"].startswith("MissingToolError: libQnnGpu.so of the QNN SDK does not start on this machine")
