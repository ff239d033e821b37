"""Suite of the programs of results, which runtimes of later toolchains have to run with equal results.

FOLDER/suite.toml                 a case with a `.pte` for each result
FOLDER/CASE/model.pte             program of the earlier toolchain
FOLDER/CASE/input_S_I.npy         by sample and index; for text prompts.json, and scored.json for judged logits
FOLDER/CASE/expected_S_O.npy      recorded outputs if they were kept, else the outputs of the FP32 module
FOLDER/CASE/tokens.json           generated tokens
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farm.base.backends.registry import runs_on_cpu
from farm.base.config.settings import Config
from farm.base.errors import UsageError
from farm.base.text import one_line
from farm.builds.bundles.bundle import MODEL, Bundle, Generation, read_tensor
from farm.builds.program.pte import read_pte
from farm.dispatch.request.records import config_to_run_again
from farm.dispatch.request.tuning import observed
from farm.replay.bundle_folder import publish_folder
from farm.replay.stored_result import StoredResult, find_job, kept_bundle, stored_bundle, target_of
from farm.report.model.format import first_of
from farm.results.analysis.tolerances import suggest_limits
from farm.results.attempt import Verdict
from farm.store.artifacts import ArtifactStore, open_artifacts
from farm.suites.manifests import suite_name
from farm.suites.options import MANIFEST
from farm.suites.suite import FORWARD, Case, Limits
from farm.suites.toml_text import toml_value

_VERSIONS = ("executorch", "qnn", "torch")
# Limits for programs that repeat bit for bit, as for float32, above its rounding.
_SAME_AS_RECORDED = {"sqnr_db": 100.0, "mismatch": 0.0}
_WIDTH = 200


class KeptProgram(NamedTuple):
    """Result with the data of its case, before any file is written."""

    stored: StoredResult
    bundle: Bundle
    name: str
    """Name of its case."""
    compiled_with: Mapping[str, str]
    expected: tuple[tuple[NDArray[np.generic], ...], ...]
    """Outputs by sample; () where nothing is compared."""
    limits: Mapping[str, float]
    as_then: bool
    """True if `expected` has the recorded outputs, False for the outputs of the FP32 module."""
    tokens: tuple[tuple[int, ...], ...]
    """Generated tokens by prompt."""
    deterministic: bool | None

    @property
    def judged_by(self) -> str:
        """Text that names the deciding limits of the case."""
        outputs = "its past outputs" if self.as_then else "the FP32 module, within the distance of that run"
        words = [*(["its past tokens"] if self.tokens else []), *([outputs] if self.expected else [])]
        return " and ".join(words) or "that it runs"


def keep_suite(
    config: Config, results: Sequence[StoredResult], folder: Path, toolchain: str
) -> tuple[list[KeptProgram], list[str]]:
    """Write a suite of the programs of `results` into the new or empty `folder`.

    Return the programs, and the reasons of left out ones. A pruned bundle is compiled again, by `toolchain` or the
    run's own, if the result is equal. Raises UsageError for results that do not fit into one suite, if none can be
    kept, or if it cannot be written.
    """
    places = sorted({f"{one.view.soc}-{one.view.backend}" for one in results})
    if len(places) > 1:
        problem = f"a suite of programs is for one SoC and backend, and these are for {', '.join(places)}"
        raise UsageError(f"{problem}: narrow the pattern, as in '{results[0].view.suite}/*[{places[0]}-*'")
    name = suite_name(folder)
    artifacts = open_artifacts(config)
    kept: list[KeptProgram] = []
    left_out = []
    for stored in results:
        try:
            bundle = _exact_bundle(config, stored, toolchain)
            if not (why := why_not_kept(stored, bundle)):
                case_name = _case_name(stored, [one.name for one in kept])
                kept.append(_keep_program(config, artifacts, stored, bundle, case_name))
        except UsageError as error:
            why = str(error)
        if why:
            left_out.append(f"{stored.view.id}: {why}")
    if not kept:
        raise UsageError(f"there is nothing to make a suite of: {left_out[0]}")

    def fill(partial: Path) -> None:
        text = "\n".join([_head(name, kept), *(_written(partial, one) for one in kept)])
        (partial / MANIFEST).write_text(text, encoding="utf-8")

    publish_folder(folder, fill)
    return kept, left_out


def _exact_bundle(config: Config, stored: StoredResult, toolchain: str) -> Bundle:
    if (bundle := kept_bundle(config, stored)) is not None:
        return bundle
    selected = config_to_run_again(config, stored.run, toolchain)
    return stored_bundle(selected, stored, virtual=stored.kind == "virtual")


def why_not_kept(stored: StoredResult, bundle: Bundle) -> str:
    """Return the reason why the suite cannot keep a result; "" if it can."""
    manifest, attempt = bundle.manifest, stored.attempt
    reasons = {
        f"it {attempt.verdict} in run {stored.run.id}, and only passed results can be references": (
            attempt.verdict is not Verdict.PASSED
        ),
        "it is for direct mode, which is an option of a run and not of a case": target_of(stored.view).direct,
        "it has a state of its own, so that its outputs depend on earlier executions": manifest.stateful,
        "it wants an op package, which comes with a case that is compiled alone": _wants_packages(bundle),
        "it takes no input": not manifest.inputs,
        "it is asked of a text or a task how likely that is, which its own case has": (
            manifest.generation is not None and manifest.generation.likelihoods is not None
        ),
        f"its tokens were not kept by run {stored.run.id}: run it again": (
            manifest.generation is not None and not stored.tokens
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _wants_packages(bundle: Bundle) -> bool:
    method = read_pte(bundle.model).method(bundle.manifest.method, "the bundle")
    return any(one.qnn and one.qnn.op_packages for one in method.delegates)


def _keep_program(
    config: Config, artifacts: ArtifactStore, stored: StoredResult, bundle: Bundle, name: str
) -> KeptProgram:
    """Return the data of the case `name` of a result. Raises UsageError for damaged files, StoreError."""
    case = _case_of(config, stored)
    manifest = bundle.manifest
    if manifest.delegated_ops is not None:
        compiled_with = {key: manifest.versions[key] for key in _VERSIONS if key in manifest.versions}
    else:
        # The manifest of a program compiled elsewhere has the versions of its recording.
        compiled_with = dict(case.compiled_with) if case is not None else {}
    deterministic = case.deterministic if case is not None else None
    outputs = _recorded_outputs(artifacts, stored, bundle) if deterministic is not False else ()
    expected, limits = outputs, dict(_SAME_AS_RECORDED)
    if not outputs and "fp32" in manifest.references and manifest.outputs:
        expected, limits = _references(bundle), _recorded_limits(stored, generates=manifest.generation is not None)
    return KeptProgram(
        stored=stored,
        bundle=bundle,
        name=name,
        compiled_with=compiled_with,
        expected=expected if limits else (),
        limits=limits,
        as_then=bool(outputs),
        tokens=_recorded_tokens(artifacts, stored),
        deterministic=deterministic,
    )


def _case_name(stored: StoredResult, taken: Collection[str]) -> str:
    """Return the name of a result's case: its own name, with precision and a number if that is `taken`."""
    view = stored.view
    base = re.sub(r"[^a-z0-9_]+", "_", view.case.lower()).strip("_")[:48] or "program"
    names = [base, f"{base}_{view.precision}", *(f"{base}_{view.precision}_{n}" for n in range(2, len(taken) + 3))]
    return next(name for name in names if name not in taken)


