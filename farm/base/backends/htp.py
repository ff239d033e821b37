"""HTP: the Hexagon tensor processor."""

from __future__ import annotations

from farm.base.backends.descriptor import (
    DIRECT_OPTION,
    QNN_FEATURES,
    QUANTIZED_PRECISIONS,
    SWITCH,
    Backend,
    BackendOption,
)

# ExecuTorch 1.5, qc_schema: QnnExecuTorchHtpPerformanceMode; a test compares.
_PERFORMANCE = {
    "default": 0,
    "sustained_high_performance": 1,
    "burst": 2,
    "high_performance": 3,
    "power_saver": 4,
    "low_power_saver": 5,
    "high_power_saver": 6,
    "low_balanced": 7,
    "balanced": 8,
}

BACKEND = Backend(
    name="htp",
    precisions=(*QUANTIZED_PRECISIONS, "fp16"),
    flow="farm.builds.compile.flows.qualcomm",
    options={
        "htp_performance_mode": BackendOption("run", _PERFORMANCE, help="clocks and sleep that are voted for"),
        "profile_level": BackendOption("compile", {"optrace": 3}, set_by="--profile optrace"),
        "use_dlbc": BackendOption("compile", SWITCH, help="inputs compressed on their way"),
        "use_slc_allocator": BackendOption("compile", SWITCH, help="the system level cache, on SoCs that have it"),
        **DIRECT_OPTION,
    },
    features=(
        *QNN_FEATURES,
        "online_prepare",
        "shared_buffer",
        "use_multi_contexts",
        "split",
        "use_weight_sharing",
        "use_mha2sha",
        # ExecuTorch 1.5 registers a package for the CPU and for HTP, on no other processor.
        "op_packages",
    ),
    qnn_type=2,
    compiler_spec="generate_htp_compiler_spec",
    by_precision={"use_fp16": {**dict.fromkeys(QUANTIZED_PRECISIONS, 0), "fp16": 1}},
    on_host="runs",
    hardware="htp_arch",
    libraries=("libQnnSystem.so", "libQnnHtp.so", "libQnnHtpV{htp_arch}Stub.so", "libQnnHtpPrepare.so"),
    dsp_folder="hexagon-v{htp_arch}",
    skel="libQnnHtpV{htp_arch}Skel.so",
    direct_library="libQnnHtpV{htp_arch}.so",
    # The compute DSP, in an unsigned process domain.
    direct_domain=3,
    generates_text=True,
    keeps_health_check=True,
    has_dsp_heap=True,
    has_layers=True,
)
