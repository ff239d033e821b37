"""A `.pte` file that a user has -> the one job that runs it, its bundle, and figures of its outputs. Torch-free."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.base.backends.registry import BACKENDS, cpu_backends, find_backend
from farm.base.config.settings import Config
from farm.base.errors import ConfigError, IllegalTargetError, UsageError
from farm.base.hashes import sha256_of
from farm.base.socs import READY, check_target, find_soc, load_socs
from farm.builds.bundles.bundle import INPUTS, MANIFEST, MODEL, Bundle, TensorSpec, read_tensor
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.ready import features_of, output_specs, read_ready, ready_manifest
from farm.builds.program.pte import Method, Program, Value, read_pte, to_memory
from farm.devices.execution.raw import ETDUMP_FILE, RESULT_FILE, RawResult
from farm.dispatch.request.profiling import Profile, require_profilable
from farm.replay.bundle_folder import require_new
from farm.replay.one_off import OneOffOutcome, OneOffRequest, run_one
from farm.report.model.format import first_of
from farm.results.attempt import Attempt, Cause, Comparison, Stage, Verdict
from farm.results.numerics import compare, worst
from farm.results.outputs import UNJUDGED, compared, executed_spec
from farm.results.runner_report import read_report
from farm.store.store import Store
from farm.suites.options import parse_options
from farm.suites.suite import FORWARD, Case, Job, State, Target, order_problem, state_problem, why_on_device

Array = NDArray[np.generic]
Samples = tuple[tuple[Array, ...], ...]


SUITE = "exec"
"""Suite under which such jobs are recorded."""

_HOW = "--method"
# Most bytes of a tensor: more is a damaged program, or too large for any phone.
_MOST_BYTES = 2 << 30
# A bundle that is made in another way is another one.
_RECIPE = 4

EXPECTED = "expected"
"""Name of the reference that outputs are compared with."""

_SHOWN = 8
_NPY = ".npy"
# Types drawn from their whole range: quantized tensors. Wider integers are mostly indices, for which 0 and 1 are safe.
_SMALL_INTEGERS = ("uint8", "int8", "uint16", "int16")


class ReadyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the user."""

    model: Path
    name: str = ""
    """Name of the job's case; empty for the name of the file."""
    inputs: tuple[Path, ...] = ()
    """Files of the inputs, inference by inference; empty for random inputs."""
    expect: tuple[Path, ...] = ()
    """Files of the expected outputs, inference by inference; empty for no comparison."""
    seed: int = 0
    method: str = FORWARD
    """Executed method of the program."""
    state: tuple[State, ...] = ()
    """State from one inference to the next."""
    soc: str = ""
    """SoC; empty for the program's own."""
    backend: str = ""
    options: tuple[str, ...] = ()
    virtual: bool = False
    profile: Profile = Profile.AUTO


class ReadyProgram:
    """A program with its inputs, checked against each other; nothing is written yet."""

    def __init__(
        self, request: ReadyRequest, method: Method, target: Target, samples: Samples, expected: Samples
    ) -> None:
        self.path, self.method, self.samples, self.expected = request.model, method, samples, expected
        self.outputs = _output_specs(request.model, method, samples, expected)
        self.sources = _sources(request, method)
        """Text with the origin of each input."""
        self._state = request.state
        self.is_random, self.is_virtual = bool(method.inputs) and not request.inputs, request.virtual
        digest = hashlib.sha256()
        for tensor in (tensor for sample in samples for tensor in sample):
            digest.update(f"{tensor.dtype.name}{tensor.shape}".encode() + tensor.tobytes())
        # The hashes replace a module: the measurement belongs to this program with these inputs.
        content = {"model": sha256_of(request.model), "inputs": digest.hexdigest()}
        self.job = Job(msgspec.structs.replace(ready_case(request), kwargs=content, samples=len(samples)), target)

    def bundle(self, config: Config) -> Bundle:
        """Return the program's bundle, made if the cache lacks it. Raises InfraError for an unwritable cache."""
        target = self.job.target
        parts = (
            _RECIPE,
            self.job.case.kwargs,
            self.method.name,
            target.soc,
            target.backend,
            [spec.shape for spec in self.outputs],
            self._state,
        )
        return made(
            config, self.path, self.method, self.job, parts, self._write_inputs, outputs=self.outputs, state=self._state
        )

    def _write_inputs(self, folder: Path) -> tuple[TensorSpec, ...]:
        (folder / INPUTS).mkdir()
        for number, sample in enumerate(self.samples):
            for index, tensor in enumerate(sample):
                raw = to_memory(tensor, self.method.inputs[index].order)
                (folder / INPUTS / f"input_{number}_{index}.raw").write_bytes(raw.tobytes())
        return _specs(self.samples[0], self.method.inputs)


