"""`farm perf bisect`: first run, or first commit of a checkout, in which a job is worse."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click

from farm.base.errors import UsageError
from farm.base.exit_codes import ExitCode
from farm.base.text import one_line
from farm.cli.options import (
    FOLDER,
    OUTPUT_FILE,
    interleaved_options,
    is_json,
    json_option,
    named,
    refuse_attached,
    refuse_given,
    soc_option,
)
from farm.cli.output import as_called, echo, opened, show, width, write_file
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

    from farm.base.config.settings import Config
    from farm.builds.toolchains.commits import Commit
    from farm.numbers.compare.commit_bisect import BisectOutcome as CommitOutcome
    from farm.numbers.regressions.bisect import BisectOutcome
    from farm.numbers.regressions.paired_test import Probe
    from farm.replay.stored_result import StoredResult
    from farm.suites.suite import Job

_MOST_FILES = 20
_WORDS = {"confirmed": "bad", "refuted": "good", "unknown": "unknown"}


@click.command("bisect")
@click.argument("job")
@click.option("--good", metavar="RUN", help="Run before the job got worse: an id, or latest~20.")
@click.option("--bad", metavar="RUN", help="Run after the job got worse: an id, or latest.")
@click.option("--commits", metavar="GOOD..BAD", default="", help="Search commits of a checkout, not runs.")
@click.option("--checkout", type=FOLDER, help="Source tree of ExecuTorch; otherwise the checkout of --toolchain.")
@click.option("--toolchain", default="", callback=named, metavar="NAME",
              help="Toolchain of farm.toml with the checkout; otherwise found by the checkout.")  # fmt: skip
@click.option("--build-command", "build", default="", metavar="COMMAND",
              help="Command that builds native parts changed by a commit; otherwise build in farm.toml.")  # fmt: skip
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
def bisect_command(job: str, **options: Any) -> int:
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
    refuse_attached(virtual=options["virtual"])
    if options["commits"]:
        refuse_given("{} is for runs: leave it or --commits out", "good", "bad", "inferences")
        return _bisect_commits(job, options)
    return _bisect_runs(job, options)


def _bisect_runs(job: str, options: dict[str, Any]) -> int:
    of_commits = ("checkout", "toolchain", "build", "soc", "precision", "options", "markdown")
    refuse_given("{} is for --commits GOOD..BAD: leave it out", *of_commits)
    if not (options["good"] and options["bad"]):
        raise UsageError("name two runs with --good and --bad, or commits of a checkout with --commits GOOD..BAD")
    from farm.dispatch.request.resume import config_to_run_again
    from farm.numbers.regressions.bisect import bisect, find_ends

    request = pairs_request({name: options[name] for name in ("pairs", "inferences", "device", "virtual")})

    def show_probe(result: StoredResult, probe: Probe) -> None:
        line = f"{result.run.id}  {_WORDS[probe.answer]}: {probe.reason}"
        echo("\n".join(wrapped(line)), err=is_json())

    with opened(existing=True) as (config, store):
        old, new = find_ends(store, job, options["good"], options["bad"])
        selected = config_to_run_again(config, new.run, "")
        outcome = bisect(selected, store, old, new, request, options["metric"], show_probe)
    show(_bisect_data(outcome), _bisect_lines(outcome))
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


def _bisect_commits(name: str, options: dict[str, Any]) -> int:
    """Search, show the outcome, and return the exit code. Raises UsageError, NoDeviceError, InfraError."""
    from farm.dispatch.pool.fleet import Choice
    from farm.numbers.compare.commit_bisect import (
        bisect_commits,
        bisected_toolchain,
        commits_of,
        comparing,
        search_folder,
    )
    from farm.numbers.compare.request import ComparisonRequest, SideRequest

    build = _words(options["build"])
    with opened() as (opened_config, store):
        job = _job(opened_config, name, options)
        config, checkout = bisected_toolchain(opened_config, options["checkout"], options["toolchain"], build)
        commits = commits_of(checkout, options["commits"])
        request = ComparisonRequest(
            sides=(SideRequest(), SideRequest()),
            socs=(job.target.soc,),
            suites=(),
            backend=job.target.backend,
            jobs=(job,),
            virtual=int(options["virtual"]),
            choice=Choice((options["device"],)) if options["device"] else Choice(),
            pairs=options["pairs"],
            command=as_called(),
        )
        folder = search_folder(config, commits, request, options["metric"])
        compare = comparing(config, store, request, checkout)
        outcome = bisect_commits(checkout, commits, folder, compare, options["metric"])
    if options["markdown"] is not None:
        write_file(options["markdown"], _commit_markdown(outcome))
    show(_commit_data(outcome), _commit_lines(outcome))
    return ExitCode.REGRESSION if outcome.symptom else 0


def _job(config: Config, text: str, options: dict[str, Any]) -> Job:
    from farm.dispatch.request.named_job import named_job

    target = {name: options[name] for name in ("soc", "precision", "options")}
    job = named_job(config, text, "farm perf bisect", **target)
    if job.case.pte:
        raise UsageError(f"{text} is a .pte file that was compiled elsewhere: no commit changes it")
    return job


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--build-command {text!r}: {error}") from None


def _commit_lines(outcome: CommitOutcome) -> Iterator[str]:
    from farm.report.terminal.compare import compare_lines

    yield one_line(outcome.job.name)
    for line in _facts(outcome):
        yield from wrapped(f"  {line}", hanging="    ")
    yield ""
    yield from compare_lines(outcome.report, 1, width())


def _facts(outcome: CommitOutcome) -> Iterator[str]:
    """Yield the outcome line by line: symptom, commits, difference of the programs, and changed files."""
    if outcome.symptom is None or outcome.first_bad is None or outcome.last_good is None:
        yield "no step: the bad commit is not worse"
        return
    first = outcome.first_bad
    yield f"wrong: {one_line(outcome.symptom.text)}"
    yield f"last good: {_commit_text(outcome.last_good)}"
    yield f"first bad: {_commit_text(first)}, by {one_line(first.author)}, {first.date}"
    if outcome.skipped:
        left = ", ".join(commit.short for commit in (*outcome.skipped, first))
        yield f"a range, as commits between gave no answer: the first bad one is one of {left}"
    yield from (f"program: {line}" for line in _program(outcome))
    yield from (f"changed: {one_line(path)}" for path in outcome.changed_files[:_MOST_FILES])
    if more := outcome.changed_files[_MOST_FILES:]:
        yield f"changed: and {len(more)} more files"


def _program(outcome: CommitOutcome) -> Iterator[str]:
    """Yield the differences between the programs of the last good and the first bad commit."""
    from farm.numbers.compare.symptom import compiled_values

    job = outcome.job
    if job.same:
        yield "the same"
    if job.differs:
        yield f"another {job.differs}"
    for metric, (was, now) in compiled_values(job).items():
        if was != now:
            yield f"{metric} {was:g} -> {now:g}"
    for name, (was, now) in job.fallback.items():
        yield f"on the CPU: {one_line(name)} {was} -> {now}"


def _commit_text(commit: Commit) -> str:
    return one_line(f"{commit.short} {commit.subject}")


def _commit_markdown(outcome: CommitOutcome) -> str:
    """Return the evidence to paste into an issue."""
    from farm.report.formats.compare import compare_markdown
    from farm.report.formats.github import escaped

    lines = [f"### {escaped(outcome.job.name)}", "", *(f"* {escaped(line)}" for line in _facts(outcome)), ""]
    return "\n".join([*lines, compare_markdown(outcome.report)])


def _commit_data(outcome: CommitOutcome) -> dict[str, object]:
    from farm.report.formats.compare import compare_data

    return {
        "job": outcome.job.name,
        "found": outcome.symptom is not None,
        "symptom": outcome.symptom,
        "first_bad": outcome.first_bad,
        "last_good": outcome.last_good,
        "exact": outcome.symptom is not None and not outcome.skipped,
        "skipped": [commit.sha for commit in outcome.skipped],
        "changed_files": outcome.changed_files,
        "log": outcome.log.splitlines(),
        "comparison": compare_data(outcome.report),
    }
