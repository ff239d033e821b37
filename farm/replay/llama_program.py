"""The user's `qnn_llama_runner` in place of farm's own runner: files to push, supported targets, judgement.

Jobs of this runner belong to their own suite, so that their numbers share no series with jobs of farm's runner.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.base.errors import ConfigError, UsageError
from farm.base.hashes import sha256_of
from farm.builds.bundles.bundle import Bundle
from farm.builds.bundles.generation import DECODE
from farm.builds.program.pte import read_pte
from farm.builds.runtime.native.elf import AARCH64, MACHINES, X86_64, read_elf
from farm.builds.runtime.runtime import LLAMA_RUNNER, Runtime, with_runner
from farm.devices.execution.llama_runner import LOGITS, OWN_FLAGS, TOKENIZER, Dumped
from farm.devices.execution.raw import RESULT_FILE, RawResult
from farm.results.judge import judge
from farm.suites.suite import Job

if TYPE_CHECKING:
    from collections.abc import Mapping

    from farm.dispatch.device_run.device_run import DeviceRun
    from farm.results.attempt import Attempt

_FLAG = re.compile(r"([a-z][a-z0-9_]{0,63})=([^\0\n]{0,1024})")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,127}")
_JUDGED = "judged"


class LlamaProgram(msgspec.Struct, frozen=True, kw_only=True):
    """Request of the user."""

    program: Path
    tokenizer: Path
    """Tokenizer, which is always loaded and defines the end of a text."""
    libraries: tuple[Path, ...] = ()
    """Libraries that the program needs besides farm's libraries."""
    flags: tuple[str, ...] = ()
    """`NAME=VALUE` each."""

    @property
    def facts(self) -> dict[str, str]:
        """Facts that the program's numbers depend on, besides the facts of any run. Raises UsageError."""
        named = (self.program, self.tokenizer, *self.libraries)
        try:
            hashes = [sha256_of(path)[:12] for path in named]
        except OSError as error:
            raise UsageError(f"cannot read {error.filename}: {error.strerror}") from None
        files = " ".join(f"{path.name}:{sha256}" for path, sha256 in zip(named, hashes, strict=True))
        return {"program": " ".join((LLAMA_RUNNER, files, *self.flags))}


def job_of(job: Job) -> Job:
    """Return `job` for the program. Raises UsageError for an unsupported target."""
    if job.target.options or job.target.direct:
        raise UsageError(f"{LLAMA_RUNNER} takes no run-time options of a backend, and knows no direct mode")
    return Job(msgspec.structs.replace(job.case, suite=LLAMA_RUNNER), job.target)


def runtime_with(program: LlamaProgram, runtime: Runtime, cache_dir: Path) -> Runtime:
    """Return `runtime` with the program as its runner.

    Raises ConfigError for a file that is made for something else, UsageError.
    """
    if lost := [path for path in (program.program, program.tokenizer, *program.libraries) if not path.is_file()]:
        raise UsageError(f"{lost[0]} is no file")
    for path in (program.program, *program.libraries):
        _require_machine(path, X86_64 if runtime.kind == "simulator" else AARCH64, runtime)
    for path in (program.tokenizer, *program.libraries):
        if not _FILE_NAME.fullmatch(path.name):
            raise UsageError(f"{path}: a file for a device has letters, digits and ._+- in its name")
    files = {path.name: path for path in program.libraries}
    files |= {LLAMA_RUNNER: program.program, f"{TOKENIZER}/{program.tokenizer.name}": program.tokenizer}
    return with_runner(cache_dir, runtime, LLAMA_RUNNER, files, _flags(program))


def _require_machine(path: Path, machine: int, runtime: Runtime) -> None:
    where = "a virtual device, which is this machine," if runtime.kind == "simulator" else "the device"
    try:
        with path.open("rb") as file:
            if runtime.kind == "simulator" and file.read(2) == b"#!":
                return
        found = read_elf(path)
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    if found.machine != machine:
        raise ConfigError(path, "", f"is made for {found.machine_name}, and {where} needs {MACHINES[machine]}")