def made(
    config: Config,
    program: Path,
    method: Method,
    job: Job,
    parts: tuple[Any, ...],
    write_inputs: Callable[[Path], tuple[TensorSpec, ...]],
    **more: Any,
) -> Bundle:
    """Return the bundle of a program, made if the cache lacks it; its key is a hash of `parts`.

    `write_inputs` writes them into a folder; `more` are fields of the manifest. Raises InfraError for an unwritable
    cache.
    """
    key = hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()

    def fill(folder: Path) -> None:
        shutil.copyfile(program, folder / MODEL)
        inputs = write_inputs(folder)
        files = {str(path.relative_to(folder)): sha256_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        if files[MODEL] != job.case.kwargs["model"]:
            raise UsageError(f"{program} was changed while it was read: run it again")
        manifest = ready_manifest(
            method,
            job.target,
            folder / MODEL,
            key=key,
            job_id=job.id,
            samples=job.case.samples,
            inputs=inputs,
            files=files,
            **{"outputs": (), **more},
        )
        (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))

    return BundleCache(config.cache_dir).build(key, fill)


def plan_ready(request: ReadyRequest, expected: Samples = ()) -> ReadyProgram:
    """Return the program of `request` with its inputs; its outputs are `expected` where it names no files of them.

    Raises ConfigError for an invalid file, IllegalTargetError for a program of another SoC or backend, UsageError,
    UnknownNameError.
    """
    method, target = read_program(request, read_pte(request.model), _HOW)
    for place, values in (("input", method.inputs), ("output", method.outputs)):
        for index, value in enumerate(values):
            _check_value(request.model, value, f"{place} {index}")
    if request.inputs:
        samples = read_samples(request.inputs, method.inputs, "input")
    else:
        samples = (random_sample(method.inputs, request.seed),)
    if request.expect:
        expected = read_samples(request.expect, method.outputs, "output")
    if expected and len(expected) != len(samples):
        raise UsageError(f"outputs of {len(expected)} inferences are expected, and there are inputs for {len(samples)}")
    if problem := _state_problem(request, method, len(samples)):
        raise UsageError(f"--state {problem}")
    return ReadyProgram(request, method, target, samples, expected)


def read_program(request: ReadyRequest, program: Program, how: str) -> tuple[Method, Target]:
    """Return the method of a program that `request` executes, and its target; `how` names a method. Raises as above."""
    method = program.method(request.method, how)
    target = _target(request, program)
    require_profilable(request.profile, direct=target.direct)
    if request.state and target.direct:
        raise IllegalTargetError("direct mode's runner hands no state on: leave --state out")
    _check_runnable(request, method, target)
    # Raises its own errors for a program of another target, or with options for the compiler alone.
    read_ready(Job(msgspec.structs.replace(ready_case(request), pte=str(request.model.absolute())), target), how)
    return method, target


def _state_problem(request: ReadyRequest, method: Method, samples: int) -> str:
    """Return the reason why the requested state is impossible; "" for none."""
    if request.state and samples < 2:
        return "goes from one inference to the next, and there is one: name inputs for several"
    if problem := state_problem(request.state, len(method.inputs), samples):
        return problem
    for one in request.state:
        if one.output >= len(method.outputs):
            return f"names output {one.output}, and there are {len(method.outputs)}, from 0"
        given, taken = method.outputs[one.output], method.inputs[one.input]
        if (given.shape, given.dtype) != (taken.shape, taken.dtype):
            return f"{one.output}:{one.input}: the output is {given}, and the input takes {taken}"
        if problem := order_problem(one, given.order, taken.order):
            return problem
    return ""


