"""Stored result, run again from its exact bundle, here or by a folder with a script that needs nothing but adb."""

from __future__ import annotations

import logging
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from farm.base.config.settings import Config
from farm.base.errors import MissingPackageError, UsageError
from farm.base.socs import find_soc
from farm.base.text import one_line
from farm.builds.bundles.bundle import MODEL, Bundle
from farm.builds.runtime.native import ANDROID, TARGETS
from farm.builds.runtime.runtime import LLAMA_RUNNER, Runtime, staged_runtime, virtual_runtime
from farm.devices.execution.content_store import INPUT_LIST, job_layout, program_flags, shape_flags
from farm.devices.execution.raw import TOKENS_FILE
from farm.devices.process import Link
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.choose import require_dsp
from farm.replay.bundle_folder import filled, publish_folder, require_new
from farm.replay.one_off import LlamaProgram, OneOffOutcome, OneOffRequest, job_of, run_one
from farm.replay.stored_result import StoredResult, find_bundle, find_job, stored_bundle, target_of
from farm.results.analysis.history import changed_facts
from farm.results.attempt import Attempt, Verdict
from farm.store.artifacts import open_artifacts
from farm.store.records import RunToolchain
from farm.store.store import Store
from farm.suites.options import runtime_flags

# A stored result, run again from its exact bundle, and both results side by side.


logger = logging.getLogger(__name__)

SAME = "same"
"""Value of `--device` for the device of the stored result."""

_FACT = "repro"


class ComparedFigure(msgspec.Struct, frozen=True):
    """Figure of both results; None for a missing one."""

    name: str
    unit: str
    then: float | None
    now: float | None


class ReproOutcome(msgspec.Struct, frozen=True):
    """Both results."""

    stored: StoredResult
    now: OneOffOutcome
    rows: tuple[ComparedFigure, ...]
    outputs: str
    """Text on the equality of outputs, byte by byte, as far as known."""
    differences: dict[str, tuple[str, str]]
    """Differing facts of both, then and now; "" for a missing fact."""


def repro(
    config: Config,
    store: Store,
    stored: StoredResult,
    *,
    virtual: bool,
    device: str,
    command: str,
    program: LlamaProgram | None = None,
    **limits: Any,
) -> ReproOutcome:
    """Run a stored result again, judge it by the limits of its case, record it, and return both.

    `device` is a name, serial or id of an attached one, or SAME; empty is any of the SoC, of the kind it was. `limits`
    are iterations, warm_up, reducible and timeout_s of OneOffRequest; all else is measured as in the run of `stored`.
    `program` is what generates in place of farm's runner. Raises UsageError where its bundle is gone and cannot be made
    again, NoDeviceError, IllegalTargetError for the DSP's heap on a virtual device.
    """
    job = find_job(config, stored, by_program=program is not None)
    virtual = virtual or (stored.kind == "virtual" and not device)
    for text in stored.left_out_by(LLAMA_RUNNER) if program is not None else ():
        logger.warning("%s", text)
    heap = stored.is_heap and program is None
    if heap and virtual:
        require_dsp(config)
    request = OneOffRequest(
        job=job if program is None else job_of(job),
        program=program,
        virtual=virtual,
        choice=Choice((stored.attempt.device if device == SAME else device,)) if device else Choice(),
        profile=stored.profile,
        heap=heap,
        seconds=stored.seconds if program is None else None,
        command=command,
        facts={_FACT: stored.run.id},
        toolchain=stored.run.toolchain or RunToolchain(),
        failed_before=stored.attempt.verdict is Verdict.FAILED,
        **limits,
    )
    now = run_one(config, store, request, lambda tools, supervisor: find_bundle(config, stored, job, tools, supervisor))
    facts = store.runs.view(now.run_id).fingerprint
    return ReproOutcome(
        stored=stored,
        now=now,
        rows=tuple(rows(stored.attempt, now.attempt)) if now.attempt else (),
        outputs=compare_outputs(stored.outputs, now.outputs),
        # Runs of older farms record the requested kind of device.
        differences=differences(stored.run.fingerprint | {"device_kind": stored.kind}, facts),
    )