def _flags(program: LlamaProgram) -> dict[str, str]:
    flags = {}
    for text in program.flags:
        match = _FLAG.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not NAME=VALUE, as decoder_model_version=qwen3")
        if match[1] in OWN_FLAGS:
            raise UsageError(f"{match[1]} is set by farm: leave it out")
        flags[match[1]] = match[2]
    return flags


def require_bundle(bundle: Bundle) -> None:
    """Raise UsageError for a bundle that the program cannot run, or whose logits it cannot write."""
    generation = bundle.manifest.generation
    problem = ""
    if generation is None:
        problem = "and this is no case of text"
    elif generation.likelihoods is not None:
        problem = "and keeps no probabilities of a given text"
    elif generation.decode != 1:
        problem = "and by decoders that take one token a call"
    elif max(generation.prompt_tokens) >= generation.context:
        problem = f"and takes no prompt as long as the context, {generation.context}"
    elif bundle.manifest.outputs and max(generation.scored) >= generation.context:
        problem = f"and scores no sequence as long as the context, {generation.context}: ask for fewer new tokens"
    else:
        logits = read_pte(bundle.model).method(DECODE, "its program").outputs[0]
        if logits.dtype != "uint16":
            problem = f"and writes logits as uint16: this program gives {logits.dtype}"
    if problem:
        raise UsageError(f"{LLAMA_RUNNER} generates text, {problem}")


def judged(run: DeviceRun, job: Job, bundle: Bundle, raw: RawResult) -> tuple[Attempt, Bundle, RawResult]:
    """Return the attempt of an execution, the judged part of the bundle, and the execution with its logits.

    The program writes logits of `kv_forward` alone, so that one output of a decoder with a prompt method is judged.
    """
    view = _decode_alone(bundle)
    dumped = Dumped()
    file = raw.folder / RESULT_FILE
    if file.is_file() and raw.exit_code == 0 and not raw.error:
        # Written here: see `farm.devices.execution.llama_runner`.
        dumped = msgspec.json.decode(file.read_bytes(), type=Dumped)
    looked = raw
    if dumped.observed:
        try:
            looked = _converted(view, raw)
        except (OSError, ValueError) as error:
            looked = msgspec.structs.replace(raw, error=f"its logits cannot be read: {error}", error_stage="pull")
    looked = msgspec.structs.replace(looked, notes=(*looked.notes, *dumped.notes))
    attempt = judge(job, view, looked, observed=dumped.observed)
    return run.excuse_damage(attempt, bundle, raw), view, looked


def _decode_alone(bundle: Bundle) -> Bundle:
    manifest, generation = bundle.manifest, bundle.manifest.generation
    if generation is None:
        return bundle
    alone = msgspec.structs.replace(generation, prefill=0)
    return Bundle(bundle.folder, msgspec.structs.replace(manifest, outputs=manifest.outputs[:1], generation=alone))


def _converted(bundle: Bundle, raw: RawResult) -> RawResult:
    """Return `raw` with its logits in the unit of the references, in a folder of their own. Raises ValueError."""
    folder, generation = raw.folder / _JUDGED, bundle.manifest.generation
    folder.mkdir()
    shutil.copyfile(raw.folder / RESULT_FILE, folder / RESULT_FILE)
    looked = msgspec.structs.replace(raw, folder=folder)
    if generation is None or not bundle.manifest.outputs:
        return looked
    numbers = {method.name: method.outputs[0].number for method in read_pte(bundle.model).methods if method.outputs}
    scale, zero_point = _unit(numbers)
    [spec] = bundle.manifest.outputs
    for sample, rows in enumerate(generation.scored):
        logits = np.zeros(spec.shape, np.float32)
        found = np.fromfile(raw.output(sample, 0), LOGITS).reshape(rows, generation.vocabulary)
        logits[:rows] = (found.astype(np.float32) - np.float32(zero_point)) * np.float32(scale)
        looked.output(sample, 0).write_bytes(logits.tobytes())
    return looked


def _unit(numbers: Mapping[str, float | None]) -> tuple[float, float]:
    scale, zero_point = numbers.get("get_logits_scale"), numbers.get("get_logits_zero_point")
    if scale is None or zero_point is None or not 0 < scale < float("inf"):
        raise ValueError("the program does not give their scale (get_logits_scale, get_logits_zero_point)")
    return scale, zero_point
