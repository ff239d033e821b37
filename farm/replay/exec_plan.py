"""Programs of one `farm exec`: a `.pte`, also of text generation, or a module, for one SoC or several."""

from __future__ import annotations

import hashlib
import mmap
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND, find_backend, runs_on_cpu
from farm.base.config.settings import Config
from farm.base.errors import ConfigError, InfraError, ProgramError, UsageError
from farm.base.files import make_folders, write_atomically
from farm.base.grouping import grouped
from farm.base.hashes import sha256_of
from farm.base.processes import Supervisor, ask_program
from farm.base.socs import Soc, check_target, find_soc
from farm.base.text import one_line
from farm.builds.bundles.bundle import Bundle, Generation, load_bundle
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.generation import generation_of, padded, write_tokens
from farm.builds.bundles.reuse import find_bundle_for
from farm.builds.program.pte import Method, Value, qnn_payloads, read_pte
from farm.builds.runtime.parts import FileFault, RuntimePart, find_fault
from farm.builds.runtime.qnn_sdk import release_of
from farm.builds.runtime.runtime import android_places, device_parts
from farm.builds.toolchains.interpreters import process_environment
from farm.builds.toolchains.selection import prepare
from farm.builds.toolchains.toolchain import Toolchain
from farm.devices.execution.raw import RESULT_FILE, TOKENS_FILE, RawResult
from farm.replay.bundle_folder import require_new
from farm.replay.one_off import OneOffOutcome, OneOffRequest, run_one
from farm.replay.properties import CheckLine, error, ok, warning
from farm.replay.ready_program import ReadyProgram, ReadyRequest, made, plan_ready, read_program, ready_case
from farm.replay.stored_result import try_build
from farm.report.model import format as fmt
from farm.results.attempt import Attempt, Cause, Stage
from farm.results.numerics import Figures, compare, worst
from farm.results.runner_report import Generated, ReportError, read_report
from farm.store.store import Store
from farm.suites.generate import DECODE, Generate, require_for_text
from farm.suites.prompts import Tokens, read_tokens
from farm.suites.suite import Case, InputSpec, Job, Target

# A `.pte` that a user has and that generates text, with prompts -> the one job that runs it, its bundle, its tokens.
#
# Torch-free.


TOKENS = "tokens.json"
"""File of generated tokens by prompt, in the user's folder."""

# A bundle that is made in another way is another one.
_RECIPE = 1
_WHERE = "how a .pte is made"
# Prompts and tokens have 31 bits.
_PAIR = re.compile(r"^([0-9]{1,9}) ([0-9]{1,9})$", re.MULTILINE)


class GeneratingProgram:
    """A program with its prompts, checked against each other; nothing is written yet."""

    def __init__(self, path: Path, method: Method, generation: Generation, prompts: Tokens, job: Job) -> None:
        self.path, self.generation, self.prompts, self.job = path, generation, prompts, job
        self._method = method

    def bundle(self, config: Config) -> Bundle:
        """Return the program's bundle, made if the cache lacks it. Raises InfraError for an unwritable cache."""
        target = self.job.target
        parts = (_RECIPE, self.job.case.kwargs, target.soc, target.backend, self.generation)
        inputs = partial(write_tokens, prompts=self.prompts)
        return made(config, self.path, self._method, self.job, parts, inputs, generation=self.generation)


def plan_generation(asked: ReadyRequest, file: Path, new: int, stop: tuple[int, ...] = ()) -> GeneratingProgram:
    """Return the program of `asked` with the prompts of `file`, `.npy` or `.json` as `prompts_file` of a case.

    The program generates at most `new` tokens after each prompt, up to a token of `stop`. Raises ConfigError for an
    invalid file or unsuitable prompts, IllegalTargetError for a program of another SoC or backend, UsageError,
    UnknownNameError.
    """
    prompts = _prompts(file)
    program = read_pte(asked.model)
    generation = generation_of(program, prompts=prompts, new=new, stop=stop)
    asked = msgspec.structs.replace(asked, method=DECODE)
    method, target = read_program(asked, program, _WHERE)
    if not runs_on_cpu(target.backend):
        require_for_text(asked.model.name, target.backend, direct=target.direct)
    # The hashes replace a module: the measurement belongs to this program with these prompts.
    content = {"model": sha256_of(asked.model), "inputs": hashlib.sha256(padded(prompts).tobytes()).hexdigest()}
    generate = Generate(new=new, stop=stop, context=generation.context)
    case = msgspec.structs.replace(ready_case(asked), kwargs=content, samples=len(prompts), generate=generate)
    return GeneratingProgram(asked.model, method, generation, prompts, Job(case, target))


def _prompts(path: Path) -> Tokens:
    try:
        prompts = read_tokens(path)
    except (OSError, ValueError) as error:
        raise ConfigError(path, "", getattr(error, "strerror", None) or str(error)) from None
    if not prompts:
        raise ConfigError(path, "", "has no prompt")
    if () in prompts:
        raise ConfigError(path, "", f"prompt {prompts.index(())} has no token")
    return prompts


