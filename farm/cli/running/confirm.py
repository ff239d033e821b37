"""`farm confirm`."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option, duration, pairs_options
from farm.cli.output import as_called, count, echo, print_json, wrapped
from farm.config.settings import load_config
from farm.errors import NoDeviceError, UsageError
from farm.report.model import format as fmt
from farm.system.text import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.analysis.confirmation import Confirmation
    from farm.analysis.scale import Scale
    from farm.config.settings import Config
    from farm.regressions.confirm_job import ConfirmOutcome, PairsRequest
    from farm.regressions.confirming import Compared
    from farm.replay.stored_result import StoredResult

REGRESSION = 3
"""Exit code: a regression is confirmed."""


@click.command("confirm")
@click.argument("job", required=False)
@click.option(
    "--run", "run_ref", metavar="RUN", help="Without JOB: all that stands out in this run; otherwise as farm status."
)
@click.option("--budget", "budget_s", metavar="TIME", callback=duration,
              help="Without JOB: take so long at most, as 30m; the least probable first. Otherwise as long as "
              "candidates take, and 10m for new programs that do not stand out.")  # fmt: skip
@click.option("--good", metavar="RUN", help="Otherwise the last run before that had another bundle.")
@click.option("--bad", metavar="RUN", help="Otherwise the newest run with a result.")
@click.option("--metric", "metrics", multiple=True, help="Repeatable; otherwise htp_cycles, or latency without them.")
@pairs_options
@click.option("--json", "as_json", is_flag=True, help="Print everything, with all samples, as JSON.")
@config_option
def command(
    job: str | None,
    run_ref: str | None,
    budget_s: float | None,
    good: str | None,
    bad: str | None,
    metrics: tuple[str, ...],
    pairs: int,
    inferences: int,
    device: str | None,
    config_file: Path | None,
    *,
    virtual: bool,
    as_json: bool,
) -> int:
    """Tell whether JOB really got worse: both bundles, in turns, on one device.

    Without JOB, all numbers of a run that stand out are measured: what comes
    of them is recorded, with the first bad run and what is to blame, and told
    by farm status and farm triage. In the time that is left, programs that
    changed are measured too, though nothing of them stands out.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one job matches. A change is confirmed when
    pairs show it beyond 2 % (p < 0.01), refuted when all of its interval is less, else unknown. While it is unknown, as
    many pairs are measured once more. Of a confirmed one the attributed cause is named. Of a JOB nothing is recorded.

    \b
    Exit codes: 0 nothing confirmed; 3 it got worse; 2 usage, or a
    bundle is gone; 4 no device or infrastructure; 130 interrupted.
    """
    from farm.regressions.confirm_job import choose_results, confirm_job
    from farm.store.store import open_store

    request = pairs_request(virtual=virtual, device=device, pairs=pairs, inferences=inferences)
    config = load_config(config_file)
    if job is None:
        if given := [name for name, value in (("--good", good), ("--bad", bad), ("--metric", metrics)) if value]:
            raise UsageError(f"{given[0]} is for one JOB: name it, or leave {given[0]} out")
        return _confirm_run(config, run_ref, request, budget_s, as_json=as_json)
    if run_ref is not None or budget_s is not None:
        raise UsageError("--run and --budget are for all that stands out: leave JOB out, or use --bad RUN")
    with open_store(config.store_url, existing=True) as store:
        old, new = choose_results(store, job, good, bad)
        outcome = confirm_job(config, store, old, new, request, say, metrics)
    if as_json:
        print_json(_data(outcome))
    else:
        echo("\n".join(_text(outcome)))
    return REGRESSION if outcome.confirmed else 0


def _confirm_run(
    config: Config, run_ref: str | None, request: PairsRequest, budget_s: float | None, *, as_json: bool
) -> int:
    from farm.regressions.confirm_run import confirm_run
    from farm.report.terminal.status import alert_lines
    from farm.request.ending import Patience
    from farm.store.store import open_store

    with open_store(config.store_url, existing=True) as store:
        run_id = store.runs.resolve(run_ref) if run_ref else store.status.run_to_show()
        if run_id is None:
            raise UsageError("the store has no run yet: 'farm run' makes one")
        with Patience():
            findings = confirm_run(config, store, run_id, request, say, budget_s=budget_s)
    code = REGRESSION if findings.regressions else NoDeviceError.exit_code if findings.problems else 0
    if as_json:
        print_json({"findings": findings})
        return code
    lines = [f"{run_id}: {count(len(findings.alerts), 'number')} stand{'s' * (len(findings.alerts) == 1)} out"]
    lines += [line for text in findings.shifts for line in wrapped(text)]
    lines += [line for text in alert_lines(findings.alerts, len(findings.alerts)) for line in wrapped(text)]
    if findings.not_asked:
        lines.append(f"{count(findings.not_asked, 'candidate')} not measured: no time, or no device")
    lines += [line for problem in findings.problems for line in wrapped(problem)]
    if findings.changed:
        lines += wrapped(f"{count(findings.changed, 'program')} changed without standing out, and measured as well")
    if findings.not_all_changed:
        lines += wrapped(findings.not_all_changed)
    if findings.insufficient:
        lines.append(f"{count(findings.insufficient, 'number')} with fewer than 8 comparable runs, not judged")
    echo("\n".join(lines))
    return code


def pairs_request(*, virtual: bool, device: str | None, pairs: int, inferences: int) -> PairsRequest:
    """Return what the options of `pairs_options` ask for. Raises UsageError."""
    from farm.regressions.confirm_job import PairsRequest

    if virtual and device:
        raise UsageError("--device is for attached devices: leave it, or --virtual, out")
    return PairsRequest(
        virtual=virtual,
        device=device or "",
        pairs=pairs,
        inferences=inferences,
        command=as_called(),
    )


def say(text: str) -> None:
    """Tell how it goes, on standard error."""
    echo(f"farm: {one_line(text)}", err=True)


def which(name: str, past: StoredResult) -> str:
    """Return which result it is, in one line."""
    return one_line(f"{name}: run {past.run.id}, bundle {past.attempt.bundle_key[:12]}, on {past.attempt.device}")


def change(scale: Scale, one: Confirmation) -> str:
    """Return a change with its interval: `+8.2 % (+7.1 to +9.4)`."""
    from farm.analysis.scale import change_text

    if math.isnan(one.change):
        return fmt.NOTHING
    low, high = ("…" if math.isinf(end) else change_text(scale, end).split()[0] for end in (one.low, one.high))
    # No "-0.0 %".
    return f"{change_text(scale, round(one.change, 6) + 0.0)} ({low} to {high})"


def what_differs(good: StoredResult, new: StoredResult, facts: dict[str, tuple[str, str]]) -> list[str]:
    """Return what is not the same in both results, a line each."""
    rows = {name: values for name, values in facts.items() if name != "repro"}
    own = {
        "bundle": (good.attempt.bundle_key[:12], new.attempt.bundle_key[:12]),
        "case version": (good.view.case_version[:12], new.view.case_version[:12]),
        "device": (good.attempt.device, new.attempt.device),
    }
    rows |= {name: values for name, values in own.items() if values[0] != values[1]}
    return [
        line
        for name, (was, now) in rows.items()
        for line in wrapped(f"differs: {name}: {was or 'nothing'} -> {now or 'nothing'}")
    ]


def _text(outcome: ConfirmOutcome) -> list[str]:
    good, new = outcome.good, outcome.new
    lines = [one_line(new.view.id), which("good", good), which("new", new)]
    where = f"in turns on {outcome.device} ({outcome.kind})"
    lines += [one_line(f"{'the same bundle against itself, ' if outcome.same_bundle else ''}{where}"), ""]
    lines += table(outcome.compared)
    lines += [""]
    for one in outcome.compared:
        if not one.pairs:
            lines += wrapped(f"{one.series.metric}: {one.confirmation.reason}")
    for failed in dict.fromkeys(f"{turn.role}: {turn.failure}" for turn in outcome.turns if turn.failure):
        lines += wrapped(f"a turn failed: {failed}")
    lines += what_differs(good, new, outcome.differences)
    lines += list(_attribution(outcome))
    if outcome.kind == "virtual":
        lines.append("VIRTUAL: times and cycles are of a simulator, not comparable with hardware")
    return lines


def _attribution(outcome: ConfirmOutcome) -> Iterator[str]:
    said = outcome.attribution
    if said is None:
        return
    explanation = said.explanation
    who = f"attributed cause: {' and '.join(explanation.causes)}" if explanation.causes else "no attributed cause"
    # What it says first again: `program: program +7.7 % ...`.
    reason = explanation.reason.removeprefix(f"{' and '.join(explanation.causes)}: ")
    yield from wrapped(f"{who}, by {said.metric}: {reason}")
    for factor, reason in said.not_swapped.items():
        yield from wrapped(f"{factor} differs and was not swapped: {reason}")


def table(compared: Sequence[Compared]) -> list[str]:
    """Return a table of what pairs say of each metric."""
    rows = [["metric", "good", "new", "change", "p", "answer"]]
    for one in compared:
        said, unit = one.confirmation, one.series.unit
        p_value = f"{said.p_value:.2g}" if said.pairs else fmt.NOTHING
        rows.append(
            [
                one_line(one.series.metric)[:20],
                *(_median(one, side, unit) for side in (0, 1)),
                change(one.series.scale, said),
                p_value,
                str(said.answer),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _median(one: Compared, side: int, unit: str) -> str:
    medians = [statistics.median(pair[side]) for pair in one.pairs if len(pair[side])]
    if not medians:
        return fmt.NOTHING
    return fmt.quantity(statistics.median(medians), unit).removesuffix(" cycles")


def _data(outcome: ConfirmOutcome) -> dict[str, object]:
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
        "attribution": outcome.attribution and _attribution_data(outcome),
        "turns": outcome.turns,
    }


def _attribution_data(outcome: ConfirmOutcome) -> dict[str, object]:
    said = outcome.attribution
    assert said is not None  # noqa: S101 - for the type
    return {
        "metric": said.metric,
        "guilt": said.explanation.kind,
        "axes": said.explanation.causes,
        "reason": said.explanation.reason,
        "whole": said.whole,
        "alone": said.alone,
        "differing": said.differing,
        "not_swapped": said.not_swapped,
    }


def result_data(past: StoredResult) -> dict[str, object]:
    """Return which result it is, for JSON."""
    return {"run": past.run.id, "bundle": past.attempt.bundle_key, "device": past.attempt.device, "kind": past.kind}


def compared_data(one: Compared) -> dict[str, object]:
    """Return what pairs say of a metric, for JSON."""
    series = one.series
    return {
        "metric": series.metric,
        "unit": series.unit,
        "scale": series.scale,
        "confirmation": one.confirmation,
        "pairs": one.pairs,
    }
