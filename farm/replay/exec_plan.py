"""Programs of one `farm exec`: a `.pte` or a module, for one SoC or several, each with its fit.

The fit of a program is known before a device is used: SoC, QNN, skel, operators on the CPU, error, size, VTCM.
"""

from __future__ import annotations

import hashlib
import mmap
import re
import subprocess
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from farm.base.atomic import write_atomically
from farm.base.backends.registry import DEFAULT_BACKEND, find_backend
from farm.base.errors import InfraError, ProgramError, UsageError
from farm.base.processes import ask_program
from farm.base.publish import make_folders
from farm.base.socs import Soc, check_target, find_soc
from farm.base.text import one_line
from farm.builds.bundles.bundle import Bundle, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.reuse import find_bundle_for
from farm.builds.program.pte import Method, Value, qnn_payloads
from farm.builds.runtime.device_files import android_places, device_parts
from farm.builds.runtime.parts import FileFault, RuntimePart, find_fault
from farm.builds.runtime.qnn_sdk import release_of
from farm.builds.toolchains.interpreters import process_environment
from farm.builds.toolchains.prepare import prepare
from farm.replay.properties import CheckLine, Level
from farm.replay.ready_program import ReadyProgram, ReadyRequest, plan_ready
from farm.replay.stored_result import try_build
from farm.report.model import format as fmt
from farm.results.attempt import Cause, Stage
from farm.results.numerics import Figures, compare, worst
from farm.suites.suite import Case, InputSpec, Job, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.base.config.settings import Config
    from farm.base.processes import Supervisor
    from farm.builds.toolchains.toolchain import Toolchain

# QNN writes its build id into each context.
_BUILD_ID = re.compile(rb"v(\d{1,3}\.\d{1,4}\.\d{1,4})\.\d{6,}")
_ID_BYTES = 1 << 16
# The DSP addresses 4 GB: farm/results/known_troubles.py.
_MOST_CONTEXT_BYTES = 4 << 30
# An error of a tenth of the signal's amplitude.
_LEAST_SQNR_DB = 20.0
_NAMED_OPERATORS = 6
_FP32, _QUANTIZED = "fp32", "quantized"
_NAMED = re.compile(r"(?P<file>.+\.py):(?P<name>[A-Za-z_]\w*)")
_INPUT_SECONDS = 300.0
_DEFAULT_PRECISION = {DEFAULT_BACKEND: "8a8w"}


class FitOf(StrEnum):
    """Checked part of the fit, in the order of the lines."""

    SOC = "SoC"
    QNN = "QNN"
    SKEL = "skel"
    FILES = "files"
    CPU = "on the CPU"
    ERROR = "error"
    SIZE = "size"
    VTCM = "VTCM"


FitLine = CheckLine[FitOf]
"""Line of the fit of a program."""


class Contexts(NamedTuple):
    """Compiled parts of a program for QNN."""

    sizes: tuple[int, ...]
    """Size of each part in bytes."""
    qnn: str
    """QNN that compiled them, `2.51.0`; empty if unknown."""


