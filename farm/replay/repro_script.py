"""A stored result -> a folder with all it takes to run it again, and a shell script that needs nothing but adb."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import MissingPackageError, UsageError
from farm.base.socs import find_soc
from farm.base.text import one_line
from farm.builds.bundles.bundle import MODEL, Bundle
from farm.devices.execution.raw import TOKENS_FILE
from farm.devices.execution.workspace import INPUT_LIST, job_layout, program_flags, shape_flags
from farm.devices.process import Link
from farm.replay.scripts import filled, publish_folder, require_new
from farm.replay.stored_result import StoredResult, stored_bundle, target_of
from farm.suites.options import runtime_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.base.config.settings import Config
    from farm.builds.runtime.runtime import Runtime

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
    from farm.builds.runtime.native.targets import ANDROID, TARGETS
    from farm.builds.runtime.runtime import staged_runtime, virtual_runtime

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
    for name, content in layout.files.items():
        (device / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (device / name).write_bytes(content)
        else:
            source = layout.objects[content.target.name] if isinstance(content, Link) else content
            shutil.copyfile(source, device / name)
    for relative, source in runtime.files.items():
        (device / relative).parent.mkdir(exist_ok=True)
        shutil.copyfile(source, device / relative)
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
    from farm.store.artifacts import open_artifacts

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
    if virtual:
        lines.append(
            "VIRTUAL: the files are for a virtual device on x86_64, never for a phone; its times mean nothing."
        )
    return filled(
        "repro.sh",
        about="\n".join(f"# {one_line(line, 110)}" for line in lines),
        soc=shlex.quote(stored.view.soc),
        machine="x86_64" if virtual else "aarch64",
        root=str(int(runtime.needs_root)),
        checks="\n".join(checks),
    )
