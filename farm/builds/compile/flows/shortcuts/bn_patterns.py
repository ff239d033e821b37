"""Patterns of convolution and batch_norm that match nothing. Imports torch.

For a graph with a batch_norm torchao exports 96 constant patterns, 24 for each kind of convolution: 14 s of processor
time, in which 20 operators compile. The pattern of a convolution matches nothing in a graph without that convolution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from torch._ops import OpOverload

from farm.builds.compile.flows.shortcuts.tried import replaced


def bn_patterns() -> AbstractContextManager[None]:
    """Let torchao export the patterns of a kind of convolution only for a graph with one while the body runs."""
    # A flow that quantizes has imported the module.
    qat_utils = sys.modules.get("torchao.quantization.pt2e.qat_utils")

    def if_there(fold: Callable[..., Any]) -> Callable[..., Any]:
        def fold_if_there(m: Any, conv_fn: Any, example_inputs: Any, is_cuda: bool) -> Any:
            if _has(m, f"aten::{conv_fn.__name__}"):
                return fold(m, conv_fn, example_inputs, is_cuda)
            # The other steps of the function are taken, as they tidy the graph.
            with (
                patch.object(qat_utils, "_get_aten_graph_module_for_pattern", lambda *_, **__: None),
                patch.object(qat_utils, "replace_pattern_with_filters", lambda *_, **__: []),
            ):
                return fold(m, conv_fn, example_inputs, is_cuda)

        return fold_if_there

    return replaced(qat_utils, "_fold_conv_bn_qat_helper", if_there, tried_only=True)


def _has(module: Any, operator: str) -> bool:
    """Return whether a graph calls an operator."""
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    names = [one._schema.name for one in targets if isinstance(one, OpOverload)]  # noqa: SLF001 - torch has no public name
    return operator in names