def _case_of(config: Config, stored: StoredResult) -> Case | None:
    try:
        return find_job(config, stored).case
    except UsageError:
        return None


def _recorded_outputs(
    artifacts: ArtifactStore, stored: StoredResult, bundle: Bundle
) -> tuple[tuple[NDArray[np.generic], ...], ...]:
    """Return the outputs that were kept, by sample; () unless all of them are here."""
    specs, found = bundle.manifest.outputs, []
    for sample in range(bundle.manifest.samples) if specs else ():
        paths = [artifacts.find_whole(stored.outputs.get(f"output_{sample}_{n}.raw", "")) for n in range(len(specs))]
        row = [(path, spec) for path, spec in zip(paths, specs, strict=True) if path]
        if len(row) < len(specs) or any(path.stat().st_size != spec.nbytes for path, spec in row):
            return ()
        found.append(tuple(read_tensor(path, spec) for path, spec in row))
    return tuple(found)


def _recorded_tokens(artifacts: ArtifactStore, stored: StoredResult) -> tuple[tuple[int, ...], ...]:
    if not stored.tokens:
        return ()
    path = artifacts.find_whole(stored.tokens)
    if path is None:
        raise UsageError(f"what {stored.view.id} generated in run {stored.run.id} is lost or damaged: run it again")
    return msgspec.json.decode(path.read_bytes(), type=tuple[tuple[int, ...], ...])


def _references(bundle: Bundle) -> tuple[tuple[NDArray[np.generic], ...], ...]:
    manifest = bundle.manifest
    return tuple(
        tuple(bundle.reference("fp32", sample, index) for index in range(len(manifest.outputs)))
        for sample in range(manifest.samples)
    )


def _recorded_limits(stored: StoredResult, *, generates: bool) -> dict[str, float]:
    """Return limits against the FP32 module as `farm suites tune` suggests them, from this result alone."""
    seen = [one for one in observed(stored.attempt, stored.run.id) if one.reference == "fp32"]
    in_force = Limits(worst_position_db=0.0) if generates else Limits()
    try:
        return {one.figure: one.suggested for one in suggest_limits(seen, {"fp32": in_force})}
    except ValueError:
        return {}


