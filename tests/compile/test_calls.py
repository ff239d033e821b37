"""Calls of a module: a write reaches no other sample, and outputs have names."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from farm.compile.flows.calls import ModuleState, call, flat_outputs, output_names, state_kept
from farm.compile.flows.state import run_samples
from farm.compile.flows.writes import run_reference
from farm.errors import ConfigError
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


def samples() -> list[tuple[torch.Tensor, ...]]:
    return [(X.clone() * factor,) for factor in (1.0, 2.0, 3.0)]


@pytest.mark.parametrize("forward", [in_place, through])
def test_a_module_that_writes_to_its_input_leaves_the_samples_alone(forward: Any) -> None:
    given = samples()
    ran = run_samples(module_of(forward), CASE, given)
    for (mine,), (kept,), (left,) in zip(given, ran.inputs, ran.left, strict=True):
        assert torch.equal(mine, kept)
        assert not torch.equal(mine, left)
    assert [torch.equal(one[0], expected[0]) for one, expected in zip(given, samples(), strict=True)] == [True] * 3


def test_an_input_that_is_returned_is_no_later_input() -> None:
    # `through` returns its input: a second call with the same tensors once began where the first had ended.
    given = samples()
    first, second = (run_samples(module_of(through), CASE, given).outputs for _ in range(2))
    assert [one[0].tolist() for one in first] == [one[0].tolist() for one in second]


@pytest.mark.parametrize("forward", [own_buffer, view_of_buffer])
def test_a_returned_buffer_is_another_output_in_each_sample(forward: Any) -> None:
    outputs = run_samples(module_of(forward, c=torch.zeros(4)), CASE, samples()).outputs
    assert len({tuple(one[0].tolist()) for one in outputs}) == 3


def test_state_that_is_handed_on_survives_a_later_write() -> None:
    def sums(_: Any, x: torch.Tensor, total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total += x
        return total * 2, total

    case = Case(
        "odd", "sums", "", (InputSpec((4,)),) * 2, folder="/nowhere", samples=3, state=(State(output=1, input=1),)
    )  # fmt: skip
    ran = run_samples(module_of(sums), case, [(torch.ones(4), torch.zeros(4))] * 3)
    assert [one[1][0].item() for one in ran.outputs] == [1, 2, 3]
    assert [one[1][0].item() for one in ran.inputs] == [0, 1, 2]


def test_the_writes_of_a_reference_are_seen_by_name() -> None:
    found = run_reference(module_of(view_of_buffer, c=torch.zeros(4)), CASE, samples())
    assert (found.writes.inputs, found.writes.buffers, found.is_changed) == ((), ("c",), True)
    found = run_reference(module_of(in_place), CASE, samples())
    assert found.writes.named(found.input_names) == ("input x",)
    assert not found.is_changed


def test_a_buffer_that_is_replaced_or_written_past_its_version_is_a_write() -> None:
    def replaces(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.c = x * 2
        return x

    def past_its_version(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.c.data.mul_(2.0)
        return x

    for forward in (replaces, past_its_version):
        assert run_reference(module_of(forward, c=torch.ones(4)), CASE, samples()).writes.buffers == ("c",)


def test_a_parameter_that_is_written_past_its_version_is_refused() -> None:
    def grows(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(2.0)
        return x * self.weight

    def transposed(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.t()[0].zero_()
        return x * self.weight.sum()

    for forward, weight in ((grows, torch.ones(4)), (transposed, torch.ones(2, 3).t())):
        module = module_of(forward)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        with pytest.raises(ConfigError, match="forward writes to its parameter weight: "):
            run_reference(module, CASE, samples())


@pytest.mark.parametrize("kept", [torch.ones(4), np.ones(4)], ids=["a tensor", "an array"])
def test_an_attribute_that_is_written_in_place_changes_the_module(kept: Any) -> None:
    def past_its_version(self: Any, x: torch.Tensor) -> torch.Tensor:
        memory = self.kept.data if isinstance(self.kept, torch.Tensor) else self.kept
        memory *= 2.0
        return x * torch.as_tensor(self.kept).sum()

    def reads(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * torch.as_tensor(self.kept).sum()

    for forward, changed in ((past_its_version, True), (reads, False)):
        module = module_of(forward)
        module.kept = kept
        assert run_reference(module, CASE, samples()).is_changed is changed


def test_a_buffer_of_nan_that_stays_is_no_write() -> None:
    def reads(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x + self.c.nan_to_num()

    assert not run_reference(module_of(reads, c=torch.full((4,), float("nan"))), CASE, samples()).writes.buffers


def test_what_a_module_counts_changes_it() -> None:
    def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls

    module = module_of(counts)
    module.calls = 0  # type: ignore[assignment]
    assert run_reference(module, CASE, samples()).is_changed
    assert not ModuleState(module).is_changed()


def test_a_module_that_writes_to_a_parameter_is_refused() -> None:
    def grows(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(2.0)
        return x * self.weight

    module = module_of(grows)
    module.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    with pytest.raises(ConfigError, match=r"suite.toml: case\.one\.module: forward writes to its parameter weight: "):
        run_reference(module, CASE, samples())


def test_a_graph_begins_again_where_it_began() -> None:
    module = module_of(own_buffer, c=torch.zeros(4)).eval()
    graph = torch.export.export(module, (X,), strict=True).module()
    with state_kept(graph):
        call(graph, (X,))
    assert module.c.tolist() == [0.0] * 4


class Pair(NamedTuple):
    left: torch.Tensor
    right: tuple[torch.Tensor, torch.Tensor]


Scores = namedtuple("Scores", "boxes")


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (X, ("",)),
        ((X, X), ("", "")),
        ({"out": X, "aux": X}, ("out", "aux")),
        ((X, [X, X]), ("[0]", "[1].0", "[1].1")),
        ([{"boxes": X}, X], ("[0].boxes", "[1]")),
        (Pair(X, (X, X)), ("left", "right.0", "right.1")),
        (Scores(X), ("boxes",)),
        ({"pyramid": {"p3": X, "p4": [X]}}, ("pyramid.p3", "pyramid.p4.0")),
    ],
)
def test_outputs_have_the_paths_of_what_the_module_returns(outputs: Any, names: tuple[str, ...]) -> None:
    assert output_names(outputs) == names
    assert len(flat_outputs(outputs, CASE)) == len(names)


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        (None, "forward returns None, expected tensors alone"),
        ((X, None), r"forward returns None in output \[1\], expected"),
        ({"out": X, "count": 3}, "forward returns 3 in output count, expected"),
        ((X, 0.5), r"forward returns 0\.5 in output \[1\]"),
        ((X, [X, True]), r"forward returns True in output \[1\]\.1"),
        ((X, "label"), r"forward returns a str in output \[1\]"),
        ((), "forward returns no tensor"),
    ],
)
def test_what_is_no_tensor_is_refused_in_one_line(outputs: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"suite\.toml: case\.one\.module: {problem}") as caught:
        flat_outputs(outputs, CASE)
    assert "\n" not in str(caught.value)


def test_names_of_outputs_are_one_line_and_none_is_anothers() -> None:
    outputs = {"a.b": X, "a": {"b": X}, "two\nlines": X, "[0]": X, "": X, "with blank": [X]}
    names = output_names(outputs)
    assert len(set(names)) == 6
    assert names == ("['a.b']", "a.b", "['two\\nlines']", "['[0]']", "['']", "['with blank'].0")