def run_generation(
    config: Config, store: Store, program: GeneratingProgram, request: OneOffRequest, folder: Path | None
) -> tuple[OneOffOutcome, list[Generated]]:
    """Run a program that generates, record it, leave its tokens in `folder`, and return how it ended, with them.

    The tokens are by prompt and round; as far as it came, for a run that did not finish. Raises as `run_one`.
    """
    found: list[Generated] = []
    if folder is not None:
        require_new(folder, make=True)

    def look(raw: RawResult, attempt: Attempt) -> Attempt:
        found[:] = _generated(raw, program.generation)
        if folder is not None and found:
            _save(folder, found[: len(program.prompts)])
        return attempt

    one = run_one(config, store, request, lambda _tools, _supervisor: program.bundle(config), look)
    return one, found


def _generated(raw: RawResult, generation: Generation) -> tuple[Generated, ...]:
    try:
        report = read_report(raw.folder / RESULT_FILE)
    except (ReportError, OSError):
        # The attempt carries the problem of the report.
        report = None
    if report is not None and report.generated:
        return report.generated
    try:
        return before_the_end((raw.folder / TOKENS_FILE).read_text("ascii", "replace"), generation)
    except OSError:
        return ()


def before_the_end(text: str, generation: Generation) -> tuple[Generated, ...]:
    """Return the tokens of a runner without a report, from its TOKENS_FILE: a line `prompt token` for each.

    With a time to fill, only the first round counts: tokens beyond a prompt's number are left out. Pure.
    """
    tokens = grouped((int(prompt), int(token)) for prompt, token in _PAIR.findall(text))
    return tuple(
        Generated(line, generation.prompt_tokens[line], tuple(_first_round(tokens[line], line, generation)))
        for line in sorted(tokens)
        if line < len(generation.prompt_tokens)
    )


def _first_round(tokens: list[int], line: int, generation: Generation) -> list[int]:
    most = min(generation.new, generation.context - generation.prompt_tokens[line] + 1)
    end = next((index + 1 for index, token in enumerate(tokens) if token in generation.stop), most)
    return tokens[: min(end, most)]


def is_cut_short(entry: Generated, generation: Generation) -> bool:
    """Return whether nothing that was asked for ended `entry`: the runner itself ended."""
    return entry.ended == "new" and len(entry.tokens) < generation.new and not set(entry.tokens) & set(generation.stop)


def _save(folder: Path, generated: list[Generated]) -> None:
    tokens = {one.line: one.tokens for one in generated}
    lists = [tokens.get(line, ()) for line in range(max(tokens) + 1)]
    try:
        (folder / TOKENS).write_bytes(msgspec.json.encode(lists))
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None


# Programs of one `farm exec`: a `.pte` or a module, for one SoC or several, each with its fit.
#
# The fit of a program is known before a device is used: SoC, QNN, skel, operators on the CPU, error, size, VTCM.


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


def _soc_line(soc: Soc, target: Target, method: Method) -> CheckLine:
    compiled = any(one.qnn is not None for one in method.delegates)
    how = f"compiled for it ({target.backend})" if compiled else "no part for QNN: any SoC's CPU runs it"
    return ok("SoC", f"{soc.name}, HTP V{soc.htp_arch}: {how}")


def qnn_line(compiled: str, runtime: str) -> CheckLine:
    """Return the line of the version of QNN: a runtime loads no program of a newer QNN."""
    by = f"compiled by QNN {compiled}" if compiled else "compiled by an unknown QNN"
    if not runtime:
        step = "docs/guides/runtime.md names its files"
        return warning("QNN", f"{by}, the runtime's version is unknown", step)
    ours, theirs = release_of(runtime), release_of(compiled)
    runtime = _BUILD_ID.sub(rb"\1", runtime.encode()).decode()
    if ours and theirs and theirs > ours:
        step = "compile it with that version, or use a newer SDK (QNN_SDK_ROOT)"
        return error("QNN", f"{by}, newer than the runtime's {runtime}", step)
    return ok("QNN", f"{by}, the runtime has {runtime}")


def file_lines(parts: Sequence[RuntimePart]) -> Iterator[CheckLine]:
    """Yield the lines of the files for an attached Android device; files with one repair share a line."""
    faults = {part.name: fault for part in parts if (fault := find_fault(part))}
    skels = [part for part in parts if part.name.endswith("Skel.so")]
    for skel in skels:
        if fault := faults.pop(skel.name, None):
            yield warning("skel", _named(skel.name, fault), fault.repair)
        else:
            yield ok("skel", f"{skel.name}, for this HTP")
    for repair, problems in grouped((fault.repair, _named(name, fault)) for name, fault in faults.items()).items():
        yield warning("files", ", ".join(problems), repair)
    if not faults:
        yield ok("files", f"{len(parts) - len(skels)} for Android, complete")


