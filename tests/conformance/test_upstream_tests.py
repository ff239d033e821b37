"""Upstream's own tests, unchanged, pass with our runner: on this machine, and on a virtual device behind `adb`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran

pytestmark = pytest.mark.conformance

HERE = {
    "TestQNNQuantizedOperator": (
        "chunk_single",  # several outputs
        "conv2d",
        "embedding",  # integer inputs
        "max_dim",  # outputs of two types
        "stack",  # several inputs
    ),
    "TestQNNFloatingPointOperator": ("conv2d", "equal", "max_dim", "stack", "unbind"),
    "TestQNNQuantizedUtils": (
        "dump_intermediate_outputs_topk",
        "multi_contexts",
        "profile_op",
        "runtime_option_htp_performance",
        "runtime_option_profile",
        "shared_buffer",
        "skip_node_op_partitioner_multi_output",
    ),
}

ON_A_DEVICE = (
    "TestQNNQuantizedOperator.test_qnn_backend_conv2d",
    "TestQNNQuantizedUtils.test_qnn_backend_dump_intermediate_outputs_topk",
    "TestQNNQuantizedUtils.test_qnn_backend_runtime_option_profile",
)


def test_in_x86_mode(run_here: Callable[..., Ran]) -> None:
    # In one process, as importing all that upstream's modules import takes as long as several tests.
    names = [f"{cls}.test_qnn_backend_{name}" for cls, chosen in HERE.items() for name in chosen]
    run_here(*names).check(tests=len(names))


def test_in_device_mode(run_on_device: Callable[..., Ran]) -> None:
    run_on_device(*ON_A_DEVICE).check(tests=len(ON_A_DEVICE))
