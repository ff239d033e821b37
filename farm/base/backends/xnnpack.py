"""XNNPACK: the processor, a baseline for every SoC."""

from __future__ import annotations

from farm.base.backends.descriptor import SWITCH, Backend, BackendOption

# ExecuTorch 1.5, backends/xnnpack/runtime/XNNPACKBackend.h: WorkspaceSharingMode.
_SHARING = {"disabled": 0, "per_model": 1, "global": 2}

BACKEND = Backend(
    name="xnnpack",
    # XNNPACK could run 8a8w too, but its quantizer knows few operators, and the others would run in floating point
    # under the name 8a8w.
    precisions=("fp32",),
    flow="farm.builds.compile.flows.xnnpack",
    delegate="XnnpackBackend",
    options={
        "workspace_sharing_mode": BackendOption("run", _SHARING, help="delegates that share memory for their values"),
        "weight_cache_enabled": BackendOption("run", SWITCH, help="delegates share packed weights"),
        "packed_cache_path": BackendOption(
            "run",
            suffix=".packed",
            needs=("weight_cache_enabled", "true"),
            help="file in the job's folder that packed weights are kept in, as weights.packed",
        ),
    },
    on_cpu=True,
    on_host="runs",
    health_check_precision="fp32",
)