def _target(request: ReadyRequest, program: Program) -> Target:
    """Return the target of a program. Raises as `plan_ready`."""
    qnn = program.qnn
    soc = request.soc or (qnn.soc if qnn else "")
    backend = request.backend or (qnn.backend if qnn else cpu_backends()[0])
    if not soc:
        name = request.model.name
        raise UsageError(f"{name} is for the CPU of any SoC: name the one it should run on, as with --soc SM8650")
    if qnn and not request.soc and soc not in load_socs():
        raise ConfigError(
            request.model, "", f"is compiled for {soc}, which farm does not know (farm devices socs lists them)"
        )
    found = find_soc(soc)
    check_target(found, backend, READY)
    sets = parse_options(request.options, backend)
    if len(sets) > 1:
        raise UsageError("one program is run at a time: give every option one value")
    return Target(found.name, backend, READY, sets[0])


def _check_runnable(request: ReadyRequest, method: Method, target: Target) -> None:
    """Raise IllegalTargetError for a program that the runner, or the device that it is asked for, cannot run."""
    foreign = sorted({one.id for one in method.delegates} - {known.delegate for known in BACKENDS.values()})
    if foreign:
        raise IllegalTargetError(
            f"{request.model.name} has a part for {foreign[0][:80]!r}, which farm's runner has not"
        )
    simulated = request.virtual and find_backend(target.backend).simulated
    needed = [name for name in features_of(method) if why_on_device((name,))] if simulated else []
    if needed:
        why = why_on_device((needed[0],))
        raise IllegalTargetError(
            f"{request.model.name}: {why}: attach a {target.soc}, or compile it for --virtual with {needed[0]}=False"
        )
    dumping = any(one.qnn is not None and one.qnn.dump_intermediate_outputs for one in method.delegates)
    if dumping and request.profile is not Profile.OFF:
        # ExecuTorch 1.5 aborts where there is an ETDump and no room for them; farm debug makes its own programs.
        raise IllegalTargetError(
            f"{request.model.name} is compiled to write what every layer gives, and cannot be profiled as well: "
            "use --profile off"
        )


def _check_value(model: Path, value: Value, place: str) -> None:
    try:
        np.dtype(value.dtype)
    except TypeError:
        raise ConfigError(model, "", f"{place} is {value.dtype}: farm exec takes tensors of numpy's types") from None
    if value.nbytes > _MOST_BYTES:
        raise ConfigError(model, "", f"{place} is {value} and has {value.nbytes} bytes, more than {_MOST_BYTES}")


def _output_specs(model: Path, method: Method, samples: Samples, expected: Samples) -> tuple[TensorSpec, ...]:
    if expected:
        return _specs(expected[0], method.outputs)
    smaller = any(tensor.shape != value.shape for tensor, value in zip(samples[0], method.inputs, strict=True))
    if smaller and any(value.dynamic for value in method.outputs):
        raise UsageError(
            f"{model.name} has outputs whose shapes depend on its inputs, and these are below their bounds: give "
            "expected outputs with --expect, or inputs of the greatest shape"
        )
    return output_specs(method)


def _specs(tensors: Sequence[NDArray[np.generic]], values: Sequence[Value]) -> tuple[TensorSpec, ...]:
    """Return the shapes of `tensors` in the memory orders of `values`."""
    return tuple(
        TensorSpec(tensor.shape, tensor.dtype.name, order=value.order)
        for tensor, value in zip(tensors, values, strict=True)
    )


def _sources(request: ReadyRequest, method: Method) -> tuple[str, ...]:
    if not request.inputs:
        return tuple(f"random: {distribution(value)}, seed {request.seed}" for value in method.inputs)
    count = len(method.inputs)
    return tuple(first_of([str(path) for path in request.inputs[index::count]], 1) for index in range(count))


def ready_case(request: ReadyRequest) -> Case:
    """Return the case that a program is recorded as, without hashes of its content."""
    name = re.sub(r"[^a-z0-9_]+", "_", (request.name or request.model.stem).lower()).strip("_")[:64]
    return Case(suite=SUITE, name=name or "program", module="", inputs=(), method=request.method, state=request.state)


