"""Programs with several contexts: passes that divide the graph, as in ExecuTorch's own tests of contexts.

QNN takes no `_clone_dim_order`, which copies a tensor: the operators before such a copy and the operators after it are
separate partitions, each with a context, and the CPU copies the tensors between them.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from executorch.backends.qualcomm._passes import FoldQDQ
from executorch.backends.qualcomm._passes.qnn_pass_manager import get_qnn_pass_manager_cls
from executorch.backends.qualcomm.builders.node_visitor import dq_ops
from executorch.backends.qualcomm.utils import constants
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.pass_base import ExportPass, PassResult


def split_passes(shares: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Return ExecuTorch's passes with SplitGraph, and the passes that each has to follow.

    The results are `passes_job` and `dep_table` of `to_edge_transform_and_lower_to_qnn`.
    """
    manager = get_qnn_pass_manager_cls()
    passes, after = manager.get_capture_program_passes(), manager.get_passes_dependency_for_capture_program()
    passes[SplitGraph] = {
        constants.QCOM_PASS_ACTIVATE_KEY: True,
        constants.QCOM_PASS_ARGS_KWARGS_DEFAULTS_KEY: {"shares": shares},
    }
    # After FoldQDQ the attributes of nodes hold the quantization, and no (de)quantize node is in the way of the split.
    after[SplitGraph] = [FoldQDQ]
    return passes, after


class SplitGraph(ExportPass):  # type: ignore[misc]
    """Pass that divides a graph into shares of about equal size; tensors for later shares go through copies."""

    def __init__(self, shares: int) -> None:
        super().__init__()
        self._shares = shares

    def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
        """Divide the graph in place. Raises ValueError for a graph with fewer operators in sequence than shares."""
        shares = _shares(graph_module.graph, self._shares)
        for node, share in shares.items():
            later = [user for user in node.users if shares.get(user, 0) > share]
            if later and isinstance(node.meta["val"], torch.Tensor):
                _copy_for(node, later)
        graph_module.recompile()
        return PassResult(graph_module, True)


def _shares(graph: torch.fx.Graph, count: int) -> dict[torch.fx.Node, int]:
    """Return the share, from 0, of every operator and of the nodes that pick its outputs.

    The depth of an operator decides, so that each share needs the share before it. ExecuTorch would join independent
    branches into one partition again.
    """
    operators = _operators(graph)
    depths: dict[torch.fx.Node, int] = {}
    for node in graph.nodes:
        below = max((depths[one] for one in node.all_input_nodes if one in depths), default=0)
        if node in operators:
            depths[node] = below + 1
        elif node.op == "call_function" and node.target is operator.getitem:
            depths[node] = below
    numbers = Counter(depths[node] for node in operators)
    if len(numbers) < count:
        raise ValueError(f"{len(numbers)} operators of the graph need each other in turn: too few for {count} shares")
    share, done, of_depth = 0, 0, {0: 0}
    for depth in range(1, len(numbers) + 1):
        left = len(numbers) - depth + 1
        is_full = done * count >= (share + 1) * len(operators)
        if share < count - 1 and (is_full or left <= count - 1 - share):
            share += 1
        of_depth[depth] = share
        done += numbers[depth]
    return {node: of_depth[depth] for node, depth in depths.items()}


def _operators(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Return the operators, without nodes that only lead to the dequantization of a parameter."""
    of_parameters: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.target in dq_ops or (node.users and of_parameters.issuperset(node.users)):
            of_parameters.add(node)
    return {
        node
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem and node not in of_parameters
    }


def _copy_for(node: torch.fx.Node, users: list[torch.fx.Node]) -> None:
    """Let `users` read a copy of the output of `node`."""
    with node.graph.inserting_after(node):
        copy = node.graph.call_function(exir_ops.edge.dim_order_ops._clone_dim_order.default, (node,))  # noqa: SLF001
    copy.meta["val"] = node.meta["val"]
    if constants.QCOM_QUANT_ATTRS in node.meta:
        copy.meta[constants.QCOM_QUANT_ATTRS] = node.meta[constants.QCOM_QUANT_ATTRS]
    for user in users:
        user.replace_input_with(node, copy)
