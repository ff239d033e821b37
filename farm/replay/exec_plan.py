"""Programs of one `farm exec`: a `.pte` or a module, for one SoC or several, each with its fit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.errors import UsageError
from farm.builds.toolchains.prepare import prepare
from farm.replay.module_program import NamedModule, compile_module, module_job, precision_of, write_example_inputs
from farm.replay.program_fit import FitLine, fit_of
from farm.replay.ready_program import ReadyProgram, ReadyRequest, plan_ready
from farm.results.numerics import Figures, compare, worst

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.base.config.settings import Config
    from farm.builds.bundles.bundle import Bundle
    from farm.builds.toolchains.toolchain import Toolchain

_FP32, _QUANTIZED = "fp32", "quantized"


class PlannedProgram(msgspec.Struct, frozen=True):
    """Program for one SoC."""

    ready: ReadyProgram
    fit: tuple[FitLine, ...]


def plan_programs(
    config: Config, request: ReadyRequest, socs: Sequence[str], module: NamedModule | None, precision: str
) -> list[PlannedProgram]:
    """Return the programs of a request for each of `socs`; without any, for the SoC of the file.

    A `module` is compiled at `precision` with its example inputs, or with the inputs of the request. Raises as
    `plan_ready`, and UsageError, ProgramError.
    """
    if module is None:
        ready = [plan_ready(msgspec.structs.replace(request, soc=soc)) for soc in socs or [""]]
        tools = prepare(config, virtual=request.virtual)
        return [_planned(config, tools, one, None) for one in ready]
    if not socs:
        raise UsageError(f"{module.file.name}:{module.name} is compiled for an SoC: name it, as with --soc SM8650")
    return _compiled(config, prepare(config, virtual=request.virtual), request, socs, module, precision)


def _planned(config: Config, tools: Toolchain, ready: ReadyProgram, error: list[Figures] | None) -> PlannedProgram:
    fit = fit_of(
        config,
        ready.job.target,
        ready.method,
        ready.path,
        simulator_qnn=tools.versions["qnn"] if ready.is_virtual else "",
        error=error,
        is_compared=bool(ready.expected),
    )
    return PlannedProgram(ready, fit)


def _compiled(
    config: Config, tools: Toolchain, request: ReadyRequest, socs: Sequence[str], module: NamedModule, precision: str
) -> list[PlannedProgram]:
    from farm.base.processes import Supervisor

    backend = request.backend or DEFAULT_BACKEND
    inputs = request.inputs or write_example_inputs(config, tools, module)
    jobs = [module_job(module, inputs, soc, backend, precision_of(backend, precision)) for soc in socs]
    found = []
    with Supervisor() as supervisor:
        for job in jobs:
            bundle = compile_module(config, tools, supervisor, job)
            with tempfile.TemporaryDirectory(prefix="farm-expected-") as folder:
                named = msgspec.structs.replace(
                    request,
                    model=bundle.model,
                    name=f"{module.label}_{job.target.precision}",
                    soc=job.target.soc,
                    backend=backend,
                    inputs=tuple(inputs),
                    expect=request.expect or _expected(bundle, Path(folder)),
                )
                ready = plan_ready(named)
            if not request.inputs:
                ready.sources = tuple(f"example input {index}" for index in range(len(inputs)))
            found.append(_planned(config, tools, ready, expected_error(bundle)))
    return found


def _expected(bundle: Bundle, folder: Path) -> tuple[Path, ...]:
    """Return files with the outputs of the FP32 module, in the order of the program."""
    files = [folder / f"{index}.npy" for index in range(len(bundle.manifest.outputs))]
    for index, file in enumerate(files):
        np.save(file, bundle.reference(_FP32, 0, index), allow_pickle=False)
    return tuple(files)


def expected_error(bundle: Bundle) -> list[Figures]:
    """Return the figures of each output of the quantized module against FP32; empty for floating point."""
    manifest = bundle.manifest
    if _QUANTIZED not in manifest.references or manifest.precision in ("fp16", "fp32"):
        return []
    return [
        worst(
            compare(bundle.reference(_QUANTIZED, sample, index), bundle.reference(_FP32, sample, index))
            for sample in range(manifest.samples)
        )
        for index in range(len(manifest.outputs))
    ]