class OutputFigures(msgspec.Struct, frozen=True):
    """Figures of an output of an inference; None for an output without a finite element."""

    sample: int
    output: int
    dtype: str
    shape: tuple[int, ...]
    least: float | None
    greatest: float | None
    mean: float | None
    std: float | None
    nan: int
    infinite: int
    first: tuple[float, ...]
    """First values of the output, in C order."""


def run_ready(
    config: Config, store: Store, ready: ReadyProgram, request: OneOffRequest, folder: Path | None
) -> tuple[OneOffOutcome, list[OutputFigures]]:
    """Run a ready program, record it, leave its outputs in `folder`, and return how it ended, with their figures.

    The figures are in the order of the inferences; none for a run that did not reach its end. Raises as `run_one`.
    """
    figures: list[OutputFigures] = []
    if folder is not None:
        require_new(folder, make=True)

    def look(raw: RawResult, attempt: Attempt) -> Attempt:
        if attempt.verdict is not Verdict.PASSED:
            return attempt
        outputs = _outputs(ready, raw)
        figures[:] = [_figures(sample, index, array) for (sample, index), array in outputs.items()]
        if folder is not None:
            _save(folder, raw, outputs)
        if not ready.expected:
            return attempt
        if problem := _shape_problem(ready, outputs):
            return msgspec.structs.replace(
                attempt, verdict=Verdict.FAILED, stage=Stage.NUMERICS, cause=Cause.NUMERICS, reason=problem
            )
        notes = (
            note if note != UNJUDGED else "the program ran; the comparison has no limit and decides nothing"
            for note in attempt.notes
        )
        return msgspec.structs.replace(attempt, comparisons=_comparisons(ready, outputs), notes=tuple(notes))

    one = run_one(config, store, request, lambda _tools, _supervisor: ready.bundle(config), look)
    return one, figures


def _outputs(ready: ReadyProgram, raw: RawResult) -> dict[tuple[int, int], NDArray[np.generic]]:
    """Return the outputs of a passed attempt by inference and index, in the shapes that the runner reports."""
    report = read_report(raw.folder / RESULT_FILE)
    written = report.outputs if report is not None else ()
    return {
        (sample, index): read_tensor(raw.output(sample, index), executed_spec(spec, tensor))
        for sample in range(len(ready.samples))
        for index, (spec, tensor) in enumerate(zip(ready.outputs, written, strict=True))
    }


def _shape_problem(ready: ReadyProgram, outputs: dict[tuple[int, int], NDArray[np.generic]]) -> str:
    """Return the first output of another shape than expected; "" for none."""
    for (sample, index), array in outputs.items():
        if array.shape != (shape := ready.expected[sample][index].shape):
            return f"output {index} of inference {sample} has the shape {list(array.shape)}, expected {list(shape)}"
    return ""


def _figures(sample: int, index: int, array: NDArray[np.generic]) -> OutputFigures:
    values = array.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    least, greatest, mean, std = (
        (float(function(finite)) if finite.size else None) for function in (np.min, np.max, np.mean, np.std)
    )
    nan = int(np.count_nonzero(np.isnan(values)))
    infinite, first = values.size - finite.size - nan, tuple(values[:_SHOWN].tolist())
    name, shape = array.dtype.name, array.shape
    return OutputFigures(sample, index, name, shape, least, greatest, mean, std, nan, infinite, first)


def _comparisons(ready: ReadyProgram, outputs: dict[tuple[int, int], NDArray[np.generic]]) -> tuple[Comparison, ...]:
    found = []
    for index in range(len(ready.outputs)):
        figures = worst(
            compare(outputs[sample, index], expected[index]) for sample, expected in enumerate(ready.expected)
        )
        found.append(compared(index, EXPECTED, figures))
    return tuple(found)


def _save(folder: Path, raw: RawResult, outputs: dict[tuple[int, int], NDArray[np.generic]]) -> None:
    try:
        for (sample, index), array in outputs.items():
            (folder / f"output_{sample}_{index}.raw").write_bytes(array.tobytes())
            np.save(folder / f"output_{sample}_{index}.npy", array, allow_pickle=False)
        if (raw.folder / ETDUMP_FILE).is_file():
            shutil.copyfile(raw.folder / ETDUMP_FILE, folder / ETDUMP_FILE)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None


