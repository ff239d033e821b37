"""`farm perf confirm`: old and new bundle in turns on one device."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import click

from farm.base.errors import FIRST_RUN, MissingToolError, UsageError
from farm.base.exit_codes import ExitCode
from farm.base.text import one_line
from farm.cli.options import duration, interleaved_options, json_option, refuse_attached, refuse_given, toolchain_option
from farm.cli.output import as_called, opened, show
from farm.report.model import format as fmt
from farm.report.terminal.layout import SIMULATED, columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.numbers.regressions.confirm_job import ConfirmOutcome, PairsRequest
    from farm.numbers.regressions.confirm_run import RunFindings
    from farm.numbers.regressions.paired_test import Compared
    from farm.replay.stored_result import StoredResult
    from farm.results.analysis.confirmation import Confirmation
    from farm.results.analysis.scale import Scale


@click.command("confirm")
@click.argument("job", required=False)
@click.option("--run", "run_ref", metavar="RUN",
              help="Without JOB: all suspected regressions of this run; otherwise as farm status.")  # fmt: skip
@click.option("--budget", "budget_s", metavar="TIME", callback=duration,
              help="Without JOB: time limit, such as 30m; the least probable first. Otherwise as long as "
              "suspected changes take, and 10m for other new programs.")  # fmt: skip
@click.option("--good", metavar="RUN",
              help="Run before the change; otherwise the newest earlier run with another bundle.")  # fmt: skip
@click.option("--bad", metavar="RUN", help="Run after the change; otherwise the newest run with a result.")
@click.option(
    "--metric",
    "metrics",
    metavar="METRIC",
    multiple=True,
    help="Metric to measure, repeatable; otherwise htp_cycles, or latency without them; of text prefill_rate, too.",
)
@interleaved_options
@toolchain_option()
@json_option("Print everything, with all samples, as JSON.")
def confirm_command(
    job: str | None,
    run_ref: str | None,
    budget_s: float | None,
    good: str | None,
    bad: str | None,
    metrics: tuple[str, ...],
    toolchain: str,
    **bench: Any,
) -> int:
    """Measure whether JOB really got worse: interleaved A/B of both bundles on one device.

    Without JOB, all suspected regressions of a run are measured. The results are recorded,
    with the first bad run and the likely cause, and shown by farm status and
    farm alerts list. In the remaining time, changed programs without one are
    measured too.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one job matches. A change is confirmed when
    pairs show it beyond 2 % (p < 0.01), refuted when they show that it is less (p < 0.07), else unknown. While it is
    unknown, as many pairs are measured once more; a confirmed time is measured again in new processes. For a
    confirmed change the likely cause is named. With a JOB nothing is recorded.

    \b
    Exit codes: 0 nothing confirmed; 2 usage; 3 it got worse; 4 no device or
    infrastructure; 7 no result, or a bundle is gone; 130 interrupted.
    """
    refuse_attached(virtual=bench["virtual"])
    request = pairs_request(bench)
    if job is None:
        refuse_given("{0} is for one JOB: name it, or leave {0} out", "good", "bad", "metrics")
        return _confirm_run(run_ref, request, budget_s, toolchain)
    if run_ref is not None or budget_s is not None:
        raise UsageError("--run and --budget are for all suspected changes: leave JOB out, or use --bad RUN")
    from farm.dispatch.request.resume import config_to_run_again
    from farm.numbers.regressions.confirm_job import choose_results, confirm_job

    with opened(existing=True) as (config, store):
        old, new = choose_results(store, job, good, bad)
        selected = config_to_run_again(config, new.run, toolchain)
        outcome = confirm_job(selected, store, old, new, request, metrics)
    show(_confirm_data(outcome), _confirm_lines(outcome))
    return ExitCode.REGRESSION if outcome.confirmed else 0


def pairs_request(bench: dict[str, Any]) -> PairsRequest:
    """Return the request from the options of `interleaved_options`."""
    from farm.numbers.regressions.confirm_job import PairsRequest
    from farm.results.analysis.confirmation import INFERENCES

    inferences = {"inferences": bench["inferences"] or INFERENCES, "least_inferences": bench["inferences"] or 0}
    return PairsRequest(**bench | inferences, command=as_called())


def _confirm_run(run_ref: str | None, request: PairsRequest, budget_s: float | None, toolchain: str) -> int:
    from farm.base.interrupts import InterruptHandler
    from farm.builds.toolchains.prepare import branch_of
    from farm.builds.toolchains.select import toolchain_of
    from farm.dispatch.request.resume import config_of_run
    from farm.numbers.regressions.confirm_run import confirm_run

    with opened(existing=True) as (config, store):
        branch = branch_of(config, toolchain_of(config, toolchain)) if toolchain else store.status.branch_to_show(None)
        run_id = store.runs.resolve(run_ref) if run_ref else store.status.run_to_show(branch, own=not toolchain)
        if run_id is None:
            where = f"branch {branch}" if branch else "the store"
            raise UsageError(f"{where} has no run yet: '{FIRST_RUN}' makes one")
        try:
            selected = config_of_run(config, store.runs.view(run_id), toolchain)
        except (UsageError, MissingToolError) as error:
            if toolchain:
                raise
            # Results are recorded for the run, so another toolchain needs an explicit option.
            problem = f"the toolchain of run {run_id} cannot be used: {error}"
            raise UsageError(f"{problem}; --toolchain measures with another one") from None
        with InterruptHandler():
            findings = confirm_run(selected, store, run_id, request, budget_s=budget_s)
    show({"findings": findings}, _findings_lines(run_id, findings))
    return ExitCode.REGRESSION if findings.regressions else ExitCode.INFRA if findings.problems else 0


def _findings_lines(run_id: str, findings: RunFindings) -> list[str]:
    from farm.report.terminal.status import alert_lines

    found = len(findings.alerts)
    texts = [f"{run_id}: {fmt.plural(found, 'alert')}"]
    texts += [*findings.shifts, *alert_lines(findings.alerts, found)]
    if findings.not_measured:
        texts.append(f"{fmt.plural(findings.not_measured, 'suspected change')} not measured: no time, or no device")
    texts += findings.problems
    if findings.changed:
        texts.append(f"{fmt.plural(findings.changed, 'program')} changed unsuspected, and measured as well")
    texts += [findings.not_all_changed] if findings.not_all_changed else []
    if findings.insufficient:
        texts.append(f"{fmt.plural(findings.insufficient, 'number')} with fewer than 8 comparable runs, not judged")
    return [line for text in texts for line in wrapped(text)]


def _confirm_lines(outcome: ConfirmOutcome) -> Iterator[str]:
    good, new = outcome.good, outcome.new
    yield one_line(new.view.id)
    for name, result in (("good", good), ("new", new)):
        bundle = result.attempt.bundle_key[:12]
        yield one_line(f"{name}: run {result.run.id}, bundle {bundle}, on {result.attempt.device}")
    same = "the same bundle against itself, " if outcome.same_bundle else ""
    yield one_line(f"{same}in turns on {outcome.device} ({outcome.kind})")
    yield from ("", *compared_table(outcome.compared), "")
    for one in outcome.compared:
        if not one.pairs:
            yield from wrapped(f"{one.series.metric}: {one.confirmation.reason}")
    for failed in dict.fromkeys(f"{turn.role}: {turn.failure}" for turn in outcome.turns if turn.failure):
        yield from wrapped(f"a turn failed: {failed}")
    yield from differing_lines(good, new, outcome.differences)
    if attribution := outcome.attribution:
        causes, reason = " and ".join(attribution.explanation.causes), attribution.explanation.reason
        who = f"likely cause: {causes}" if causes else "no likely cause"
        # The reason may begin with the cause again: `program: program +7.7 % ...`.
        yield from wrapped(f"{who}, by {attribution.metric}: {reason.removeprefix(f'{causes}: ')}")
        for factor, why in attribution.not_swapped.items():
            yield from wrapped(f"{factor} differs and was not swapped: {why}")
    if outcome.kind == "virtual":
        yield SIMULATED


def compared_table(compared: Sequence[Compared]) -> list[str]:
    """Return a table of the interleaved measurements, a row per metric."""
    rows: list[Sequence[str]] = [("metric", "good", "new", "change", "p", "answer")]
    for one in compared:
        result = one.confirmation
        rows.append(
            (
                one_line(one.series.metric)[:20],
                *(_median([pair[side] for pair in one.pairs], one.series.unit) for side in (0, 1)),
                change_interval(one.series.scale, result),
                f"{result.p_value:.2g}" if result.pairs else fmt.NOTHING,
                str(result.answer),
            )
        )
    return columns(rows)


def _median(turns: Sequence[Sequence[float]], unit: str) -> str:
    medians = [statistics.median(samples) for samples in turns if len(samples)]
    return fmt.quantity(statistics.median(medians), unit).removesuffix(" cycles") if medians else fmt.NOTHING


def change_interval(scale: Scale, one: Confirmation) -> str:
    """Return a change with its interval: `+8.2 % (+7.1 to +9.4)`."""
    from farm.results.analysis.scale import change_text

    if math.isnan(one.change):
        return fmt.NOTHING
    low, high = ("…" if math.isinf(end) else change_text(scale, end).split()[0] for end in (one.low, one.high))
    # Rounding and adding 0.0 avoids "-0.0 %".
    return f"{change_text(scale, round(one.change, 6) + 0.0)} ({low} to {high})"


def differing_lines(good: StoredResult, new: StoredResult, facts: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the differences between both results."""
    from farm.results.analysis.facts import fact_line

    own = {
        "bundle": (good.attempt.bundle_key[:12], new.attempt.bundle_key[:12]),
        "case version": (good.view.case_version[:12], new.view.case_version[:12]),
        "device": (good.attempt.device, new.attempt.device),
    }
    known = {name: values for name, values in facts.items() if name != "repro"}
    for name, (was, now) in (known | {name: values for name, values in own.items() if values[0] != values[1]}).items():
        yield from wrapped(f"differs: {fact_line(name, was, now)}")


