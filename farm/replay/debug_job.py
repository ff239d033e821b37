"""JOB as a user writes it for `farm debug` -> the one Job that is meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.backends.registry import DEFAULT_BACKEND, find_backend
from farm.errors import IllegalTargetError, UnknownNameError, UsageError
from farm.suites.manifests import find_suites, resolve_suite
from farm.suites.options import parse_options
from farm.suites.socs import find_soc
from farm.suites.suite import plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.config.settings import Config
    from farm.suites.suite import Job


def find_job(
    config: Config, text: str, *, soc: str | None = None, precision: str | None = None, options: Sequence[str] = ()
) -> Job:
    """Return the job that `text` names: `suite/case[SM8650-htp-8a8w]`, or `suite/case` with an SoC and a precision.

    A precision may be left out where the case has only one. Raises UnknownNameError with the nearest name,
    IllegalTargetError, UsageError for a text that names no job or several.
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
    if not soc:
        raise UsageError(f"{text!r} has no target: name the SoC with --soc, as in 'farm debug {name} --soc SM8650'")
    suite = resolve_suite(suite_name, find_suites(config.suite_folders))
    cases = {case.name: case for case in suite.cases}
    if case_name not in cases:
        raise UnknownNameError("case", case_name, cases, f"in suite {suite.name}")
    found = find_soc(soc)
    if not find_backend(backend).has_layers:
        raise IllegalTargetError(
            f"farm debug compares with Qualcomm's HTP simulator and is for the {DEFAULT_BACKEND} backend, not for "
            f"{backend}: "
            f"debug {suite.name}/{case_name} as [{found.name}-{DEFAULT_BACKEND}-PRECISION]"
        )
    (chosen, *others) = parse_options(options, backend)
    if others:
        raise UsageError("one job is debugged at a time: give every option one value")
    narrowed = msgspec.structs.replace(suite, cases=(cases[case_name],))
    jobs = plan([narrowed], [found], backend, (precision,) if precision else (), (chosen,))
    if len(jobs) > 1:
        precisions = ", ".join(job.target.precision for job in jobs)
        raise UsageError(f"{name} runs at several precisions, {precisions}: choose one with --precision")
    job = jobs[0]
    if job.case.pte:
        raise UsageError(f"{name} is a .pte that was compiled already: it has no layers that could be told apart")
    if any(spec.dynamic for spec in job.case.inputs):
        raise UsageError(f"{name} has sizes that are not fixed: layers are compared at fixed ones")
    return job


def _parse_target(text: str, target: str) -> tuple[str, str, str, tuple[str, ...]]:
    parts = target.split("-")
    if len(parts) < 3 or not all(parts):
        raise UsageError(
            f"{text!r} has no target that is understood: expected SoC-htp-precision, as in SM8650-htp-8a8w"
        )
    soc, backend, precision, *options = parts
    return soc, backend, precision, tuple(options)
