"""Upstream's tests of every backend, with stubs of upstream's classes; tests/conformance has the real ones."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from farm.dispatch.pytest_plugin.backend_suite import BackendSuite, is_of_backend, result_of
from farm.dispatch.pytest_plugin.launch import rooted_arguments
from farm.results.attempt import Cause, Stage


class StubFlow:
    """Flow with upstream's attributes."""

    __module__ = "executorch.backends.test.suite.flow"

    def __init__(self, backend: str) -> None:
        self.backend = backend


class StubResult(IntEnum):
    """Kinds of results with upstream's names."""

    SUCCESS = 0
    SUCCESS_UNDELEGATED = 1
    LOWER_FAIL = 4
    OUTPUT_MISMATCH_FAIL = 7

    def display_name(self) -> str:
        return f"kind {self.value}"


def item_of(flow: object, records: Sequence[object] = ()) -> Any:
    fixture = SimpleNamespace(_results=list(records))
    return SimpleNamespace(callspec=SimpleNamespace(params={"test_runner": flow}), funcargs={"test_runner": fixture})


def record(kind: StubResult, error: Exception | None = None, sqnr: float | None = None) -> object:
    stats = [] if sqnr is None else [SimpleNamespace(sqnr=sqnr)]
    left = Counter({"aten::median": 1})
    return SimpleNamespace(result=kind, error=error, undelegated_op_counts=left, tensor_error_statistics=stats)


def test_flows_of_other_backends_are_told_from_ours() -> None:
    assert is_of_backend(item_of(StubFlow("qualcomm")), "htp")
    assert is_of_backend(item_of(StubFlow("xnnpack")), "xnnpack")
    assert not is_of_backend(item_of(StubFlow("xnnpack")), "htp")
    assert not is_of_backend(item_of(StubFlow("qualcomm")), "gpu"), "upstream's flows compile for HTP alone"
    assert is_of_backend(item_of("a parameter of another suite"), "htp")
    assert is_of_backend(SimpleNamespace(), "htp")  # type: ignore[arg-type]


def test_results_of_upstream_become_answers_with_their_kind_and_error() -> None:
    flow = StubFlow("qualcomm")

    def answer(*records: object, flow: object = flow) -> Any:
        return result_of(item_of(flow, records))

    failed = answer(record(StubResult.LOWER_FAIL, RuntimeError("\n  op is not supported\nmore")))
    assert failed.reason == "kind 4: RuntimeError: op is not supported"
    assert (failed.stage, failed.cause, failed.notes) == (Stage.BUILD, Cause.COMPILE, ("on the CPU: aten::median 1",))
    wrong = answer(record(StubResult.OUTPUT_MISMATCH_FAIL, sqnr=3.25))
    assert (wrong.stage, wrong.cause, wrong.notes[-1]) == (Stage.NUMERICS, Cause.NUMERICS, "output 0: SQNR 3.2 dB")
    assert not wrong.unexecuted
    alone = answer(record(StubResult.SUCCESS_UNDELEGATED))
    assert alone.unexecuted == "nothing was delegated: the program was not executed"
    assert answer(record(StubResult.SUCCESS), flow="another suite") is None
    assert answer() is None, "a test that failed in its set-up has no record"


@pytest.mark.parametrize("named", ["operators/test_add.py", "operators", "."])
def test_the_suite_is_collected_from_its_own_root(tmp_path: Path, named: str) -> None:
    suite = tmp_path / "executorch/backends/test/suite"
    (suite / "operators").mkdir(parents=True)
    (suite / "conftest.py").touch()
    (suite / "operators/test_add.py").touch()
    answer = rooted_arguments([str(suite / named)], tmp_path)
    assert answer[answer.index("--rootdir") + 1] == str(suite.parent)
    assert "python_files" not in " ".join(answer)
    assert rooted_arguments([str(suite), "--device", "x"], tmp_path), "the suite has no option of that name"


def test_outputs_of_the_device_keep_their_shape_scalars_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Arrays in the place of tensors: this process has no torch.
    stub: Any = ModuleType("torch")
    stub.from_numpy = lambda array: array
    stub.utils = SimpleNamespace(_pytree=SimpleNamespace(tree_flatten=lambda tree: (list(tree), None)))
    monkeypatch.setitem(sys.modules, "torch", stub)
    scalar, image = np.array(3.5, np.float32), np.ones((1, 2, 3), np.float32)
    suite = BackendSuite.__new__(BackendSuite)
    suite._worker, suite._count = SimpleNamespace(scratch=tmp_path), 0  # type: ignore[assignment]
    suite._bundles = SimpleNamespace(pte=lambda path, _inputs: path.read_bytes())  # type: ignore[assignment]
    suite._runner = lambda program, **_: SimpleNamespace(outputs=((scalar, image),), program=program)  # type: ignore[assignment]
    made = suite._execute(b"program", ())
    assert [array.shape for array in made] == [(), (1, 2, 3)]
    assert not list(tmp_path.iterdir()), "the program is removed after its execution"
