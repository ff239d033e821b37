"""GPU: Adreno, in floating point. No simulator of it exists."""

from __future__ import annotations

from farm.base.backends.descriptor import QNN_FEATURES, SWITCH, Backend, BackendOption, HostLibrary

# ExecuTorch 1.5, qc_schema: QnnExecuTorchGpuPrecision; a test compares.
_PRECISION = {"fp32": 0, "fp16": 1, "hybrid": 2, "user_provided": 3}

BACKEND = Backend(
    name="gpu",
    precisions=("fp16", "fp32"),
    flow="farm.builds.compile.flows.qualcomm",
    options={
        "precision": BackendOption(
            "compile", _PRECISION, help="of storage and computation, independent of the job's precision"
        ),
        "use_memory_optimizations": BackendOption("compile", SWITCH, help="memory shared between tensors"),
        "use_node_optimizations": BackendOption("compile", SWITCH, help="operations fused"),
        "use_queue_recording": BackendOption("compile", SWITCH, help="command queues recorded"),
        "use_weight_sharing": BackendOption("compile", SWITCH, help="weights shared between graphs"),
    },
    features=(*QNN_FEATURES, "use_weight_sharing"),
    qnn_type=1,
    compiler_spec="generate_gpu_compiler_spec",
    by_precision={"precision": _PRECISION},
    host_library=HostLibrary(
        "libQnnGpu.so",
        "pip's SDK, like all since 2.47, does not start on x86_64 without a tuning server, and "
        "there is no GPU simulator: {get_sdk} older than 2.47, and attach a device",
        before=(2, 47),
        too_new="newer than 2.46, the last that starts on x86_64 without a tuning server, which compiling for gpu "
        "needs",
    ),
    online_prepare=True,
    libraries=("libQnnSystem.so", "libQnnGpu.so"),
    health_check_precision="fp16",
)
