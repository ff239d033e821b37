"""Calls modules that write to inputs, buffers and attributes, and prints samples, outputs and refusals as JSON."""

from __future__ import annotations

import json
import sys
from collections import namedtuple
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from farm.base.errors import ConfigError
from farm.builds.compile.flows.calls import ModuleState, call, flat_outputs, output_names, state_kept
from farm.builds.compile.flows.factory import make_inputs
from farm.builds.compile.flows.state import run_samples
from farm.builds.compile.flows.writes import run_reference
from farm.suites.state import State
from farm.suites.suite import Case, InputSpec

CASE = Case("odd", "one", ".odd:One", (InputSpec((4,)),), folder="/nowhere", samples=3)
X = torch.tensor([1.0, -2.0, 3.0, -4.0])


def module_of(forward: Any, **tensors: torch.Tensor) -> torch.nn.Module:
    made = type("Made", (torch.nn.Module,), {"forward": forward})()
    for name, tensor in tensors.items():
        made.register_buffer(name, tensor)
    return made


def in_place(_: Any, x: torch.Tensor) -> torch.Tensor:
    x[:2] = 0.0
    return x.relu() + x


def through(_: Any, x: torch.Tensor) -> torch.Tensor:
    x += 1.0
    return x


def own_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.c.copy_(x * 2)
    return self.c


