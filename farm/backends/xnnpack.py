"""XNNPACK: the processor, a baseline for every SoC."""

from __future__ import annotations

from farm.backends.descriptor import Backend

BACKEND = Backend(
    name="xnnpack",
    # It could run 8a8w too, but its quantizer knows few operators, and what it leaves alone would be floating point
    # under another name.
    precisions=("fp32",),
    flow="farm.compile.flows.xnnpack",
    on_cpu=True,
    on_host="runs",
    canary_precision="fp32",
)
