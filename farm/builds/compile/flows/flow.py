"""Common interface of the backends' flows: a module in, a lowered edge program out. Imports torch and executorch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig

from farm.base.machine import peak_bytes, reset_peak
from farm.suites.suite import FORWARD, Case, Target


class Stopwatch:
    """Wall time by step, and the peak memory of this process since the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._has_peak = reset_peak()
        self._started = time.perf_counter()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of the body to the step `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - started, 4)

    def finish(self) -> dict[str, float]:
        """Return the seconds by step, and in `total`."""
        self.seconds["total"] = round(time.perf_counter() - self._started, 4)
        return self.seconds

    @property
    def peak_bytes(self) -> int:
        """Peak resident memory since the start, in bytes; 0 on a system that does not report it."""
        return peak_bytes() if self._has_peak else 0


class Example(NamedTuple):
    """Inputs of an export."""

    inputs: tuple[torch.Tensor, ...]
    dynamic_shapes: tuple[Any, ...] | None
    """Dynamic sizes for torch.export, by parameter of `forward`; None for fixed sizes."""

    def export(self, module: torch.nn.Module) -> torch.export.ExportedProgram:
        """Return `module` as a graph."""
        # Passes of ExecuTorch 1.5 (DecomposeMinMaxDim and others) read `source_fn_stack`, which only a strict
        # export sets: without it max_dim ends the process in the QNN adaptor.
        return torch.export.export(module, self.inputs, dynamic_shapes=self.dynamic_shapes, strict=True)


class Lowering(NamedTuple):
    """Module to lower, with its target and samples."""

    module: torch.nn.Module
    example: Example
    samples: Sequence[tuple[torch.Tensor, ...]]
    """Inputs of all samples, for the calibration."""
    target: Target
    versions: Mapping[str, str]
    """Versions that the bundle depends on besides its job, as in its manifest: farm/builds/bundles/key.py."""
    watch: Stopwatch
    case: Case
    """Case with the features, and the files that they name."""
    folder: Path
    """Folder of the new bundle, for files beside the program."""
    method: str = FORWARD
    outputs: Sequence[tuple[torch.Tensor, ...]] = ()
    """Outputs of the module for all samples; () for an unknown run."""
    others: Mapping[str, Lowering] = {}
    """Other methods of the same program by name, on a backend with several; they have no others themselves."""

    @property
    def methods(self) -> dict[str, Lowering]:
        """Methods of the program, in ExecuTorch's order of serialization."""
        return dict(sorted({self.method: self, **self.others}.items()))

    def export(self) -> torch.export.ExportedProgram:
        """Return the module as a graph."""
        with self.watch.step("export"):
            return self.example.export(self.module)


class Lowered(NamedTuple):
    """Module that was lowered to a backend."""

    edge: EdgeProgramManager
    quantized: torch.nn.Module | None
    """Quantized module, which runs on the CPU; None for a precision without quantization."""
    config: ExecutorchBackendConfig | None
    """Settings of the serialization; None for ExecuTorch's defaults."""
    exported: torch.export.ExportedProgram
    """Exported module, before all steps of the backend."""
    spill_fill_bytes: int | None = None
    """Size of the buffer that its contexts share; None without a shared buffer."""


Flow = Callable[[Lowering], Lowered]
