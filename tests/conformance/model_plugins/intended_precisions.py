"""Plugin of pytest (`-p intended_precisions`): the precisions that the names of upstream's QNN flows promise.

executorch 1.5.1, backends/test/suite/flows/qualcomm.py: `use_fp16=(use_fp16,)` is a tuple, which is true for each flow,
and the flow `qnn_16a4w_block` quantizes to 8a8w. The plugin passes `use_fp16` itself, and quantizes that flow to
16a4w_block. docs/evidence/nightly_suite.md compares both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
from executorch.backends.qualcomm.tests.tester import QualcommTester, Quantize

FLOAT_FLOW, BLOCK_FLOW = "qnn", "qnn_16a4w_block"
_REPAIRED = set[str]()


def _make_tester(*, use_fp16: bool) -> Callable[..., QualcommTester]:
    def make(*arguments: Any, **named: Any) -> QualcommTester:
        return QualcommTester(*arguments, **{**named, "use_fp16": use_fp16})

    return make


def _block_stage() -> Quantize:
    quantizer = QnnQuantizer()
    quantizer.set_default_quant_config(QuantDtype.use_16a4w_block, is_conv_per_channel=True)
    return Quantize(quantizer=quantizer)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Repair each flow of QNN once."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        flow = callspec.params.get("test_runner") if callspec is not None else None
        if getattr(flow, "backend", "") != "qualcomm" or flow.name in _REPAIRED:
            continue
        _REPAIRED.add(flow.name)
        flow.tester_factory = _make_tester(use_fp16=flow.name == FLOAT_FLOW)
        if flow.name == BLOCK_FLOW:
            flow.quantize_stage_factory = _block_stage
