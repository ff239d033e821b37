"""Patterns of convolution and batch_norm that match nothing. Imports torch.

For a graph with a batch_norm torchao exports 96 constant patterns, 24 for each kind of convolution: 14 s of processor
time, in which 20 operators compile. The pattern of a convolution matches nothing in a graph without that convolution.

Tried with torch 2.13 and the torchao of ExecuTorch 1.5.1; another version is not changed.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from torch._ops import OpOverload

from farm.builds.compile.flows.shortcuts.tried import has_parameters, is_tried

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULE = "torchao.quantization.pt2e.qat_utils"
_FOLD, _EXPORT, _REPLACE = (
    "_fold_conv_bn_qat_helper",
    "_get_aten_graph_module_for_pattern",
    "replace_pattern_with_filters",
)


@contextmanager
def bn_patterns() -> Iterator[None]:
    """Let torchao export the patterns of a kind of convolution only for a graph with one while the body runs."""
    # A flow that quantizes has imported the module.
    qat_utils = sys.modules.get(_MODULE)
    fold: Any = getattr(qat_utils, _FOLD, None)
    is_known = callable(fold) and has_parameters(fold, "m", "conv_fn", "example_inputs", "is_cuda")
    if not is_tried() or not is_known or not all(hasattr(qat_utils, name) for name in (_EXPORT, _REPLACE)):
        yield
        return

    def fold_if_there(m: Any, conv_fn: Any, example_inputs: Any, is_cuda: bool) -> Any:
        if _has(m, f"aten::{conv_fn.__name__}"):
            return fold(m, conv_fn, example_inputs, is_cuda)
        # The other steps of the function are taken, as they tidy the graph.
        with patch.object(qat_utils, _EXPORT, _no_pattern), patch.object(qat_utils, _REPLACE, _no_matches):
            return fold(m, conv_fn, example_inputs, is_cuda)

    with patch.object(qat_utils, _FOLD, fold_if_there):
        yield


def _has(module: Any, operator: str) -> bool:
    """Return whether a graph calls an operator."""
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    names = [one._schema.name for one in targets if isinstance(one, OpOverload)]  # noqa: SLF001 - torch has no public name
    return operator in names


def _no_pattern(*_: Any, **__: Any) -> None:
    return None


def _no_matches(*_: Any, **__: Any) -> list[Any]:
    return []
