"""Raw result, bundle and job -> attempt: verdict, cause and measurements.

The module writes no files and asks no device. docs/explanation/verdicts.md has the table of verdicts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from farm.base.backends.registry import BACKENDS, runs_on_cpu
from farm.base.errors import BundleError
from farm.base.text import bounded_log, reason_line
from farm.builds.bundles.bundle import NO_ORIGINS, Bundle, read_origins
from farm.devices.execution.raw import ETDUMP_FILE, RESULT_FILE, Observed, RawResult
from farm.results.attempt import Attempt, Cause, Ending, Measurement, Stage, Verdict, failed, infra
from farm.results.generation import judge_tokens, report_problem, untimed_problem, with_tokens
from farm.results.heap import heap_measurements, heap_note, judge_heap, read_heaps
from farm.results.likelihoods import judge_likelihoods
from farm.results.measurements import (
    bundle_measurements,
    numeric_measurements,
    observed_measurements,
    rate_measurements,
    temperatures,
    time_measurements,
)
from farm.results.outcome import known_trouble, outcome
from farm.results.outputs import (
    compare_outputs,
    decide,
    judge_iterations,
    measure_outputs,
    outputs_problem,
    require_comparison,
)
from farm.results.profile.etdump import ETDumpError, intermediate_outputs, read_profile
from farm.results.runner_report import RunnerReport
from farm.suites.suite import Expectation, Job


def slow_problem(expected: Expectation, measured: Iterable[Measurement]) -> str:
    """Return the rate below its expected value; "" for none. Only attached devices are judged."""
    samples = {one.metric: one.samples for one in measured}
    limits = {"decode_rate": expected.least_decode_rate, "prefill_rate": expected.least_prefill_rate}
    for metric, least in limits.items():
        if least is None:
            continue
        if not samples.get(metric):
            return f"{metric} was not measured, expected {least:g} tokens/s or more"
        if (rate := statistics.median(samples[metric])) < least:
            return f"{metric} is {rate:.4g} tokens/s, expected {least:g} or more"
    return ""


def expectation_problem(expected: Expectation, measured: Iterable[Measurement]) -> str:
    """Return what of perplexity or accuracy is worse than expected; "" where nothing is."""
    samples = {one.metric: one.samples for one in measured}
    limits = {"perplexity": expected.most_perplexity, "word_perplexity": expected.most_word_perplexity}
    for metric, most in limits.items():
        if most is None:
            continue
        worst = max(samples.get(f"{metric}[0]", ()), default=None)
        if worst is None:
            return f"{metric} was not measured, expected {most:g} or less"
        if worst > most:
            return f"{metric} is {worst:.5g}, expected {most:g} or less"
    for metric, least in (expected.least_accuracy or {}).items():
        found = samples.get(f"accuracy[{metric}]")
        if not found:
            return f"{metric} was not measured, expected {least:g} or more"
        if found[0] < least:
            count = round(samples["questions"][0])
            return f"{metric} is {found[0]:.4g} ({round(found[0] * count)} of {count}), expected {least:g} or more"
    return ""


_QUANTIZING = ("quantized_decomposed.quantize_per_", "quantized_decomposed.dequantize_per_")


def judge(
    job: Job,
    bundle: Bundle,
    raw: RawResult,
    *,
    operators: bool = False,
    any_runner: bool = False,
    observed: Sequence[Observed] | None = None,
) -> Attempt:
    """Return the attempt of an execution of `job`; with `operators`, with the cost of each node.

    The first of these decides: the end of the execution; missing or misshapen outputs; differing constants of the graph
    and the limits of the case, for every output, sample and reference; references without a signal; iterations with
    other outputs than the last. A job passes only if a limit decides it and the backend ran a part of it, except on the
    CPU.

    `any_runner` allows a runner of an older farm, which does not compare iterations. `observed` has the times of
    ExecuTorch's own text runner, which replace all others.
    """
    report = outcome(raw)
    generates = bundle.manifest.generation is not None
    if not isinstance(report, Ending):
        # Text generation has no equal executions to compare: each step differs.
        ending = (None if any_runner or generates else require_comparison(report)) or _judge_outputs(
            job, bundle, raw, report, operators=operators, observed=observed
        )
    else:
        ending = report
    if ending.verdict is Verdict.PASSED and (problem := delegation_problem(job, bundle)):
        ending = ending.ended_as(failed(Stage.BUILD, problem, Cause.COMPILE))
    if _is_judged(ending) and (problem := write_problem(bundle)):
        numbers = f"; {ending.reason}" if ending.reason else ""
        ending = ending.ended_as(failed(Stage.BUILD, f"{problem}{numbers}", Cause.COMPILE))
    if ending.verdict is Verdict.PASSED and (problem := _dump_problem(job, raw)):
        ending = ending.ended_as(failed(Stage.EXECUTE, problem, Cause.REFUSED))
    if ending.verdict is Verdict.PASSED and generates:
        ending = _as_expected(job, raw, ending)
    measured = ending.measurements
    if raw.heap:
        ending = _heap_alone(job, ending, raw)
        contexts = [one for one in bundle_measurements(bundle.manifest) if one.metric == "partitions"]
        measured = (*ending.measurements, *contexts) if ending.measurements else ()
    elif ending.verdict is not Verdict.INFRA:
        measured = (*measured, *bundle_measurements(bundle.manifest))
    return with_known_issue(
        job,
        virtual=raw.simulated,
        attempt=Attempt(
            job_id=job.id,
            verdict=ending.verdict,
            stage=ending.stage,
            reason=reason_line(ending.reason),
            device=raw.serial,
            started_ms=raw.started_ms,
            seconds=raw.seconds,
            bundle_key=bundle.manifest.key,
            comparisons=ending.comparisons,
            measurements=measured,
            operators=ending.operators,
            cause=ending.cause,
            log=bounded_log(raw.stderr),
            notes=(
                *map(reason_line, (*raw.notes, *ending.notes)),
                *_write_notes(job, bundle),
                *_fallback_notes(bundle),
                *_origin_notes(job),
            ),
        ),
    )


def build_failure(
    job: Job,
    reason: str,
    log: str = "",
    bundle_key: str = "",
    *,
    infra: bool = False,
    started_ms: int = 0,
    seconds: float = 0.0,
) -> Attempt:
    """Return the attempt of a job that was not compiled.

    `infra`: the builder is at fault (killed, disk full), not the module or the compiler.
    """
    return with_known_issue(
        job,
        Attempt(
            job_id=job.id,
            verdict=Verdict.INFRA if infra else Verdict.FAILED,
            stage=Stage.BUILD,
            reason=reason_line(_explained(reason, log)) or "the build failed without a reason: see the log",
            started_ms=started_ms,
            seconds=seconds,
            bundle_key=bundle_key,
            log=bounded_log(log),
            cause=Cause.BUILDER if infra else Cause.COMPILE,
        ),
    )


def build_problem(job: Job, bundle: Bundle) -> str:
    """Return why a compiled program fails its case without an execution; "" where it does not."""
    return delegation_problem(job, bundle) or write_problem(bundle)


def not_simulated(job: Job, bundle: Bundle) -> Attempt:
    """Return the attempt of a job that a simulator cannot execute: skipped, or failed where its build is not right."""
    if problem := build_problem(job, bundle):
        return build_failure(job, problem, bundle_key=bundle.manifest.key)
    reason = f"compiled, and not executed: {bundle.manifest.needs_device}; attach a {bundle.manifest.soc}"
    return Attempt(
        job_id=job.id,
        verdict=Verdict.SKIPPED,
        stage=Stage.BUILD,
        reason=reason_line(reason),
        bundle_key=bundle.manifest.key,
        measurements=bundle_measurements(bundle.manifest),
    )


def _explained(reason: str, log: str) -> str:
    """Return the reason of a failed build, with a known explanation such as contexts too large for a device."""
    trouble = known_trouble(reason) or known_trouble(log, operators=False)
    return "; ".join(filter(None, (reason, trouble.text if trouble else "")))


def _judge_outputs(
    job: Job,
    bundle: Bundle,
    raw: RawResult,
    report: RunnerReport,
    *,
    operators: bool,
    observed: Sequence[Observed] | None,
) -> Ending:
    problem = outputs_problem(bundle, raw, report)
    generation = bundle.manifest.generation
    check = report_problem if observed is None else untimed_problem
    if generation is not None and (refused := check(generation, report)):
        problem = infra(Stage.PULL, f"{RESULT_FILE} is refused: {refused}")
    if problem and problem.verdict is Verdict.INFRA:
        return problem
    try:
        origins = read_origins(bundle.folder) if operators else NO_ORIGINS
        profile = read_profile(raw.folder, report, bundle.manifest.delegates, operators=operators, origins=origins)
        measured = (*time_measurements(report), *profile.measurements)
        if generation is not None:
            rates = rate_measurements(generation, report) if observed is None else observed_measurements(observed)
            measured = (*measured, *rates, *temperatures(raw.temperatures_c))
        ending = problem
        if ending is None:
            findings = compare_outputs(bundle, raw)
            metrics, broken = measure_outputs(job, bundle, raw)
            is_likelihood = generation is not None and generation.likelihoods is not None
            tokens = (judge_likelihoods if is_likelihood else judge_tokens)(bundle, raw, report, findings.figures)
            findings = msgspec.structs.replace(findings, figures=tokens.figures)
            ending = with_tokens(decide(job, bundle, findings, broken), tokens)
            ending = judge_iterations(job, bundle, report, ending)
            number = bundle.manifest.output_number
            numbered = {(number(place), kind): rows for (place, kind), rows in tokens.figures.items()}
            measured = (*measured, *numeric_measurements(numbered), *metrics, *tokens.measurements)
    except BundleError as error:
        return infra(Stage.BUILD, str(error), Cause.BUILDER)
    notes = (*ending.notes, *profile.notes)
    return msgspec.structs.replace(ending, measurements=measured, notes=notes, operators=profile.operators)


def delegation_problem(job: Job, bundle: Bundle) -> str:
    """Return the difference between delegated operators and the case's expectation; "" for none."""
    manifest, backend = bundle.manifest, job.target.backend
    if not manifest.partitions and not runs_on_cpu(backend):
        return f"nothing was delegated to the {backend} backend: the CPU ran it all"
    expected = job.case.expectation(job.target)
    if expected is None:
        return ""
    left, named = (_left_to_cpu(backend, one.fallback_ops) for one in (manifest, expected))
    if (manifest.partitions, left) != (expected.partitions, named):
        return f"{_shown(manifest.partitions, left)}, expected {_shown(expected.partitions, named)}"
    least, shared = expected.least_spill_fill_bytes, manifest.spill_fill_bytes or 0
    if least is not None and shared < least:
        return f"the buffer that its contexts share has {shared} bytes, expected {least} or more"
    if expected.most_pte_bytes is not None and manifest.pte_bytes > expected.most_pte_bytes:
        return f"the program has {manifest.pte_bytes} bytes, expected {expected.most_pte_bytes} or less"
    return ""


