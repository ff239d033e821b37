"""Run as a program, with the environment of a host SDK: compiles programs that generate text into a folder.

All but sharing.pte are of one stub of a static decoder, in floating point on the CPU, with the inputs and outputs of
ExecuTorch's static_llama in the smallest decoder with two layers. weights.npz has its weights: tests compute the
expected text without caches, masks and calls.

hybrid.pte     `kv_forward` takes 1 token, `prefill_forward` 8; the second layer has a sliding window
lookahead.pte  `kv_forward` takes 4 tokens, `prefill_forward` 12, which is no part of the context
whole.pte      `prefill_forward` takes the whole context and has no caches; the program brings the memory of all inputs
rounded.pte    `kv_forward` gives its logits as uint16, as HTP programs do; read here, and never run
stateful.pte   (float32[2] x, float32[2] state) -> (their sum twice, their sum), with llama::fallback between
sharing.pte    two methods on the HTP, SM8650, with weights that they share
"""

from __future__ import annotations

import sys
from pathlib import Path

import executorch.extension.llm.custom_ops.op_fallback  # noqa: F401
import numpy as np
import torch
from compile_models import module_of, quantized, spec_of
from executorch.backends.qualcomm.quantizer.quantizer import QuantDtype
from executorch.backends.qualcomm.utils.utils import (
    to_edge_transform_and_lower_to_qnn,
)
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
from executorch.exir.dialects._ops import ops as exir_ops
from executorch.exir.passes import MemoryPlanningPass

from farm.builds.compile.flows.shortcuts.every import less_work

CONTEXT, VOCABULARY, DIM, HEADS, LAYERS, WINDOW = 32, 24, 8, 2, 2, 6


