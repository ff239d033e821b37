"""Support for upstream's tests of every backend, below `backends/test/suite`.

These tests compile for one SoC and execute by ExecuTorch's Python bindings, in their own process. Here they compile for
the SoC of the devices, and the device of the worker executes. Their fixture knows the kind of a failure, which pytest's
report lacks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from farm.base.text import one_line
from farm.dispatch.pytest_plugin.record import UpstreamResult
from farm.dispatch.pytest_plugin.runner import Bundles, Runner
from farm.results.attempt import Cause, Stage

if TYPE_CHECKING:
    import pytest

    from farm.dispatch.pytest_plugin.worker import SuiteWorker

# executorch 1.5.1: modules of the classes that these tests use.
_FLOW = "executorch.backends.test.suite.flow"
_SERIALIZE = "executorch.backends.test.harness.stages.serialize"
_QUALCOMM = "executorch.backends.qualcomm.tests.tester"
_FIXTURE = "test_runner"
# Upstream's names of backends by farm's.
_BACKENDS = {"htp": "qualcomm", "xnnpack": "xnnpack"}
_FAILURES = {
    "QUANTIZE_FAIL": (Stage.BUILD, Cause.COMPILE),
    "LOWER_FAIL": (Stage.BUILD, Cause.COMPILE),
    "OUTPUT_MISMATCH_FAIL": (Stage.NUMERICS, Cause.NUMERICS),
}


_UNEXECUTED = "nothing was delegated: the program was not executed"


def flow_of(item: pytest.Item) -> Any:
    """Return the flow of a test of this suite; None for another test."""
    callspec = getattr(item, "callspec", None)
    flow = callspec.params.get(_FIXTURE) if callspec is not None else None
    return flow if type(flow).__module__ == _FLOW else None


def is_of_backend(item: pytest.Item, backend: str) -> bool:
    """Return whether a test may run with `backend`: False for a test of this suite with a flow of another backend."""
    flow = flow_of(item)
    return flow is None or flow.backend == _BACKENDS.get(backend)


def result_of(item: pytest.Item) -> UpstreamResult | None:
    """Return upstream's record of a test that has run; None for another test, or for one without a record."""
    records = getattr(getattr(item, "funcargs", {}).get(_FIXTURE), "_results", None)
    if flow_of(item) is None or not records:
        return None
    record = records[-1]
    kind = record.result
    stage, cause = _FAILURES.get(kind.name, (Stage.EXECUTE, Cause.NONE))
    error = record.error
    text = f"{kind.display_name()}: {type(error).__name__}: {_first_line(error)}" if error is not None else ""
    unexecuted = _UNEXECUTED if kind.name == "SUCCESS_UNDELEGATED" else ""
    return UpstreamResult(text or kind.display_name(), stage, cause, tuple(_notes(record)), unexecuted)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _notes(record: Any) -> list[str]:
    notes = []
    if left := record.undelegated_op_counts:
        notes.append("on the CPU: " + ", ".join(f"{one_line(str(name))} {left[name]}" for name in sorted(left)))
    for index, stats in enumerate(record.tensor_error_statistics):
        if stats.sqnr is not None:
            notes.append(f"output {index}: SQNR {stats.sqnr:.1f} dB")
    return notes


class BackendSuite:
    """Execution of this suite's programs on the device of a worker."""

    def __init__(self, worker: SuiteWorker) -> None:
        self._worker = worker
        self._bundles = Bundles(worker)
        self._runner = Runner(worker, self._bundles.health_check)
        self._count = 0

    def take_over(self) -> None:
        """Direct upstream's classes to the device."""
        serialize: Any = sys.modules[_SERIALIZE]
        serialize.Serialize.run_artifact = lambda stage, inputs: self._execute(stage.buffer, inputs)
        if (qualcomm := sys.modules.get(_QUALCOMM)) is not None:
            _compile_for(self._worker.plan.soc, qualcomm)

    def _execute(self, program: bytes, inputs: Any) -> list[Any]:
        """Return the tensors that `program` gives on the device."""
        torch: Any = sys.modules["torch"]
        flat, _ = torch.utils._pytree.tree_flatten(inputs)  # noqa: SLF001 - as upstream's own stage
        self._count += 1
        path = self._worker.scratch / f"suite-{self._count}.pte"
        path.write_bytes(program)
        try:
            arrays = [tensor.detach().contiguous().numpy() for tensor in flat]
            made = self._runner(self._bundles.pte(path, arrays), iterations=1, warm_up=0, timeout_s=900.0)
        finally:
            path.unlink()
        # ascontiguousarray would give a scalar a dimension.
        return [torch.from_numpy(np.array(array, order="C")) for array in made.outputs[0]]


def _compile_for(soc: str, module: Any) -> None:
    """Have upstream's lowering compile for `soc`; its own default is SM8650."""
    initialize = module.ToEdgeTransformAndLower.__init__

    def for_the_soc(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **{"soc_model": soc, **named})

    module.ToEdgeTransformAndLower.__init__ = for_the_soc