def write_problem(bundle: Bundle) -> str:
    """Return which writes of the module to its inputs and buffers the program lacks; "" where it has all."""
    lost = " and its ".join(bundle.manifest.lost_writes)
    return f"the program does not write to its {lost}, as the module does: return the new value instead" if lost else ""


def _is_judged(ending: Ending) -> bool:
    return ending.verdict is Verdict.PASSED or (ending.verdict is Verdict.FAILED and ending.stage is Stage.NUMERICS)


def _as_expected(job: Job, raw: RawResult, ending: Ending) -> Ending:
    """Return `ending`, failed where the text is slower or worse than the case expects."""
    expected = job.case.expectation_of_text(job.target)
    if expected is None:
        return ending
    if problem := expectation_problem(expected, ending.measurements):
        return ending.ended_as(failed(Stage.NUMERICS, problem, Cause.NUMERICS))
    # A simulator has this machine's clock, and reading the heap takes time: no rate counts there.
    slow = "" if raw.simulated or raw.heap else slow_problem(expected, ending.measurements)
    return ending.ended_as(failed(Stage.EXECUTE, slow, Cause.NONE)) if slow else ending


def _dump_problem(job: Job, raw: RawResult) -> str:
    """Return the difference between dumped layers and the case's expectation; "" for none."""
    expected = job.case.expectation(job.target)
    if expected is None or expected.intermediate_outputs is None:
        return ""
    try:
        counts = intermediate_outputs((raw.folder / ETDUMP_FILE).read_bytes())
    except (OSError, ETDumpError) as error:
        return f"the outputs of its layers cannot be read: {error}"
    per_inference = set(counts)
    if per_inference == {expected.intermediate_outputs}:
        return ""
    found = " or ".join(map(str, sorted(per_inference))) if any(per_inference) else "no"
    return f"{found} outputs of layers were written, expected {expected.intermediate_outputs}"


