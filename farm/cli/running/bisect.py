"""`farm perf bisect`: first run, or first commit of a checkout, in which a job is worse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from farm.base.errors import UsageError
from farm.base.exit_codes import ExitCode
from farm.base.text import one_line
from farm.cli.options import (
    FOLDER,
    FOR_ATTACHED,
    OUTPUT_FILE,
    interleaved_options,
    json_option,
    named,
    refuse_together,
    soc_option,
)
from farm.cli.output import echo, opened, show
from farm.cli.running.confirm import (
    change_interval,
    compared_data,
    compared_table,
    differing_lines,
    pairs_request,
    result_data,
)
from farm.report.terminal.layout import SIMULATED, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.numbers.regressions.bisect import BisectOutcome
    from farm.numbers.regressions.paired_test import Probe
    from farm.replay.stored_result import StoredResult

_WORDS = {"confirmed": "bad", "refuted": "good", "unknown": "unknown"}


@click.command("bisect")
@click.argument("job")
@click.option("--good", metavar="RUN", help="Run before the job got worse: an id, or latest~20.")
@click.option("--bad", metavar="RUN", help="Run after the job got worse: an id, or latest.")
@click.option("--commits", metavar="GOOD..BAD", default="", help="Search commits of a checkout, not runs.")
@click.option("--checkout", type=FOLDER, help="Source tree of ExecuTorch; otherwise the one of --toolchain.")
@click.option(
    "--toolchain",
    default="",
    callback=named,
    metavar="NAME",
    help="Toolchain of farm.toml with the checkout; otherwise found by the checkout.",
)
@click.option(
    "--build-command",
    "build",
    default="",
    metavar="COMMAND",
    help="Command that builds native parts changed by a commit; otherwise build in farm.toml.",
)
@soc_option("SoC, if JOB has no target and results on several.")
@click.option("--precision", metavar="PRECISION", help="Precision, if JOB has no target and the case has several.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Backend option; repeatable.")
@click.option(
    "--metric",
    metavar="METRIC",
    default="",
    help="Metric to follow; otherwise htp_cycles, or latency; with --commits the difference at BAD.",
)
@click.option("--markdown", type=OUTPUT_FILE, help="With --commits: write the evidence here too.")
@interleaved_options
@json_option("Print everything, with all samples, as JSON.")
def bisect_command(job: str, config_file: Path | None, *, as_json: bool, **options: Any) -> int:
    """Find the run, or the commit, since which JOB is worse.

    With --good and --bad: stored bundles are run again. First the whole step
    is measured, as by 'farm perf confirm'; then, while runs are left between the
    last good and the first bad one, a bundle between them is compared with the
    bundle of the good run. A level nearer to the bad one is bad. Runs of equal
    bundles are measured once; at most 8 bundles are. A bundle is compiled again
    only if the result is identical.

    With --commits: 'git bisect' chooses commits of a checkout, and each is
    compared with GOOD as by 'farm perf compare', in a source tree of its own. The
    search follows the difference at BAD: a failure, operators left to the CPU,
    a time or a figure of outputs; --metric names another, such as pte_size.
    Commits that do not build or fail in another way are skipped, and a merge is
    one commit (first parents). git keeps the answers: after Ctrl-C or a kill
    the same command continues. Neither search is recorded in the store.

    \b
    Exit codes: 0 no step is confirmed; 2 usage, or JOB does not pass at the
    good commit; 3 it got worse, and since when is shown; 4 no device or
    infrastructure; 7 no result, or a bundle of the ends is gone;
    130 interrupted.
    """
    if options["commits"]:
        from farm.cli.running.commits import bisect_over_commits

        given = {f"--{name}": options[name] for name in ("good", "bad", "inferences")}
        refuse_together(given, "{} is for runs: leave it or --commits out")
        if options["virtual"]:
            refuse_together({"--device": options["device"]}, FOR_ATTACHED)
        return bisect_over_commits(config_file, job, options, as_json=as_json)
    return _bisect_runs(job, config_file, options, as_json=as_json)


def _bisect_runs(job: str, config_file: Path | None, options: dict[str, Any], *, as_json: bool) -> int:
    names = ("checkout", "toolchain", "build", "soc", "precision", "options", "markdown")
    called = {"build": "build-command", "options": "option"}
    given = {f"--{called.get(name, name)}": options[name] for name in names}
    refuse_together(given, "{} is for --commits GOOD..BAD: leave it out")
    if not (options["good"] and options["bad"]):
        raise UsageError("name two runs with --good and --bad, or commits of a checkout with --commits GOOD..BAD")
    from farm.dispatch.request.resume import config_to_run_again
    from farm.numbers.regressions.bisect import bisect, find_ends

    request = pairs_request({name: options[name] for name in ("pairs", "inferences", "device", "virtual")})

    def show_probe(result: StoredResult, probe: Probe) -> None:
        line = f"{result.run.id}  {_WORDS[probe.answer]}: {probe.reason}"
        echo("\n".join(wrapped(line)), err=as_json)

    with opened(config_file, existing=True) as (config, store):
        old, new = find_ends(store, job, options["good"], options["bad"])
        selected = config_to_run_again(config, new.run, "")
        outcome = bisect(selected, store, old, new, request, options["metric"], show_probe)
    show(_bisect_data(outcome), _bisect_lines(outcome), as_json=as_json)
    return ExitCode.REGRESSION if outcome.found else 0


def _bisect_lines(outcome: BisectOutcome) -> Iterator[str]:
    whole = outcome.whole
    yield one_line(outcome.runs[-1].view.id)
    yield from compared_table([whole])
    if not whole.pairs:
        yield from wrapped(whole.confirmation.reason)
    yield ""
    if outcome.found:
        last, first = outcome.last_good, outcome.first_bad
        yield from (f"last good: {last.run.id}", f"first bad: {first.run.id}")
        if outcome.bracket.exact:
            yield "exact: there is no other result between them"
        else:
            yield from wrapped(f"a range, as runs between gave no answer: {outcome.reason}")
        yield f"{whole.series.metric}: {change_interval(whole.series.scale, whole.confirmation)}"
        yield from differing_lines(last, first, outcome.differences)
    else:
        verdict = "there is no step" if whole.confirmation.answer == "refuted" else "a step is not confirmed"
        yield from wrapped(f"{verdict} from {outcome.runs[0].run.id} to {outcome.runs[-1].run.id}")
    if outcome.left_out:
        yield from wrapped(f"{outcome.left_out} runs between are left out: their case is another test")
    if outcome.kind == "virtual":
        yield SIMULATED


def _bisect_data(outcome: BisectOutcome) -> dict[str, object]:
    found = outcome.found
    return {
        "job": outcome.runs[-1].view.id,
        "device": outcome.device,
        "kind": outcome.kind,
        "found": found,
        "whole": compared_data(outcome.whole),
        "runs": [
            {**result_data(result), "value": value}
            for result, value in zip(outcome.runs, outcome.values, strict=True)
        ],
        "left_out": outcome.left_out,
        "probes": [
            {"run": outcome.runs[probe.number].run.id, "answer": probe.answer, "reason": probe.reason,
             "confirmation": probe.confirmation}
            for probe in outcome.probes
        ],
        "last_good": result_data(outcome.last_good) if found else None,
        "first_bad": result_data(outcome.first_bad) if found else None,
        "exact": found and outcome.bracket.exact,
        "reason": outcome.reason if found else "",
        "differences": outcome.differences if found else {},
    }  # fmt: skip
