"""Possible mistakes of a language model's runner, made around the real one, and the verdict on each.

`decoder_mutations.cpp` stands between the runner and the QNN backend.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path, PurePosixPath

import msgspec
import numpy as np
import pytest
from built_stub import SOURCES, built_stub, executorch_flags

from farm.base.hashes import sha256_of
from farm.builds.bundles.bundle import INPUTS, MANIFEST, MODEL, Bundle
from farm.builds.runtime.runtime import Runtime, simulator_runtime
from farm.devices.execution.raw import RESULT_FILE, RawResult, RunnerOptions
from farm.devices.execution.session import options_for, program_and_profile, session_flags
from farm.devices.execution.workspace import Workspace, job_layout
from farm.devices.process import Link
from farm.results.attempt import Attempt, Stage, Verdict
from farm.results.judge import judge
from farm.suites.generate import Generate
from farm.suites.suite import Case, Job, Target

MUTATIONS = (
    "value_not_written",
    "mask_off_by_one",
    "layers_exchanged",
    "wrong_element",
    "stale_cache",
    "wrong_scale",
    "wrong_logits_scale",
    "wrong_place",
)
_PROMPT, _NEW = 5, 6


def shortened(bundle: Bundle, folder: Path) -> Bundle:
    """Return `bundle` in `folder` with all texts cut: two short prompts suffice, and simulated steps are slow.

    The logits of a position depend on earlier positions alone, so that the references stay true.
    """
    manifest = bundle.manifest
    assert manifest.generation is not None
    length, vocabulary = _PROMPT + _NEW, manifest.generation.vocabulary
    files = {MODEL: bundle.model.read_bytes()}
    for sample in range(manifest.samples):
        prompt, scored = (np.fromfile(path, np.int32) for path in bundle.input_files(sample))
        assert min(manifest.generation.prompt_tokens[sample], manifest.generation.scored[sample] - _NEW) >= _PROMPT
        files[f"{INPUTS}/input_{sample}_0.raw"] = prompt[:_PROMPT].tobytes()
        files[f"{INPUTS}/input_{sample}_1.raw"] = scored[:length].tobytes()
        for kind in manifest.references:
            for index in range(len(manifest.outputs)):
                logits = bundle.reference(kind, sample, index)[:length]
                files[f"reference_{kind}/output_{sample}_{index}.raw"] = logits.tobytes()
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    samples = manifest.samples
    cut = msgspec.structs.replace(
        manifest,
        inputs=tuple(
            msgspec.structs.replace(spec, shape=(size,))
            for spec, size in zip(manifest.inputs, (_PROMPT, length), strict=True)
        ),
        outputs=tuple(msgspec.structs.replace(spec, shape=(length, vocabulary)) for spec in manifest.outputs),
        files={name: sha256_of(folder / name) for name in files},
        generation=msgspec.structs.replace(
            manifest.generation,
            new=_NEW,
            prompt_tokens=(_PROMPT,) * samples,
            scored=(length,) * samples,
            # The expected tokens follow other prompts.
            tokens={},
        ),
    )
    (folder / MANIFEST).write_bytes(msgspec.json.encode(cut))
    return Bundle(folder, cut)


def run_mutated(bundle: Bundle, runtime: Runtime, folder: Path, library: Path, mutation: str = "") -> Attempt:
    """Run a bundle in the new `folder` by the runner of production, with a mistake, and return the judged attempt."""
    libraries, workspace = folder / "runtime", folder / "workspace"
    for name, path in runtime.files.items():
        (libraries / name).parent.mkdir(parents=True, exist_ok=True)
        (libraries / name).symlink_to(path)
    job = PurePosixPath("job")
    layout = job_layout(bundle, job, runtime.kind)
    workspace.mkdir()
    for place, content in layout.files.items():
        source = layout.objects[content.target.name] if isinstance(content, Link) else content
        target = workspace / place.relative_to(job)
        target.write_bytes(source if isinstance(source, bytes) else source.read_bytes())
    options = options_for(bundle.manifest, RunnerOptions())
    flags = {
        **program_and_profile(bundle.manifest, options, runtime.kind),
        **session_flags(Workspace(bundle, job, 0.0), options),
        "result_path": RESULT_FILE,
    }
    # The flag belongs to a session with many jobs.
    del flags["working_folder"]
    manifest = bundle.manifest
    case = Case("mutations", "case", "", (), generate=Generate(), samples=manifest.samples)
    judged = Job(case, Target(manifest.soc, manifest.backend, manifest.precision))
    began = time.monotonic()
    done = subprocess.run(
        [str(libraries / runtime.runner), *(f"--{name}={value}" for name, value in flags.items())],
        cwd=workspace,
        env={"LD_LIBRARY_PATH": str(libraries), "LD_PRELOAD": str(library), "DECODER_MUTATION": mutation or "none"},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=600,
    )
    raw = RawResult(
        job_id=judged.id,
        serial="simulator",
        workspace=PurePosixPath(workspace),
        folder=workspace,
        started_ms=1,
        exit_code=done.returncode,
        stderr=done.stderr,
        run_seconds=time.monotonic() - began,
        simulated=True,
    )
    return judge(judged, bundle, raw)


@pytest.mark.whole
def test_the_judge_refuses_every_mutation_for_its_numbers(
    generated_bundle: Bundle, farm_cache: Path, tmp_path: Path
) -> None:
    runtime = simulator_runtime(farm_cache)
    flags = (*executorch_flags(), "-O1", "-shared", "-fPIC", SOURCES / "decoder_mutations.cpp")
    library = built_stub(farm_cache, "decoder_mutations.so", *flags)
    short = shortened(generated_bundle, tmp_path / "bundle")
    plain = run_mutated(short, runtime, tmp_path / "plain", library)
    assert plain.verdict is Verdict.PASSED, f"without a mutation: {plain.stage}: {plain.reason}"
    stages = {name: run_mutated(short, runtime, tmp_path / name, library, name).stage for name in MUTATIONS}
    # A runner that cannot run is no catch.
    assert stages == dict.fromkeys(MUTATIONS, Stage.NUMERICS)