def _left_to_cpu(backend: str, fallback_ops: Mapping[str, int]) -> Mapping[str, int]:
    """Return the operators that count for a case; quantizing for delegates comes with these, inputs and outputs."""
    if backend not in BACKENDS or not BACKENDS[backend].cpu_quantizes:
        return fallback_ops
    return {name: count for name, count in fallback_ops.items() if not name.startswith(_QUANTIZING)}


def _shown(partitions: int, fallback_ops: Mapping[str, int]) -> str:
    left = ", ".join(f"{name} x{count}" for name, count in sorted(fallback_ops.items())) or "nothing"
    return f"{partitions} partition{'' if partitions == 1 else 's'} and {left} left to the CPU"


def _heap_alone(job: Job, ending: Ending, raw: RawResult) -> Ending:
    """Return the ending with the heap's numbers and no others: looking at the heap changes times."""
    heaps, found = read_heaps(raw), None
    if ending.verdict is Verdict.PASSED:
        found = judge_heap(heaps, job.case.expectation(job.target), simulated=raw.simulated)
    elif ending.cause is Cause.REQUEST:
        found = Ending(Verdict.SKIPPED, ending.stage, f"no DSP heap: {ending.reason}", cause=ending.cause)
    ending, notes = (ending, (heap_note(heaps),)) if found is None else (ending.ended_as(found), ())
    measured = heap_measurements(heaps) if ending.verdict in (Verdict.PASSED, Verdict.FAILED) else ()
    return msgspec.structs.replace(ending, measurements=measured, notes=(*ending.notes, *notes))


