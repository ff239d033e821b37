"""A job as users name it: its id, or suite/case with options for its target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND
from farm.base.errors import StoreError, UnknownNameError, UsageError
from farm.base.socs import find_soc
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.options import parse_options
from farm.suites.suite import Case, Job, Suite, plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from farm.base.config.settings import Config


def named_job(
    config: Config,
    text: str,
    command: str,
    *,
    soc: str | None = None,
    precision: str | None = None,
    options: Sequence[str] = (),
) -> Job:
    """Return the job that `text` names: `suite/case[SM8650-htp-8a8w]`, or `suite/case` with an SoC and a precision.

    An SoC may be left out where the store has the case on only one, a precision where the case has only one.
    `command` is what an error shows as an example. Raises UnknownNameError with the nearest name, IllegalTargetError,
    UsageError for a text that names no job or several.
    """
    name, bracket, target = text.partition("[")
    suite_name, slash, case_name = name.rpartition("/")
    if not slash or not suite_name or not case_name or (bracket and not target.endswith("]")):
        raise UsageError(f"{text!r} names no job: expected suite/case[SoC-htp-precision], or suite/case with --soc")
    backend = DEFAULT_BACKEND
    if bracket:
        if soc or precision or options:
            raise UsageError(f"{text!r} has a target already: leave --soc, --precision and --option out")
        soc, backend, precision, options = _parse_target(text, target.removesuffix("]"))
    soc = soc or _only_soc(config, name, command)
    suite, case = find_case(suite_name, case_name, known_suites(config, suite_name))
    (chosen, *others) = parse_options(options, backend)
    if others:
        raise UsageError(f"{name} is one job: give every option one value")
    jobs = plan(
        [msgspec.structs.replace(suite, cases=(case,))],
        [find_soc(soc)],
        backend,
        (precision,) if precision else (),
        (chosen,),
    )
    if len(jobs) > 1:
        precisions = ", ".join(job.target.precision for job in jobs)
        raise UsageError(f"{name} runs at several precisions, {precisions}: choose one with --precision")
    return jobs[0]


def _only_soc(config: Config, name: str, command: str) -> str:
    """Return the SoC that the store has jobs of the case `name` for. Raises UsageError where there is not just one."""
    from farm.store.store import open_store

    try:
        with open_store(config.store_url, readonly=True) as store:
            known = store.history.socs([name])
    except StoreError:
        known = []
    if len(known) == 1:
        return known[0]
    there = f", and there are results on {', '.join(known)}" if known else ""
    example = known[0] if known else "SM8650"
    hint = f"name the SoC with --soc, as in '{command} {name} --soc {example}'"
    raise UsageError(f"{name!r} has no target{there}: {hint}")


def find_case(suite_name: str, case_name: str, known: Mapping[str, Path]) -> tuple[Suite, Case]:
    """Return a suite, by its name in `known` or its path, and its case. Raises UnknownNameError with the nearest."""
    suite = resolve_suite(suite_name, known)
    cases = {case.name: case for case in suite.cases}
    if case_name not in cases:
        raise UnknownNameError("case", case_name, cases, f"in suite {suite.name}")
    return suite, cases[case_name]


def known_suites(config: Config, name: str) -> dict[str, Path]:
    """Return the manifests of suites by name; for `name` also the path from which this user ran it last."""
    known = find_suites(config.suite_folders)
    if "/" not in name and name not in known and (manifest := _manifest_run_last(config, name)):
        known[name] = manifest
    return known


def _manifest_run_last(config: Config, name: str) -> Path | None:
    """Return where the suite `name` was in the newest run whose plan this user has here; None where it is not now."""
    from farm.dispatch.request.resume import planned_jobs
    from farm.store.store import open_store

    try:
        with open_store(config.store_url, readonly=True) as store:
            runs = sorted(set(store.history.newest_runs(name, debug=True).values()), reverse=True)
    except (StoreError, UnknownNameError):
        return None
    for run_id in runs:
        for job in planned_jobs(config.run_folder(run_id)):
            # A case that is included is in the folder of its own suite, which is beside.
            manifest = Path(job.case.folder).parent / name / "suite.toml"
            if job.case.suite == name and manifest.is_file():
                return manifest
    return None


def _parse_target(text: str, target: str) -> tuple[str, str, str, tuple[str, ...]]:
    parts = target.split("-")
    if len(parts) < 3 or not all(parts):
        raise UsageError(
            f"{text!r} has no target that is understood: expected SoC-htp-precision, as in SM8650-htp-8a8w"
        )
    soc, backend, precision, *options = parts
    return soc, backend, precision, tuple(options)