def read_contexts(path: Path) -> Contexts:
    """Return the compiled parts of a `.pte` that `read_pte` has accepted."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # Only slices of a mapped file are read.
        places = qnn_payloads(data)
        sizes = tuple(end - start for start, end in places)
        versions = (_BUILD_ID.search(data, start, min(end, start + _ID_BYTES)) for start, end in places)
        found = next((one[1].decode() for one in versions if one), "")
    return Contexts(sizes, found)


def _soc_line(soc: Soc, target: Target, method: Method) -> FitLine:
    compiled = any(one.qnn is not None for one in method.delegates)
    how = f"compiled for it ({target.backend})" if compiled else "no part for QNN: any SoC's CPU runs it"
    return FitLine(FitOf.SOC, Level.OK, f"{soc.name}, HTP V{soc.htp_arch}: {how}")


def qnn_line(compiled: str, runtime: str) -> FitLine:
    """Return the line of the version of QNN: a runtime loads no program of a newer QNN."""
    by = f"compiled by QNN {compiled}" if compiled else "compiled by an unknown QNN"
    if not runtime:
        return FitLine(
            FitOf.QNN,
            Level.WARNING,
            f"{by}, the runtime's version is unknown",
            "docs/guides/runtime.md names its files",
        )
    ours, theirs = release_of(runtime), release_of(compiled)
    runtime = _BUILD_ID.sub(rb"\1", runtime.encode()).decode()
    if ours and theirs and theirs > ours:
        step = "compile it with that version, or use a newer SDK (QNN_SDK_ROOT)"
        return FitLine(FitOf.QNN, Level.ERROR, f"{by}, newer than the runtime's {runtime}", step)
    return FitLine(FitOf.QNN, Level.OK, f"{by}, the runtime has {runtime}")


def file_lines(parts: Sequence[RuntimePart]) -> Iterator[FitLine]:
    """Yield the lines of the files for an attached Android device; files with one repair share a line."""
    faults = {part.name: fault for part in parts if (fault := find_fault(part))}
    skels = [part for part in parts if part.name.endswith("Skel.so")]
    for skel in skels:
        if fault := faults.pop(skel.name, None):
            yield FitLine(FitOf.SKEL, Level.WARNING, _named(skel.name, fault), fault.repair)
        else:
            yield FitLine(FitOf.SKEL, Level.OK, f"{skel.name}, for this HTP")
    by_repair: dict[str, list[str]] = {}
    for name, fault in faults.items():
        by_repair.setdefault(fault.repair, []).append(_named(name, fault))
    for repair, problems in by_repair.items():
        yield FitLine(FitOf.FILES, Level.WARNING, ", ".join(problems), repair)
    if not faults:
        yield FitLine(FitOf.FILES, Level.OK, f"{len(parts) - len(skels)} for Android, complete")


def _named(name: str, fault: FileFault) -> str:
    return fault.problem if fault.problem.startswith(name) else f"{name} {fault.problem}"


def cpu_line(method: Method, *, on_cpu: bool) -> FitLine:
    """Return the line of the operators that no delegate took."""
    left = sorted(method.cpu_operators.items(), key=lambda one: (-one[1], one[0]))
    if not left:
        return FitLine(FitOf.CPU, Level.OK, "no operator" if not on_cpu else "all, by the delegate")
    names = ", ".join(f"{name} {count}" for name, count in left[:_NAMED_OPERATORS])
    more = f" and {len(left) - _NAMED_OPERATORS} other kinds" if len(left) > _NAMED_OPERATORS else ""
    if on_cpu:
        return FitLine(FitOf.CPU, Level.OK, f"{names}{more}")
    parts = len(method.delegates)
    step = "each border copies tensors; docs/reference/operators.md lists the operators of QNN"
    return FitLine(FitOf.CPU, Level.WARNING, f"{names}{more}, beside {parts} delegated parts", step)


def error_line(error: Sequence[Figures] | None, *, is_compared: bool) -> FitLine:
    """Return the line of the expected error against FP32."""
    if error is None:
        known = "compared with the expected outputs after the execution" if is_compared else "unknown"
        step = "" if is_compared else "--expect FP32 outputs, or run the module, as net.py:Net"
        return FitLine(FitOf.ERROR, Level.OK if is_compared else Level.WARNING, known, step)
    if not error:
        return FitLine(FitOf.ERROR, Level.OK, "not computed: floating point is compared after the execution")
    values = [one.sqnr_db for one in error]
    shown = ", ".join(f"output {index} SQNR {fmt.decibel(value)} dB" for index, value in enumerate(values))
    text = f"{shown} against FP32, by the quantized module on the CPU"
    if any(value is not None and value < _LEAST_SQNR_DB for value in values):
        return FitLine(FitOf.ERROR, Level.WARNING, text, "another --precision, or real inputs to calibrate with")
    return FitLine(FitOf.ERROR, Level.OK, text)


def size_line(pte_bytes: int, contexts: Contexts) -> FitLine:
    """Return the line of the sizes of the file and of its greatest context."""
    text = f"{fmt.size(pte_bytes)}"
    if contexts.sizes:
        text += f", {len(contexts.sizes)} for QNN, the greatest {fmt.size(max(contexts.sizes))}"
        if max(contexts.sizes) > _MOST_CONTEXT_BYTES:
            return FitLine(FitOf.SIZE, Level.ERROR, text, "the DSP addresses 4 GB: split the program")
    return FitLine(FitOf.SIZE, Level.OK, text)


def vtcm_line(soc: Soc, values: Sequence[Value]) -> FitLine:
    """Return the line of the VTCM: the inputs and outputs that do not fit into it as a whole.

    A context does not show farm the tensors inside of it, so that a program with small inputs may spill too.
    """
    room = soc.vtcm_mb << 20
    text = f"{soc.vtcm_mb} MB"
    if large := [value for value in values if value.is_tensor and value.nbytes > room]:
        greatest = max(large, key=lambda value: value.nbytes)
        step = "HTP works on it in pieces through DDR; smaller tensors are faster"
        return FitLine(FitOf.VTCM, Level.WARNING, f"{text}, less than {greatest} ({fmt.size(greatest.nbytes)})", step)
    return FitLine(FitOf.VTCM, Level.OK, f"{text}, more than each input and output")


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
    """Return a program with its fit.

    `error` has the figures of each output of the quantized module against FP32, None without a module.
    """
    target, method = ready.job.target, ready.method
    soc, backend = find_soc(target.soc), find_backend(target.backend)
    contexts = read_contexts(ready.path)
    lines = [_soc_line(soc, target, method)]
    places = None if ready.is_virtual else android_places(config)
    if not backend.on_cpu:
        lines.append(qnn_line(contexts.qnn, places.qnn.version if places else tools.versions["qnn"]))
    if places:
        lines += file_lines(device_parts(soc, target.backend, places, target.mode))
    elif not backend.on_cpu:
        lines.append(FitLine(FitOf.SKEL, Level.OK, "none: QNN's simulator runs it"))
    lines += [cpu_line(method, on_cpu=backend.on_cpu), error_line(error, is_compared=bool(ready.expected))]
    lines += [size_line(ready.path.stat().st_size, contexts)]
    if target.backend == "htp":
        lines.append(vtcm_line(soc, (*method.inputs, *method.outputs)))
    return PlannedProgram(ready, tuple(lines))


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


class NamedModule(msgspec.Struct, frozen=True):
    """Class of a torch module in a Python file."""

    file: Path
    name: str

    @property
    def label(self) -> str:
        """Name for files and jobs: `net_Net`."""
        return f"{self.file.stem}_{self.name}"


def find_module(text: str) -> NamedModule | None:
    """Return the module that `text` names, `net.py:Net`; None for another text. Raises UsageError without the file."""
    found = _NAMED.fullmatch(text)
    if found is None:
        return None
    file = Path(found["file"])
    if not file.is_file():
        raise UsageError(f"{file} does not exist: name a Python file, as net.py:Net")
    return NamedModule(file.absolute(), found["name"])


def precision_of(backend: str, asked: str) -> str:
    """Return the precision of a module: `asked`, or the default of `backend`."""
    return asked or _DEFAULT_PRECISION.get(backend) or find_backend(backend).precisions[0]


def write_example_inputs(config: Config, tools: Toolchain, module: NamedModule) -> tuple[Path, ...]:
    """Return files with the example inputs of a module, named by content, in the cache. Raises UsageError."""
    with tempfile.TemporaryDirectory(prefix="farm-inputs-") as folder:
        words = [str(module.file.parent), module.file.stem, module.name, folder]
        try:
            answer = ask_program(
                [tools.compiler.python, "-m", "farm.builds.compile.example_inputs", *words],
                _INPUT_SECONDS,
                env=process_environment(tools.compiler.env),
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"{module.file} made no example inputs within {_INPUT_SECONDS:g} s") from None
        if answer.code:
            lines = answer.errors.strip().splitlines() or ["it ended without a message"]
            raise UsageError(f"no example inputs: {one_line(lines[-1])}")
        made = sorted(Path(folder).iterdir(), key=lambda path: int(path.stem))
        place = config.cache_dir / "example_inputs"
        try:
            make_folders(place)
            return tuple(_kept(path.read_bytes(), place) for path in made)
        except OSError as error:
            raise InfraError(f"cannot write {place}: {error.strerror}") from None


def _kept(content: bytes, place: Path) -> Path:
    path = place / f"{hashlib.sha256(content).hexdigest()}.npy"
    if not path.is_file():
        write_atomically(path, content)
    return path


def module_job(module: NamedModule, inputs: Sequence[Path], soc: str, backend: str, precision: str) -> Job:
    """Return the job that compiles a module with `.npy` files as inputs. Raises IllegalTargetError."""
    found = find_soc(soc)
    check_target(found, backend, precision)
    case = Case(
        suite="exec",
        name=re.sub(r"[^a-z0-9_]+", "_", module.label.lower())[:64],
        module=f".{module.file.stem}:{module.name}",
        inputs=tuple(InputSpec(files=(str(path.absolute()),)) for path in inputs),
        precisions=(precision,),
        folder=str(module.file.parent),
    )
    return Job(case, Target(found.name, backend, precision))


def compile_module(config: Config, tools: Toolchain, supervisor: Supervisor, job: Job) -> Bundle:
    """Return the bundle of a module's job, compiled if the cache lacks it. Raises ProgramError, InfraError."""
    cache = BundleCache(config.cache_dir)
    key, is_cached = find_bundle_for(job, tools, cache)
    if not is_cached:
        reply, log = try_build(config, job, key, tools, supervisor)
        if reply.infra:
            raise InfraError(f"{job.id} could not be built: {reply.reason}: see {log}")
        if not reply.ok:
            problem = f"{job.case.module} does not compile for {job.target}: {reply.reason}: see {log}"
            raise ProgramError(problem, stage=Stage.BUILD, cause=Cause.COMPILE)
    return load_bundle(cache.folder(key))
