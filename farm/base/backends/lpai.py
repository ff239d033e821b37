"""LPAI: the low-power AI core beside the audio DSP."""

from __future__ import annotations

from typing import Literal

from farm.base.backends.descriptor import (
    DIRECT_OPTION,
    QNN_FEATURES,
    QUANTIZED_PRECISIONS,
    Backend,
    BackendOption,
    HostLibrary,
)

# ExecuTorch 1.5, qc_schema: QnnExecuTorchLpaiClientPerf and QnnExecuTorchLpaiCoreAffinity; a test compares.
_CLIENT = {"real_time": 1, "non_real_time": 2}
_AFFINITY = {"soft": 1, "hard": 2}


def _options(when: Literal["compile", "run"], prefix: str = "") -> dict[str, BackendOption]:
    return {
        f"{prefix}fps": BackendOption(when, least=1, help="inferences a second that the clock is chosen for"),
        f"{prefix}ftrt_ratio": BackendOption(when, least=1, help="tenths by which the base clock is multiplied"),
        f"{prefix}client_perf_type": BackendOption(when, _CLIENT, help="whether missing the time is an error"),
        f"{prefix}affinity": BackendOption(when, _AFFINITY, help="whether other cores than the selected may be used"),
        f"{prefix}core_selection": BackendOption(when, help="bit mask of cores, 0 for any"),
    }


BACKEND = Backend(
    name="lpai",
    precisions=QUANTIZED_PRECISIONS,
    flow="farm.builds.compile.flows.qualcomm",
    options={**_options("compile"), **_options("run", "lpai_"), **DIRECT_OPTION},
    # ExecuTorch 1.5, backends/qualcomm/utils/utils.py: generate_lpai_compiler_spec; a test compares.
    frame_defaults={"fps": "1", "ftrt_ratio": "10", "core_selection": "0", "client_perf_type": "real_time"},
    features=QNN_FEATURES,
    qnn_type=4,
    # ExecuTorch 1.5, backends/qualcomm/export_utils.py: LPAI v6 needs it.
    first_qnn=(2, 39),
    host_library=HostLibrary("libQnnLpai.so", "pip has none: {get_sdk}, 2.39 or newer, with {target} libraries"),
    cpu_quantizes=True,
    compiler_spec="generate_lpai_compiler_spec",
    # ExecuTorch 1.5, qc_schema: QnnExecuTorchLpaiTargetEnv; a test compares. `adsp` is direct mode.
    host_cpus={"x86": 0, "arm": 1, "adsp": 2},
    on_host="rehearsed",
    hardware="lpai_version",
    libraries=("libQnnSystem.so", "libQnnLpai.so", "libQnnLpaiStub.so"),
    dsp_folder="lpai-v{lpai_version}",
    skel="libQnnLpaiSkel.so",
    signed=True,
    direct_library="libQnnLpai.so",
    # The audio DSP, in a signed process domain.
    direct_domain=0,
    needs_root=True,
    has_layers=True,
)