def _head(name: str, programs: Sequence[KeptProgram]) -> str:
    compiled = sorted({_versions(one.compiled_with) for one in programs} - {""})
    runs = sorted({one.stored.run.id for one in programs})
    backend = programs[0].stored.view.backend
    about = f"Programs of {'; '.join(compiled) or 'an unknown toolchain'}, as they ran in {first_of(runs, 3)}"
    backends = "" if runs_on_cpu(backend) else f"backends = {json.dumps([backend])}\n"
    return (
        "# Made by farm jobs bundle --as-suite: programs that people have, which later toolchains have to run.\n\n"
        f"[suite]\nname = {json.dumps(name)}\ndescription = {json.dumps(one_line(about, 200))}\n{backends}"
    )


def _versions(compiled_with: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in compiled_with.items())


def _written(folder: Path, program: KeptProgram) -> str:
    """Write the files of a case below `folder`, and return its tables."""
    name, stored, manifest = program.name, program.stored, program.bundle.manifest
    (folder / name).mkdir()
    shutil.copyfile(program.bundle.model, folder / name / MODEL)
    entries: dict[str, object] = {"pte": f"{name}/{MODEL}", "precisions": [manifest.precision]}
    if program.deterministic is not None:
        entries["deterministic"] = program.deterministic
    if manifest.generation is None:
        paths = (zip(program.bundle.input_files(n), manifest.inputs, strict=True) for n in range(manifest.samples))
        files = _saved(folder, name, "input", [[read_tensor(path, spec) for path, spec in one] for one in paths])
        entries |= {"samples": manifest.samples} if manifest.samples > 1 else {}
        entries["inputs"] = [{"files": list(column)} for column in zip(*files, strict=True)]
        entries |= {"method": manifest.method} if manifest.method != FORWARD else {}
        state = [{"output": one.output, "input": one.input} for one in manifest.state]
        entries |= {"state": state} if state else {}
    if program.expected:
        entries["expected"] = _saved(folder, name, "expected", program.expected)
    lines = [
        f"# {one_line(stored.description, _WIDTH)}",
        f"# Judged by {program.judged_by}.",
        f"[case.{name}]",
        *(f"{key} = {toml_value(value)}" for key, value in entries.items()),
    ]
    lines += [f"compiled_with = {toml_value(dict(program.compiled_with))}"] if program.compiled_with else []
    if program.expected:
        lines.append(f"tolerance = {toml_value({manifest.precision: {'fp32': program.limits}})}")
    if manifest.generation is not None:
        generate = _generate(folder, program, manifest.generation)
        lines += [f"[case.{name}.generate]", *(f"{key} = {toml_value(value)}" for key, value in generate.items())]
    return "\n".join(lines) + "\n"


def _saved(folder: Path, name: str, kind: str, samples: Sequence[Sequence[NDArray[np.generic]]]) -> list[list[str]]:
    """Write arrays by sample and index, and return their names as the manifest has them."""
    names = []
    for sample, arrays in enumerate(samples):
        names.append([f"{name}/{kind}_{sample}_{index}.npy" for index in range(len(arrays))])
        for file, array in zip(names[-1], arrays, strict=True):
            np.save(folder / file, array)
    return names


def _generate(folder: Path, program: KeptProgram, generation: Generation) -> dict[str, object]:
    name, bundle = program.name, program.bundle
    entries: dict[str, object] = {
        # The program itself states the positions of a decode step for lookahead.
        "mode": "hybrid" if generation.prefill else "kv",
        "context": generation.context,
        **({"prefill": generation.prefill} if generation.prefill else {}),
        "new": generation.new,
        **({"stop": list(generation.stop)} if generation.stop else {}),
    }
    lists = {"prompts_file": list(_token_rows(bundle, 0)), "expected_file": [list(row) for row in program.tokens]}
    if program.expected:
        lists["score_file"] = list(_token_rows(bundle, 1))
    for key, rows in lists.items():
        file = f"{name}/{'tokens' if key == 'expected_file' else key.removesuffix('_file')}.json"
        (folder / file).write_text(json.dumps(rows) + "\n", encoding="utf-8")
        entries[key] = file
    return entries


def _token_rows(bundle: Bundle, index: int) -> Iterator[list[int]]:
    """Yield the token ids of one input, by sample; -1 is behind their end."""
    spec = bundle.manifest.inputs[index]
    for sample in range(bundle.manifest.samples):
        yield [int(token) for token in read_tensor(bundle.input_files(sample)[index], spec).ravel() if int(token) >= 0]