def _confirm_data(outcome: ConfirmOutcome) -> dict[str, object]:
    attribution = outcome.attribution
    return {
        "job": outcome.new.view.id,
        "good": result_data(outcome.good),
        "new": result_data(outcome.new),
        "same_bundle": outcome.same_bundle,
        "device": outcome.device,
        "kind": outcome.kind,
        "confirmed": outcome.confirmed,
        "metrics": [compared_data(one) for one in outcome.compared],
        "differences": outcome.differences,
        "attribution": attribution and {
            "metric": attribution.metric,
            "guilt": attribution.explanation.kind,
            "axes": attribution.explanation.causes,
            "reason": attribution.explanation.reason,
            "whole": attribution.whole,
            "alone": attribution.alone,
            "differing": attribution.differing,
            "not_swapped": attribution.not_swapped,
        },
        "turns": outcome.turns,
    }  # fmt: skip


def result_data(one: StoredResult) -> dict[str, object]:
    """Return the identity of a result, for JSON."""
    return {"run": one.run.id, "bundle": one.attempt.bundle_key, "device": one.attempt.device, "kind": one.kind}


def compared_data(one: Compared) -> dict[str, object]:
    """Return the interleaved measurements of a metric, for JSON."""
    series = one.series
    return {
        "metric": series.metric,
        "unit": series.unit,
        "scale": series.scale,
        "confirmation": one.confirmation,
        "pairs": one.pairs,
    }