def rows(then: Attempt, now: Attempt) -> list[ComparedFigure]:
    """Return the figures of two attempts with both values, the figures of outputs first. Pure."""
    old, new = _figures(then), _figures(now)
    units = {name: unit for figures in (old, new) for name, (unit, _) in figures.items()}
    return [
        ComparedFigure(name, unit, *(one[name][1] if name in one else None for one in (old, new)))
        for name, unit in units.items()
    ]


def compare_outputs(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a text on the equality of two results' outputs, from the hashes of kept ones. Pure."""
    if not now:
        return "there are no outputs now"
    if not then:
        return "no past output was kept: compare the figures"
    different = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    if not different:
        return f"all {len(now)} the same, byte by byte" if len(now) > 1 else "the same, byte by byte"
    return f"{len(different)} of {len(then.keys() | now.keys())} differ: {', '.join(different[:4])}"


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the facts that are not the same, by name. Pure."""
    return {name: values for name, values in changed_facts(then, now).items() if name != _FACT}


def _figures(attempt: Attempt) -> dict[str, tuple[str, float | None]]:
    """Return the unit and the value of every figure of an attempt, by its name."""
    found: dict[str, tuple[str, float | None]] = {}
    for one in attempt.comparisons:
        named = {"sqnr": ("dB", one.sqnr_db), "cosine": ("1", one.cosine), "max_abs": ("1", one.max_abs)}
        named |= {"steps": ("1", one.steps), "loss": ("dB", one.loss_db), "mismatch": ("1", one.mismatch)}
        place = f"{one.reference}[{one.output}]"
        found |= {f"{name}_{place}": (unit, value) for name, (unit, value) in named.items() if value is not None}
    for measured in attempt.measurements:
        # Figures of comparisons have the worst sample already.
        found.setdefault(measured.metric, (measured.unit, measured.value))
    return found


# A stored result -> a folder with all it takes to run it again, and a shell script that needs nothing but adb.


DEVICE = "device"
"""Part of the folder for the device."""
THEN = "outputs_then"
SCRIPT = "repro.sh"

_ON_DEVICE = "run.sh"
_OUTPUTS = "outputs"
_OUTPUT_NAME = re.compile(r"output_\d+_\d+\.raw")


def write_script(
    config: Config,
    stored: StoredResult,
    folder: Path,
    *,
    virtual: bool,
    iterations: int,
    warm_up: int,
    timeout_s: float,
    named: Sequence[str] = (),
) -> list[str]:
    """Fill `folder`, which is made, and return instructions, line by line.

    `named` has the options of iterations, warm-up and time-out. Raises UsageError for a folder that is not empty or not
    writable, a pruned bundle, or a runner without support of a named option; MissingToolError with all missing files of
    a phone.
    """
    require_new(folder)
    virtual = virtual or stored.kind == "virtual"
    target = target_of(stored.view)
    # The runtime comes first, as it may be missing.
    runtime = _runtime(config, stored, virtual=virtual)
    if runtime.one_shot and named:
        problem = f"{runtime.runner} executes every sample once, without a limit of time"
        raise UsageError(f"in a script {problem}: leave {' and '.join(named)} out")
    bundle = stored_bundle(config, stored, virtual=virtual)
    if problem := bundle.manifest.lacks_for(runtime.kind):
        raise MissingPackageError(problem, "a phone")
    flags = {
        "model_path": MODEL,
        "input_list_path": INPUT_LIST,
        **runtime.flags,
        **runtime_flags(target),
        **program_flags(bundle.manifest, runtime.kind),
        **shape_flags(bundle.manifest),
    }
    if bundle.manifest.generation is not None:
        # Each prompt is generated after once.
        flags |= {"tokens_path": f"{_OUTPUTS}/{TOKENS_FILE}", "warm_up": str(warm_up)}
    elif not target.direct:
        # Direct mode's runner knows neither, and executes every input once.
        flags |= {
            "performance_output_path": f"{_OUTPUTS}/inference_speed.txt",
            "iteration": str(iterations),
            "warm_up": str(warm_up),
        }
    # ExecuTorch's own runners know neither.
    if not runtime.one_shot:
        flags |= {"result_path": f"{_OUTPUTS}/result.json", "timeout_ms": str(round(timeout_s * 1000))}
    recorded = _recorded_outputs(config, stored)
    publish_folder(folder, lambda partial: _fill(partial, stored, bundle, runtime, flags, recorded, virtual=virtual))
    what = "a VIRTUAL device, with the simulator for x86_64: not for a phone" if virtual else "an Android phone"
    lines = [f"{folder}: for {what}", f"run it:  {shlex.quote(str(folder / SCRIPT))} [SERIAL]"]
    lines += stored.left_out_by("the script")
    if not stored.outputs:
        lines.append("the past outputs were not kept: the script checks sizes only")
    if lost := sorted(name for name, path in recorded.items() if path is None):
        lines.append(f"kept past outputs are lost or damaged, and left out: {', '.join(lost)}")
    return lines


def _runtime(config: Config, stored: StoredResult, *, virtual: bool) -> Runtime:
    soc, backend, mode = find_soc(stored.view.soc), stored.view.backend, target_of(stored.view).mode
    if virtual:
        return virtual_runtime(config, soc, backend, mode=mode)
    return staged_runtime(config, soc, backend, TARGETS[ANDROID], mode)


def _fill(
    folder: Path,
    stored: StoredResult,
    bundle: Bundle,
    runtime: Runtime,
    flags: Mapping[str, str],
    recorded: Mapping[str, Path | None],
    *,
    virtual: bool,
) -> None:
    device = folder / DEVICE
    device.mkdir()
    layout = job_layout(bundle, PurePosixPath(), runtime.kind)
    files = {str(name): content for name, content in layout.files.items()} | runtime.files
    for name, content in files.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (device / name).write_bytes(content)
        else:
            source = layout.objects[content.target.name] if isinstance(content, Link) else content
            shutil.copyfile(source, device / name)
    words = " ".join(shlex.quote(f"--{name}={value}") for name, value in flags.items())
    (device / _ON_DEVICE).write_text(
        filled("repro_on_device.sh", outputs=_OUTPUTS, runner=shlex.quote(runtime.runner), flags=words),
        encoding="utf-8",
    )
    for kind in bundle.manifest.references:
        shutil.copytree(bundle.folder / f"reference_{kind}", folder / f"reference_{kind}")
    for output, path in recorded.items():
        if path is not None:
            (folder / THEN).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / THEN / output)
    about = {
        "schema": 1,
        "job": stored.view.id,
        "run": stored.run.id,
        "bundle": bundle.manifest,
        "runtime": runtime.hashes,
        "runtime_kind": runtime.kind,
        "fingerprint": stored.run.fingerprint,
        "then": stored.attempt,
    }
    (folder / "about.json").write_bytes(msgspec.json.format(msgspec.json.encode(about)))
    script = folder / SCRIPT
    script.write_text(_script(stored, bundle, runtime, virtual=virtual), encoding="utf-8")
    script.chmod(0o755)


def _recorded_outputs(config: Config, stored: StoredResult) -> dict[str, Path | None]:
    """Return the kept outputs by their names in the script's folder; None for a lost or damaged one."""
    store = open_artifacts(config)
    # Other users may write where farm keeps the names.
    return {name: store.find_whole(sha256) for name, sha256 in stored.outputs.items() if _OUTPUT_NAME.fullmatch(name)}


def _script(stored: StoredResult, bundle: Bundle, runtime: Runtime, *, virtual: bool) -> str:
    manifest = bundle.manifest
    checks = [
        f"check output_{sample}_{index}.raw {spec.nbytes}"
        for sample in range(manifest.samples)
        for index, spec in enumerate(manifest.outputs)
    ]
    lines = [
        f"Runs {stored.view.id} again, as in run {stored.run.id}, with nothing but adb.",
        f"Then, on {stored.attempt.device} ({stored.kind}): {stored.attempt.verdict} {stored.attempt.reason}",
    ]
    simulated = "VIRTUAL: the files are for a virtual device on x86_64, never for a phone; its times mean nothing."
    lines += [simulated] if virtual else []
    return filled(
        "repro.sh",
        about="\n".join(f"# {one_line(line, 110)}" for line in lines),
        soc=shlex.quote(stored.view.soc),
        machine="x86_64" if virtual else "aarch64",
        root=str(int(runtime.needs_root)),
        checks="\n".join(checks),
    )
