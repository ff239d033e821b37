"""Export of a case, shared by its precisions. Imports torch.

A case is exported in floating point and quantized afterwards: its export is the same at every precision, and a fifth of
the time of compiling an operator. The last export of a process is kept, if its weights are small, and is taken for a
module with equal weights and outputs. A builder that traces has a fork for every job, and no earlier export.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import torch

from farm.builds.compile.flows.calls import equal
from farm.builds.compile.flows.flow import Lowering

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from farm.builds.compile.flows.calls import Tensors
    from farm.suites.suite import Case

_MOST_BYTES = 64 * 2**20
"""Most bytes of weights of a kept export, so that a builder does not grow by a second model."""


class _Kept(NamedTuple):
    """Export, and everything that decides it."""

    case: Case
    method: str
    kind: type
    state: Mapping[str, torch.Tensor]
    inputs: Tensors
    outputs: Sequence[Tensors]
    exported: torch.export.ExportedProgram


_last: list[_Kept] = []


@contextmanager
def shared_exports() -> Iterator[None]:
    """Let a lowering take the export of the lowering before it if both have the same case and module."""
    export = Lowering.export

    def export_or_share(lowering: Lowering) -> torch.export.ExportedProgram:
        if not _may_share(lowering):
            return export(lowering)
        if _last and _is_same(_last[0], lowering):
            with lowering.watch.step("export"):
                return _last[0].exported
        _last.clear()
        # The state before the export, as a module may change while it is traced.
        state = {name: tensor.detach().clone() for name, tensor in lowering.module.state_dict().items()}
        exported = export(lowering)
        size = sum(tensor.nbytes for tensor in state.values())
        if size <= _MOST_BYTES:
            _last.append(
                _Kept(
                    lowering.case, lowering.method, type(lowering.module), state, lowering.example.inputs,
                    lowering.outputs, exported,
                )
            )  # fmt: skip
        return exported

    with patch.object(Lowering, "export", export_or_share):
        yield


def _may_share(lowering: Lowering) -> bool:
    """Return whether the outputs of the module are known, and it has one method, fixed sizes and no state."""
    case = lowering.case
    return bool(lowering.outputs) and not lowering.others and not case.state and lowering.example.dynamic_shapes is None


def _is_same(kept: _Kept, lowering: Lowering) -> bool:
    """Return whether the module of `lowering` is the module of the kept export, made again."""
    state = lowering.module.state_dict()
    return (
        (kept.case, kept.method, kept.kind) == (lowering.case, lowering.method, type(lowering.module))
        and state.keys() == kept.state.keys()
        and all(equal(tensor, kept.state[name]) for name, tensor in state.items())
        and _are_equal([kept.inputs, *kept.outputs], [lowering.example.inputs, *lowering.outputs])
    )


def _are_equal(some: Sequence[Tensors], others: Sequence[Tensors]) -> bool:
    return [len(one) for one in some] == [len(one) for one in others] and all(
        equal(one, other) for pair in zip(some, others, strict=True) for one, other in zip(*pair, strict=True)
    )