def view_of_buffer(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    self.c[1:3].add_(x[1:3])
    return self.c[1:3], x


def replaces(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.c = x * 2
    return x


def buffer_past_its_version(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.c.data.mul_(2.0)
    return x


def reads_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x + self.c.nan_to_num()


def grows(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.weight.mul_(2.0)
    return x * self.weight


def grows_past_its_version(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.weight.data.mul_(2.0)
    return x * self.weight


def transposed(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.weight.data.t()[0].zero_()
    return x * self.weight.sum()


def attribute_past_its_version(self: Any, x: torch.Tensor) -> torch.Tensor:
    memory = self.kept.data if isinstance(self.kept, torch.Tensor) else self.kept
    memory *= 2.0
    return x * torch.as_tensor(self.kept).sum()


def reads_attribute(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * torch.as_tensor(self.kept).sum()


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return x * self.calls


def sums(_: Any, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total += x
    return total * 2, total


class Pair(NamedTuple):
    left: torch.Tensor
    right: tuple[torch.Tensor, torch.Tensor]


Scores = namedtuple("Scores", "boxes")

NAMED = {
    "a tensor": X,
    "a tuple": (X, X),
    "a dict": {"out": X, "aux": X},
    "a list in a tuple": (X, [X, X]),
    "a dict in a list": [{"boxes": X}, X],
    "a typed named tuple": Pair(X, (X, X)),
    "a named tuple": Scores(X),
    "a dict in a dict": {"pyramid": {"p3": X, "p4": [X]}},
    "odd keys": {"a.b": X, "a": {"b": X}, "two\nlines": X, "[0]": X, "": X, "with blank": [X]},
}
REFUSED = {
    "None": None,
    "a None": (X, None),
    "a count": {"out": X, "count": 3},
    "a number": (X, 0.5),
    "a bool": (X, [X, True]),
    "a text": (X, "label"),
    "nothing": (),
}


def samples() -> list[tuple[torch.Tensor, ...]]:
    return [(X.clone() * factor,) for factor in (1.0, 2.0, 3.0)]


def numbers(tensors: Iterable[Iterable[torch.Tensor]]) -> list[list[Any]]:
    return [[one.tolist() for one in sample] for sample in tensors]


def refusal(run: Callable[[], object]) -> str:
    """Return the message of the ConfigError that `run` raises; empty without one."""
    try:
        run()
    except ConfigError as error:
        return str(error)
    return ""


def sampled(module: torch.nn.Module) -> dict[str, object]:
    """Return the samples before and after a run, with the inputs, changed inputs and outputs of the module."""
    given = samples()
    ran = run_samples(module, CASE, given)
    again = run_samples(module, CASE, given)
    return {
        "expected": numbers(samples()),
        "given": numbers(given),
        "inputs": numbers(ran.inputs),
        "left": numbers(ran.left),
        "outputs": numbers(ran.outputs),
        "outputs again": numbers(again.outputs),
    }


def state_handed_on() -> dict[str, object]:
    case = Case(
        "odd", "sums", "", (InputSpec((4,)),) * 2, folder="/nowhere", samples=3, state=(State(output=1, input=1),)
    )  # fmt: skip
    ran = run_samples(module_of(sums), case, [(torch.ones(4), torch.zeros(4))] * 3)
    return {"outputs": numbers(ran.outputs), "inputs": numbers(ran.inputs)}


def writes(module: torch.nn.Module) -> dict[str, object]:
    found = run_reference(module, CASE, samples())
    return {
        "inputs": found.writes.inputs,
        "buffers": found.writes.buffers,
        "named": found.writes.named(found.input_names),
        "is_changed": found.is_changed,
    }


def parameter_refusal(forward: Any, weight: torch.Tensor) -> str:
    module = module_of(forward)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return refusal(lambda: run_reference(module, CASE, samples()))


def is_changed_by(forward: Any, kept: Any) -> bool:
    module = module_of(forward)
    module.kept = kept
    return run_reference(module, CASE, samples()).is_changed


def counted() -> dict[str, object]:
    module = module_of(counts)
    module.calls = 0
    return {"run": run_reference(module, CASE, samples()).is_changed, "later": ModuleState(module).is_changed()}


def buffer_after_a_graph() -> list[float]:
    module = module_of(own_buffer, c=torch.zeros(4)).eval()
    graph = torch.export.export(module, (X,), strict=True).module()
    with state_kept(graph):
        call(graph, (X,))
    return module.c.tolist()


if __name__ == "__main__":
    uniform = InputSpec((1000,), distribution="uniform", low=2.0, high=6.0)
    (uniform_input,) = make_inputs(Case("odd", "one", ".odd:One", (uniform,), folder="/nowhere"), 0)
    sys.stdout.write(json.dumps({
        "uniform": [float(uniform_input.min()), float(uniform_input.mean()), float(uniform_input.max())],
        "samples": {
            "in_place": sampled(module_of(in_place)),
            "through": sampled(module_of(through)),
            "own_buffer": sampled(module_of(own_buffer, c=torch.zeros(4))),
            "view_of_buffer": sampled(module_of(view_of_buffer, c=torch.zeros(4))),
        },
        "state": state_handed_on(),
        "writes": {
            "view_of_buffer": writes(module_of(view_of_buffer, c=torch.zeros(4))),
            "in_place": writes(module_of(in_place)),
            "replaces": writes(module_of(replaces, c=torch.ones(4))),
            "past its version": writes(module_of(buffer_past_its_version, c=torch.ones(4))),
            "nan": writes(module_of(reads_buffer, c=torch.full((4,), float("nan")))),
        },
        "parameters": {
            "grows": parameter_refusal(grows, torch.ones(4)),
            "past its version": parameter_refusal(grows_past_its_version, torch.ones(4)),
            "transposed": parameter_refusal(transposed, torch.ones(2, 3).t()),
        },
        "attributes": {
            "a tensor": {
                "written": is_changed_by(attribute_past_its_version, torch.ones(4)),
                "read": is_changed_by(reads_attribute, torch.ones(4)),
            },
            "an array": {
                "written": is_changed_by(attribute_past_its_version, np.ones(4)),
                "read": is_changed_by(reads_attribute, np.ones(4)),
            },
        },
        "counts": counted(),
        "graph": buffer_after_a_graph(),
        "names": {
            name: {"names": output_names(outputs), "flat": len(flat_outputs(outputs, CASE))}
            for name, outputs in NAMED.items()
        },
        "refused": {
            name: refusal(lambda outputs=outputs: flat_outputs(outputs, CASE)) for name, outputs in REFUSED.items()
        },
    }))  # fmt: skip
