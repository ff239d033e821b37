"""Check that the limits of a case decide its verdict: a job without deciding limits is refused before its build."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.descriptor import QUANTIZED_PRECISIONS
from farm.base.backends.registry import runs_on_cpu
from farm.base.errors import ConfigError
from farm.suites.figures import COMPARED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from farm.suites.suite import Job, Limits

MANIFEST = "suite.toml"
FIRST_LIMITS = "{ sqnr_db = 10.0, mismatch = 0.0 }"
"""Limits against FP32 for a first run, whose results suggest better ones."""


def references_of(job: Job) -> tuple[str, ...]:
    """Return the references for the outputs of `job`; none for a job without expected outputs."""
    case, target = job.case, job.target
    if case.pte:
        return ("fp32",) if case.module or case.program or case.expected else ()
    quantizes = target.precision in QUANTIZED_PRECISIONS and not runs_on_cpu(target.backend)
    return ("fp32", "quantized") if quantizes else ("fp32",)


def require_limits(jobs: Iterable[Job]) -> None:
    """Raise ConfigError, which names manifest, key and what to write, for jobs that no limit can decide."""
    undecided = [job for job in jobs if not _is_decided(job)]
    if not undecided:
        return
    first = undecided[0].case
    precision = undecided[0].target.precision
    keys = dict.fromkeys(f"case.{job.case.name}.tolerance.{job.target.precision}" for job in undecided)
    key, *others = keys
    shown = f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}"
    problem = (
        f"no limit decides its outputs at {precision}: for a first run write [{key}] with fp32 = {FIRST_LIMITS}, "
        f"then 'farm suites tune {first.suite}/{first.name}' suggests better ones; or leave {precision} out"
    )
    raise ConfigError(first.manifest, key, f"{problem}{f' (so it is with {shown})' if others else ''}")


def _is_decided(job: Job) -> bool:
    references = references_of(job)
    if not references:
        return True
    issue = job.known_issue
    if issue is not None and issue.stage != "numerics":
        # The job ends before its outputs are judged.
        return True
    tolerance = msgspec.structs.asdict(job.case.tolerance(job.target.precision))
    logits = job.case.generate is not None
    return any(_decides(tolerance[reference], logits=logits) for reference in references)


def _decides(limits: Limits, *, logits: bool) -> bool:
    return any(
        figure.decides
        and (limit := getattr(limits, figure.name)) is not None
        and figure.can_break(limit)
        and (logits or not figure.of_logits)
        for figure in COMPARED
    )