def _named(name: str, fault: FileFault) -> str:
    return fault.problem if fault.problem.startswith(name) else f"{name} {fault.problem}"


def cpu_line(method: Method, *, on_cpu: bool) -> CheckLine:
    """Return the line of the operators that no delegate took."""
    left = sorted(method.cpu_operators.items(), key=lambda one: (-one[1], one[0]))
    if not left:
        return ok("on the CPU", "no operator" if not on_cpu else "all, by the delegate")
    names = fmt.first_of([f"{name} {count}" for name, count in left], _NAMED_OPERATORS, "other kinds")
    if on_cpu:
        return ok("on the CPU", names)
    parts = len(method.delegates)
    step = "each border copies tensors; docs/reference/operators.md lists the operators of QNN"
    return warning("on the CPU", f"{names}, beside {parts} delegated parts", step)


def error_line(figures: Sequence[Figures] | None, *, is_compared: bool) -> CheckLine:
    """Return the line of the expected error against FP32."""
    if figures is None and is_compared:
        return ok("error", "compared with the expected outputs after the execution")
    if figures is None:
        return warning("error", "unknown", "--expect FP32 outputs, or run the module, as net.py:Net")
    if not figures:
        return ok("error", "not computed: floating point is compared after the execution")
    values = [one.sqnr_db for one in figures]
    shown = ", ".join(f"output {index} SQNR {fmt.decibel(value)} dB" for index, value in enumerate(values))
    text = f"{shown} against FP32, by the quantized module on the CPU"
    if any(value is not None and value < _LEAST_SQNR_DB for value in values):
        return warning("error", text, "another --precision, or real inputs to calibrate with")
    return ok("error", text)


def size_line(pte_bytes: int, contexts: Contexts) -> CheckLine:
    """Return the line of the sizes of the file and of its greatest context."""
    text = f"{fmt.size(pte_bytes)}"
    if contexts.sizes:
        text += f", {len(contexts.sizes)} for QNN, the greatest {fmt.size(max(contexts.sizes))}"
        if max(contexts.sizes) > _MOST_CONTEXT_BYTES:
            return error("size", text, "the DSP addresses 4 GB: split the program")
    return ok("size", text)


def vtcm_line(soc: Soc, values: Sequence[Value]) -> CheckLine:
    """Return the line of the VTCM: the inputs and outputs that do not fit into it as a whole.

    A context does not show farm the tensors inside of it, so that a program with small inputs may spill too.
    """
    room = soc.vtcm_mb << 20
    text = f"{soc.vtcm_mb} MB"
    if large := [value for value in values if value.is_tensor and value.nbytes > room]:
        greatest = max(large, key=lambda value: value.nbytes)
        step = "HTP works on it in pieces through DDR; smaller tensors are faster"
        return warning("VTCM", f"{text}, less than {greatest} ({fmt.size(greatest.nbytes)})", step)
    return ok("VTCM", f"{text}, more than each input and output")


PlannedProgram = tuple[ReadyProgram, tuple[CheckLine, ...]]
"""Program for one SoC, with its fit."""


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


def _planned(config: Config, tools: Toolchain, ready: ReadyProgram, figures: list[Figures] | None) -> PlannedProgram:
    """Return a program with its fit.

    `figures` are of each output of the quantized module against FP32, None without a module.
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
        lines.append(ok("skel", "none: QNN's simulator runs it"))
    lines += [cpu_line(method, on_cpu=backend.on_cpu), error_line(figures, is_compared=bool(ready.expected))]
    lines += [size_line(ready.path.stat().st_size, contexts)]
    if target.backend == "htp":
        lines.append(vtcm_line(soc, (*method.inputs, *method.outputs)))
    return ready, tuple(lines)


def _compiled(
    config: Config, tools: Toolchain, request: ReadyRequest, socs: Sequence[str], module: NamedModule, precision: str
) -> list[PlannedProgram]:
    backend = request.backend or DEFAULT_BACKEND
    inputs = request.inputs or write_example_inputs(config, tools, module)
    jobs = [module_job(module, inputs, soc, backend, precision_of(backend, precision)) for soc in socs]
    found = []
    with Supervisor() as supervisor:
        for job in jobs:
            bundle = compile_module(config, tools, supervisor, job)
            named = msgspec.structs.replace(
                request,
                model=bundle.model,
                name=f"{module.label}_{job.target.precision}",
                soc=job.target.soc,
                backend=backend,
                inputs=tuple(inputs),
            )
            places = range(len(bundle.manifest.outputs))
            ready = plan_ready(named, (tuple(bundle.reference(_FP32, 0, place) for place in places),))
            if not request.inputs:
                ready.sources = tuple(f"example input {index}" for index in range(len(inputs)))
            found.append(_planned(config, tools, ready, expected_error(bundle)))
    return found


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
