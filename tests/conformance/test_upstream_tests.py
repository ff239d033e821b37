"""Upstream's own tests, unchanged, pass with our runner: on this machine, and sharded over virtual devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran
    from farm_home import FarmHome

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

ON_DEVICES = (
    "TestQNNQuantizedOperator::test_qnn_backend_chunk_single",
    "TestQNNQuantizedOperator::test_qnn_backend_cos",
    "TestQNNQuantizedOperator::test_qnn_backend_embedding",
    "TestQNNQuantizedOperator::test_qnn_backend_max_dim",
    "TestQNNQuantizedOperator::test_qnn_backend_neg",
    "TestQNNQuantizedOperator::test_qnn_backend_relu",
    "TestQNNQuantizedOperator::test_qnn_backend_sin",
    "TestQNNQuantizedOperator::test_qnn_backend_stack",
    "TestQNNQuantizedUtils::test_qnn_backend_dump_intermediate_outputs_topk",
    "TestQNNQuantizedUtils::test_qnn_backend_runtime_option_profile",
)
MODULE = "executorch.backends.qualcomm.tests.test_qnn_delegate"
STUBS = Path(__file__).parent / "model_stubs"


def test_in_x86_mode(run_here: Callable[..., Ran]) -> None:
    # In one process, as importing all that upstream's modules import takes as long as several tests.
    names = [f"{cls}.test_qnn_backend_{name}" for cls, chosen in HERE.items() for name in chosen]
    run_here(*names).check(tests=len(names))


def test_on_two_devices(home: FarmHome) -> None:
    done = home.farm(
        *("pytest", "--soc", "SM8650", "--virtual", "2", "--json", "--"),
        *("-p", "no:cacheprovider", "--pyargs", *(f"{MODULE}::{name}" for name in ON_DEVICES)),
        env={
            "PYTHONPATH": os.pathsep.join(filter(None, (str(STUBS), os.environ.get("PYTHONPATH")))),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        timeout_s=1800,
    )

    assert done.returncode == 0, done.stderr[-8000:]
    jobs = json.loads(done.stdout)["jobs"]
    assert {job["id"] for job in jobs} == {f"pytest/test_qnn_delegate.py::{name}[SM8650-htp]" for name in ON_DEVICES}
    attempts = [attempt for job in jobs for attempt in job["attempts"]]
    assert [attempt["verdict"] for attempt in attempts] == ["passed"] * len(ON_DEVICES)
    assert {attempt["device"] for attempt in attempts} == {"virtual-SM8650-0", "virtual-SM8650-1"}
    assert not list(home.cwd.iterdir()), "they write where they stand, which is a folder of each worker"