def read_list(path: Path) -> list[Path]:
    """Return the files named in an input list, whose names are relative to the list and quoted as in a shell.

    Raises ConfigError for an unreadable list.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [path.parent / name for line in lines for name in shlex.split(line)]
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    except ValueError as error:
        raise ConfigError(path, "", f"is no list of files: {error}") from None


def read_samples(files: Sequence[Path], values: Sequence[Value], what: str) -> Samples:
    """Return the tensors in `files`, grouped by inference: one for each of `values`. `what` is `input` or `output`.

    Raises UsageError if the number of files is no multiple of `values`, ConfigError for a wrong type or shape.
    """
    if not values or len(files) % len(values):
        wanted = ", ".join(map(str, values)) or f"no {what}"
        raise UsageError(f"{len(files)} {what} files for a program with {wanted}: {len(values)} for every inference")
    samples = []
    for start in range(0, len(files), len(values)):
        sample = tuple(
            _read(path, value, f"{what} {index}")
            for index, (path, value) in enumerate(zip(files[start:], values, strict=False))
        )
        samples.append(sample)
        for index, (tensor, first) in enumerate(zip(sample, samples[0], strict=True)):
            if tensor.shape != first.shape:
                problem = f"is {list(tensor.shape)}, the first inference has {list(first.shape)}: one shape for all"
                raise ConfigError(files[start + index], "", problem)
    return tuple(samples)


def random_sample(values: Sequence[Value], seed: int) -> tuple[Array, ...]:
    """Return a random tensor of greatest shape for each of `values`, equal for equal seeds on every machine."""
    return tuple(_random(value, np.random.default_rng([seed, index])) for index, value in enumerate(values))


def distribution(value: Value) -> str:
    """Return the distribution from which `random_sample` draws `value`, in words."""
    if value.dtype.startswith("float"):
        return "normal"
    return f"any {value.dtype}" if value.dtype in _SMALL_INTEGERS else "0 or 1"


def _random(value: Value, generator: np.random.Generator) -> Array:
    dtype = np.dtype(value.dtype)
    if dtype.kind == "f":
        return np.asarray(generator.standard_normal(value.shape)).astype(dtype)
    if value.dtype in _SMALL_INTEGERS:
        limits = np.iinfo(dtype)
        return np.asarray(generator.integers(limits.min, limits.max, value.shape, endpoint=True)).astype(dtype)
    return np.asarray(generator.integers(0, 2, value.shape)).astype(dtype)


def _read(path: Path, value: Value, place: str) -> Array:
    try:
        tensor = _read_npy(path) if path.suffix == _NPY else _read_raw(path, value, place)
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    except ValueError as error:
        # For example a path with a null character.
        raise ConfigError(path, "", str(error)) from None
    if tensor.dtype.name != value.dtype or not _fits(tensor.shape, value):
        raise ConfigError(path, "", f"is {tensor.dtype.name}{list(tensor.shape)}, {place} is {value}")
    return np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("=")).reshape(tensor.shape)


def _read_npy(path: Path) -> Array:
    try:
        # Map the file: a header with a false huge size must not allocate memory.
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, OverflowError) as error:
        raise ConfigError(path, "", f"is no .npy file of numbers: {error}") from None
    if not isinstance(array, np.ndarray):
        raise ConfigError(path, "", "is no .npy file of one array")
    return array


def _read_raw(path: Path, value: Value, place: str) -> Array:
    size = path.stat().st_size
    if size != value.nbytes:
        raise ConfigError(path, "", f"has {size} bytes, {place} is {value} and has {value.nbytes}")
    return np.fromfile(path, np.dtype(value.dtype)).reshape(value.shape)


def _fits(shape: tuple[int, ...], value: Value) -> bool:
    if not value.dynamic or len(shape) != len(value.shape):
        return shape == value.shape
    return all(size <= bound for size, bound in zip(shape, value.shape, strict=True))
