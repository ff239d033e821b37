"""Stored result, run again from its exact bundle, and both results side by side."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from farm.base.config.settings import Config
from farm.builds.runtime.runtime import LLAMA_RUNNER
from farm.dispatch.pool.fleet import Choice
from farm.dispatch.request.choose import require_dsp
from farm.replay.one_off import LlamaProgram, OneOffOutcome, OneOffRequest, job_of, run_one
from farm.replay.stored_result import StoredResult, find_bundle, find_job
from farm.results.analysis.history import changed_facts
from farm.results.attempt import Attempt, Verdict
from farm.store.records import RunToolchain
from farm.store.store import Store

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
    heap, seconds = stored.is_heap, stored.seconds
    if program is not None:
        as_then = f"as run {stored.run.id} did"
        if heap:
            logger.warning("%s measures no DSP heap, %s: --heap is left out", LLAMA_RUNNER, as_then)
        if seconds is not None:
            logger.warning("%s does not generate for %s s, %s: --seconds is left out", LLAMA_RUNNER, seconds, as_then)
        heap, seconds = False, None
    if heap and virtual:
        require_dsp(config)
    request = OneOffRequest(
        job=job if program is None else job_of(job),
        program=program,
        virtual=virtual,
        choice=Choice((stored.attempt.device if device == SAME else device,)) if device else Choice(),
        profile=stored.profile,
        heap=heap,
        seconds=seconds,
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
