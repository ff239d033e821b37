"""Time that ExecuTorch's own test flow takes to compile: `python upstream_compile.py REQUESTS OUT`.

The flow comes unchanged from `TestQNN` of the installed wheel, the base class of all of ExecuTorch's Qualcomm tests:
`get_qdq_module`, `lower_module_and_test_output`, and the part of `verify_output` before the execution: the expected
outputs, the `.pte` file and the inputs. One process compiles all, as unittest does.

REQUESTS is a file of build requests of farm. A `.pte` file of each is left in the folder OUT. The last line is one JSON
object, {"seconds"}. Needs the variables of a builder: QNN_SDK_ROOT and LD_LIBRARY_PATH.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch
from executorch.backends.qualcomm.export_utils import generate_inputs
from executorch.backends.qualcomm.quantizer.quantizer import QuantDtype
from executorch.backends.qualcomm.tests.utils import TestQNN
from executorch.backends.qualcomm.utils.utils import generate_htp_compiler_spec, generate_qnn_executorch_compiler_spec

from farm.builds.compile.flows.factory import make_inputs, make_module
from farm.builds.compile.protocol import BuildRequest
from farm.suites.suite import Job


class Compiling(TestQNN):
    """A test of upstream that ends where it would execute."""

    out: Path

    def verify_output(
        self, module: torch.nn.Module, sample_inputs: tuple[torch.Tensor, ...], executorch_prog: Any, **_rest: object
    ) -> None:
        # The first lines of upstream's own, on x86.
        with tempfile.TemporaryDirectory() as folder:
            _, pte = self._save_model_and_expected_output(module, executorch_prog.buffer, sample_inputs, folder)
            generate_inputs(folder, "input_list.txt", [list(sample_inputs)])
            shutil.move(pte, self.out)


def compile_one(job: Job, out: Path) -> None:
    """Write the `.pte` file of `job`, quantized as farm does, so that both do the same work."""
    Compiling.soc_model, Compiling.backend, Compiling.enable_x86_64 = job.target.soc, job.target.backend, True
    test = Compiling()
    test.out = out
    # As TestQNNQuantizedOperator.setUp.
    TestQNN.compiler_specs = generate_qnn_executorch_compiler_spec(
        soc_model=TestQNN.chipset_table[job.target.soc], backend_options=generate_htp_compiler_spec(use_fp16=False)
    )
    module, inputs = make_module(job.case), make_inputs(job.case, 0)
    dtype = QuantDtype[f"use_{job.target.precision}"]
    quantized = test.get_qdq_module(module, inputs, is_linear_per_channel=True, quant_dtype=dtype)
    expected = job.case.expectation(job.target)
    test.lower_module_and_test_output(quantized, inputs, expected_partitions=expected.partitions if expected else 1)


def main() -> None:
    requests = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=list[BuildRequest])
    out = Path(sys.argv[2])
    # The process that this one is a fork of has frozen its objects and set thresholds, which ExecuTorch's tests do not.
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    # The priority of builders.
    os.nice(10)
    started = time.perf_counter()
    for request in requests:
        compile_one(request.job, out / f"{request.key}.pte")
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