class StubDecoder(torch.nn.Module):
    """Decoder of learned positions and attention alone: errors in caches, masks and positions show."""

    def __init__(self, *, windowed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.windowed = windowed
        self.token = torch.nn.Parameter(torch.randn(VOCABULARY, DIM))
        self.place = torch.nn.Parameter(torch.randn(CONTEXT, DIM))
        for name in ("q", "k", "v"):
            setattr(self, name, torch.nn.Parameter(torch.randn(LAYERS, DIM, DIM) * 0.5))
        self.out = torch.nn.Parameter(torch.randn(DIM, VOCABULARY))

    def forward(self, tokens, masks, places, keys, values):
        width = tokens.shape[1]
        hidden = self.token[tokens.long()] + self.place[places.long() if places is not None else torch.arange(width)]
        new_keys, new_values = [], []
        for layer in range(LAYERS):
            q, k, v = (
                (hidden @ weight[layer]).reshape(1, width, HEADS, DIM // HEADS).transpose(1, 2)
                for weight in (self.q, self.k, self.v)
            )
            k = k.transpose(2, 3)
            new_keys.append(k)
            new_values.append(v)
            if keys is not None:
                k, v = torch.cat([keys[layer], k], dim=3), torch.cat([values[layer], v], dim=2)
            scores = torch.softmax(q @ k + masks[layer if self.windowed else 0], dim=-1)
            hidden = hidden + (scores @ v).transpose(1, 2).reshape(1, width, DIM)
        return hidden @ self.out, new_keys, new_values


class Call(torch.nn.Module):
    """The decoder with its inputs one after the other."""

    def __init__(self, decoder: StubDecoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens, masks, places=None, keys=None, values=None):
        return self.decoder(tokens, masks, places, keys, values)


def inputs_of(decoder: StubDecoder, width: int):
    past = CONTEXT - width
    masks = [torch.zeros(1, 1, width, CONTEXT) for _ in range(1 + decoder.windowed)]
    tokens = torch.zeros(1, width, dtype=torch.int32)
    if not past:
        return tokens, masks
    keys = [torch.zeros(1, HEADS, DIM // HEADS, past) for _ in range(LAYERS)]
    values = [torch.zeros(1, HEADS, past, DIM // HEADS) for _ in range(LAYERS)]
    return tokens, masks, torch.zeros(1, width, dtype=torch.int32), keys, values


def compile_decoder(path: Path, decode: int, prefill: int, *, planned: bool = False, windowed: bool = False) -> None:
    decoder = StubDecoder(windowed=windowed).eval()
    widths = {"kv_forward": decode, "prefill_forward": prefill}
    exported = {
        name: torch.export.export(Call(decoder), inputs_of(decoder, width), strict=False)
        for name, width in widths.items()
    }
    constants = {"get_max_context_len": CONTEXT, "get_vocab_size": VOCABULARY, "get_n_layers": LAYERS}
    if decoder.windowed:
        constants["get_sliding_window"] = WINDOW
    config = ExecutorchBackendConfig(
        memory_planning_pass=MemoryPlanningPass(alloc_graph_input=planned, alloc_graph_output=planned)
    )
    path.write_bytes(to_edge(exported, constant_methods=constants).to_executorch(config).buffer)


class Rounded(Call):
    def forward(self, tokens, masks, places=None, keys=None, values=None):
        logits, new_keys, new_values = super().forward(tokens, masks, places, keys, values)
        return (logits * 100 + 30000).to(torch.uint16), new_keys, new_values


def compile_rounded(path: Path) -> None:
    decoder = StubDecoder().eval()
    exported = torch.export.export(Rounded(decoder), inputs_of(decoder, 1), strict=False)
    constants = {"get_max_context_len": CONTEXT, "get_vocab_size": VOCABULARY, "get_n_layers": LAYERS,
                 "get_logits_scale": 0.01, "get_logits_zero_point": 30000}  # fmt: skip
    unchecked = EdgeCompileConfig(_check_ir_validity=False)
    edge = to_edge({"kv_forward": exported}, constant_methods=constants, compile_config=unchecked)
    path.write_bytes(edge.to_executorch().buffer)


def compile_stateful(path: Path) -> None:
    module = module_of(lambda _, x, state: ((x + state) * 2, x + state))
    # Two tensors, as an export merges a tensor that is given twice into one input.
    edge = to_edge(torch.export.export(module, (torch.randn(2), torch.randn(2)), strict=False))
    graph = edge.exported_program().graph_module.graph
    first = next(node for node in graph.nodes if node.op == "call_function")
    # ExecuTorch's marker between the parts of a decoder; an export would drop it as an operator without effect.
    with graph.inserting_after(first):
        fallback = graph.call_function(exir_ops.edge.llama.fallback.default, (first,))
    fallback.meta = dict(first.meta)
    for user in list(first.users):
        if user is not fallback:
            user.replace_input_with(first, fallback)
    path.write_bytes(edge.to_executorch().buffer)


def compile_sharing(path: Path) -> None:
    torch.manual_seed(0)
    up = module_of(lambda self, x: torch.relu(self.linear(x)), linear=torch.nn.Linear(16, 64))
    both = module_of(lambda self, x: self.down(self.up(x)), up=up, down=torch.nn.Linear(64, 16))
    sample = (torch.randn(1, 16),)
    modules = {name: quantized(one, [sample], QuantDtype.use_8a8w) for name, one in (("both", both), ("up", up))}
    spec = spec_of(sharing=True)
    lowered = to_edge_transform_and_lower_to_qnn(modules, dict.fromkeys(modules, sample), dict.fromkeys(modules, spec))
    path.write_bytes(lowered.to_executorch().buffer)


def main(target: Path) -> None:
    weights = {name: parameter.detach().numpy() for name, parameter in StubDecoder().named_parameters()}
    np.savez(target / "weights.npz", heads=HEADS, window=WINDOW, **weights)
    compile_decoder(target / "hybrid.pte", 1, 8, windowed=True)
    compile_decoder(target / "lookahead.pte", 4, 12)
    compile_decoder(target / "whole.pte", 1, CONTEXT, planned=True)
    compile_rounded(target / "rounded.pte")
    compile_stateful(target / "stateful.pte")
    compile_sharing(target / "sharing.pte")


if __name__ == "__main__":
    with less_work():
        main(Path(sys.argv[1]))
