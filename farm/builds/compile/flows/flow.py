"""What the flows of the backends have in common: a module in, a lowered edge program out. Imports torch, executorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig

from farm.base.memory import peak_bytes, reset_peak
from farm.suites.suite import FORWARD, Case, Target


class Stopwatch:
    """Wall time by step, and the most memory that this process has had meanwhile."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._has_peak = reset_peak()
        self._started = time.perf_counter()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time the body as `name`, with what had this name before."""
        started = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 4)

    def finish(self) -> dict[str, float]:
        """Return the seconds by step, and in `total`."""
        self.seconds["total"] = round(time.perf_counter() - self._started, 4)
        return self.seconds

    @property
    def peak_bytes(self) -> int:
        """The greatest resident memory since it was started; 0 where the system does not say."""
        return peak_bytes() if self._has_peak else 0


class Example(NamedTuple):
    """What a module is exported with."""

    inputs: tuple[torch.Tensor, ...]
    dynamic_shapes: tuple[Any, ...] | None
    """As torch.export takes them, by parameter of `forward`; None where every size is fixed."""


class Lowering(NamedTuple):
    """A module that is to be lowered, and what for."""

    module: torch.nn.Module
    example: Example
    samples: Sequence[tuple[torch.Tensor, ...]]
    """The inputs of all samples, to calibrate with."""
    target: Target
    versions: Mapping[str, str]
    """What the bundle depends on besides its job, as in its manifest: farm/builds/bundles/key.py."""
    watch: Stopwatch
    case: Case
    """For its features, and the files that they name."""
    folder: Path
    """Where the bundle is made: what is beside its program is left there."""
    method: str = FORWARD
    others: Mapping[str, Lowering] = {}
    """The other methods of the same program by name, where its backend can have several; none has others itself."""

    @property
    def methods(self) -> dict[str, Lowering]:
        """All methods of the program, in the order that ExecuTorch serializes them in."""
        return dict(sorted({self.method: self, **self.others}.items()))

    def export(self) -> torch.export.ExportedProgram:
        """Return the module as a graph."""
        with self.watch.step("export"):
            # Strict, because passes of ExecuTorch 1.5 (DecomposeMinMaxDim and others) read `source_fn_stack`, which
            # only that sets: without it max_dim ends the process in the QNN adaptor.
            inputs, dynamic_shapes = self.example
            return torch.export.export(self.module, inputs, dynamic_shapes=dynamic_shapes, strict=True)


class Lowered(NamedTuple):
    """A module, lowered to a backend."""

    edge: EdgeProgramManager
    quantized: torch.nn.Module | None
    """The quantized module, which runs on the CPU; None where nothing was quantized."""
    config: ExecutorchBackendConfig | None
    """How to serialize it; None is ExecuTorch's default."""
    exported: torch.export.ExportedProgram
    """The module as it was exported, before anything of the backend."""
    spill_fill_bytes: int | None = None
    """Of the buffer that its contexts share; None where they share none."""


Flow = Callable[[Lowering], Lowered]