def with_known_issue(job: Job, attempt: Attempt, *, virtual: bool = False) -> Attempt:
    """Return `attempt` with the known issue that covers it, or a note on an expired or absent issue.

    `virtual` is true for an execution on a virtual device.
    """
    issue = job.case.known_issue(job.target, virtual=virtual)
    if issue is None:
        return attempt
    if attempt.verdict is Verdict.FAILED and attempt.stage == issue.stage:
        if issue.has_expired(datetime.now(tz=UTC).date()):
            note = f"known issue has expired, fix it or give it another date: {issue.summary}"
            return msgspec.structs.replace(attempt, notes=(*attempt.notes, reason_line(note)))
        return msgspec.structs.replace(attempt, known_issue=issue.summary)
    if attempt.verdict is Verdict.PASSED:
        shows = "does not show this time" if issue.intermittent else "no longer shows"
        note = f"known issue {shows}: {issue.reason}"
        return msgspec.structs.replace(attempt, notes=(*attempt.notes, note))
    return attempt


def _origin_notes(job: Job) -> tuple[str, ...]:
    """Return notes on the compiler of a ready program: the run's own toolchain gave the runtime alone."""
    named = ", ".join(f"{name} {version}" for name, version in sorted(job.case.compiled_with.items()))
    return (reason_line(f"compiled with {named}"),) if named else ()


def _write_notes(job: Job, bundle: Bundle) -> tuple[str, ...]:
    manifest = bundle.manifest
    is_once = manifest.stateful and job.case.deterministic is not True
    once = ": each sample is executed once, as its state goes on" if is_once else ""
    return (reason_line(f"writes to its {' and its '.join(manifest.writes)}{once}"),) if manifest.writes else ()


def _fallback_notes(bundle: Bundle) -> tuple[str, ...]:
    operators = bundle.manifest.fallback_ops
    # On the CPU that is no news: it is where all of it runs.
    if not operators or runs_on_cpu(bundle.manifest.backend):
        return ()
    listed = ", ".join(f"{name} x{count}" for name, count in sorted(operators.items()))
    return (reason_line(f"left to the CPU: {listed}"),)
