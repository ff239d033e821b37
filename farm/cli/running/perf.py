"""`farm perf compare`, `confirm` and `bisect`: measurements of two sides in turns."""

from __future__ import annotations

import math
import shlex
import statistics
from typing import TYPE_CHECKING, Any

import click

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND
from farm.base.errors import FIRST_RUN, ExitCode, MissingToolError, UsageError
from farm.base.text import one_line
from farm.cli import options as opt
from farm.cli.output import as_called, echo, opened, show, width, write_file
from farm.report.model import format as fmt
from farm.report.terminal.layout import SIMULATED, columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.toolchains.worktrees import Commit
    from farm.numbers.compare.commit_bisect import BisectOutcome as CommitOutcome
    from farm.numbers.regressions.confirm_run import RunFindings
    from farm.numbers.regressions.paired_test import Compared, Probe
    from farm.numbers.regressions.stored_pairs import BisectOutcome, ConfirmOutcome, PairsRequest
    from farm.replay.stored_result import StoredResult
    from farm.results.analysis.confirmation import Confirmation
    from farm.results.analysis.statistics import Scale
    from farm.suites.suite import Job


# `farm perf compare`.


_SAME = ("suites", "backend", "precisions", "options", "keyword", "virtual", "most_devices", "pairs")
"""Parameters that are fields of the request."""


@click.command("compare")
@click.option("--toolchain", "toolchains", multiple=True, callback=opt.named, metavar="NAME|PATH|VERSION",
              help="Once for both sides, twice for A and B; otherwise the default.")  # fmt: skip
@click.option("--qnn", multiple=True, callback=opt.named, metavar="VERSION|PATH",
              help="QNN SDK: once for both sides, twice for A and B.")  # fmt: skip
@click.option("--options", "side_options", multiple=True, metavar="'NAME=VALUE ...'",
              help="Backend options of a side, may be empty: twice for A and B.")  # fmt: skip
@click.option("--checkout", default="", callback=opt.named, metavar="FOLDER",
              help="B is this source tree of ExecuTorch in its present state ...")  # fmt: skip
@click.option("--base", default="", callback=opt.named, metavar="COMMIT",
              help="... and A is this commit of it, in a separate worktree.")  # fmt: skip
@click.option("--soc", "socs", metavar="SOC", multiple=True,
              help="SoC to compile for and run on; repeatable.  [default: SM8650]")  # fmt: skip
@click.option("--suite", "suites", metavar="SUITE", multiple=True, help="Suite, by name or path; repeatable.")
@click.option("--backend", metavar="BACKEND", default=DEFAULT_BACKEND, show_default=True, help=", ".join(BACKENDS))
@click.option("--precision", "precisions", metavar="PRECISION", multiple=True,
              help="Only these precisions; repeatable.")  # fmt: skip
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE[,VALUE]",
              help="Backend option of both sides; repeatable, as in farm run.")  # fmt: skip
@click.option("-k", "keyword", default="", metavar="EXPRESSION", help="Only jobs whose name matches, as in pytest.")
@opt.devices_options
@click.option("--pairs", type=click.IntRange(10, 1000), default=10, show_default=True, metavar="N",
              help="Least number of pairs; more for many jobs.")  # fmt: skip
@click.option("--programs-only", is_flag=True, help="Compile and compare programs; run nothing, need no device.")
@click.option("--html", type=opt.OUTPUT_FILE, help="Write the page here as well.")
@opt.pull_request_option()
@opt.limit_option("Jobs of a kind that are listed.")
@opt.json_option("Print everything as JSON instead of a summary.")
def compare_command(*, html: Path | None, limit: int, programs_only: bool, **given: Any) -> int:
    """Compare two toolchains, SDKs or option sets: is B worse than A?

    Both are compiled. Equal programs need no device; different programs run in
    turns on the same warm devices, with the statistics of farm perf confirm. Nothing
    is recorded in the store; page and JSON are kept in the state folder.

    \b
    farm perf compare --toolchain 1.4.1 --toolchain 1.5.1 --suite smoke \\
        --virtual 2
    farm perf compare --checkout . --base origin/main --suite smoke --virtual 2
    farm perf compare --qnn 2.49 --qnn 2.51 --suite smoke --virtual 2

    B is worse if a job fails newly, is confirmed slower or less exact, or
    leaves more operators to the CPU.

    \b
    Exit codes: 0 B is not worse; 2 usage or configuration; 3 B is worse;
    4 not worse as far as known, but jobs could not be compared
    for want of a device or for trouble of the farm; 5 nothing selected; 6
    missing tool; 130 interrupted, with the results so far reported.
    """
    from farm.cli.output import find_pull_request, post_review
    from farm.dispatch.pool.fleet import Choice
    from farm.numbers.compare.compare import PAGE_FILE, compare_sides
    from farm.numbers.compare.sides import ComparisonRequest, sides_of
    from farm.report.formats.github import add_summary
    from farm.report.formats.review import compare_commands, compare_data, compare_markdown, compare_review
    from farm.report.terminal.compare import compare_lines

    if not given["suites"]:
        raise UsageError("--suite must be given; 'farm suites' lists the suites")
    opt.refuse_attached(virtual=given["virtual"])
    if programs_only:
        opt.refuse_given("{} is for execution: leave it, or --programs-only, out", *opt.ATTACHED)
    request = ComparisonRequest(
        sides=sides_of(given["toolchains"], given["qnn"], given["side_options"], given["checkout"], given["base"]),
        socs=given["socs"] or ("SM8650",),
        choice=Choice(given["devices"], given["labels"]),
        execute=not programs_only,
        command=as_called(),
        **{name: given[name] for name in _SAME},
    )
    pull = find_pull_request(given["pull_request"])
    with opened() as (config, store):
        outcome = compare_sides(config, store, request)
    report, page = outcome.report, outcome.folder / PAGE_FILE
    if html is not None:
        write_file(html, page.read_text(encoding="utf-8"))
    add_summary(lambda: compare_markdown(report))
    lines = [*compare_lines(report, limit, width()), *compare_commands(report), f"page: {html or page}"]
    show(compare_data(report), lines)
    post_review(pull, lambda: compare_review(report))
    return outcome.exit_code


# `farm perf confirm`: old and new bundle in turns on one device.


@click.command("confirm")
@click.argument("job", required=False)
@click.option("--run", "run_ref", metavar="RUN",
              help="Without JOB: all suspected regressions of this run; otherwise as farm status.")  # fmt: skip
@click.option("--budget", "budget_s", metavar="TIME", callback=opt.duration,
              help="Without JOB: time limit, such as 30m; the least probable first. Otherwise as long as "
              "suspected changes take, and 10m for other new programs.")  # fmt: skip
@click.option("--good", metavar="RUN",
              help="Run before the change; otherwise the newest earlier run with another bundle.")  # fmt: skip
@click.option("--bad", metavar="RUN", help="Run after the change; otherwise the newest run with a result.")
@opt.metrics_option(
    "Metric to measure, repeatable; otherwise htp_cycles, or latency without them; of text prefill_rate, too."
)
@opt.interleaved_options
@opt.toolchain_option()
@opt.json_option("Print everything, with all samples, as JSON.")
def confirm_command(job: str | None, toolchain: str, *, run_ref: str | None, **options: Any) -> int:
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
    opt.refuse_attached(virtual=options["virtual"])
    request, budget_s = _pairs_request(options), options["budget_s"]
    if job is None:
        opt.refuse_given("{0} is for one JOB: name it, or leave {0} out", "good", "bad", "metrics")
        return _confirm_run(run_ref, request, budget_s, toolchain)
    if run_ref is not None or budget_s is not None:
        raise UsageError("--run and --budget are for all suspected changes: leave JOB out, or use --bad RUN")
    from farm.dispatch.request.records import config_to_run_again
    from farm.numbers.regressions.stored_pairs import choose_results, confirm_job

    with opened(existing=True) as (config, store):
        old, new = choose_results(store, job, options["good"], options["bad"])
        selected = config_to_run_again(config, new.run, toolchain)
        outcome = confirm_job(selected, store, old, new, request, options["metrics"])
    show(_confirm_data(outcome), _confirm_lines(outcome))
    return ExitCode.REGRESSION if outcome.confirmed else 0


def _pairs_request(options: dict[str, Any]) -> PairsRequest:
    """Return the request from the options of `interleaved_options` among `options`."""
    from farm.numbers.regressions.stored_pairs import PairsRequest
    from farm.results.analysis.confirmation import INFERENCES

    fields = {name: options[name] for name in ("pairs", "device", "virtual")}
    inferences, least = options["inferences"] or INFERENCES, options["inferences"] or 0
    return PairsRequest(**fields, inferences=inferences, least_inferences=least, command=as_called())


def _confirm_run(run_ref: str | None, request: PairsRequest, budget_s: float | None, toolchain: str) -> int:
    from farm.base.interrupts import InterruptHandler
    from farm.builds.toolchains.selection import branch_of, toolchain_of
    from farm.dispatch.request.records import config_of_run
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
    rows = [
        (
            one_line(one.series.metric)[:20],
            *(_median([pair[side] for pair in one.pairs], one.series.unit) for side in (0, 1)),
            change_interval(one.series.scale, one.confirmation),
            f"{one.confirmation.p_value:.2g}" if one.confirmation.pairs else fmt.NOTHING,
            str(one.confirmation.answer),
        )
        for one in compared
    ]
    return columns([("metric", "good", "new", "change", "p", "answer"), *rows])


def _median(turns: Sequence[Sequence[float]], unit: str) -> str:
    medians = [statistics.median(samples) for samples in turns if len(samples)]
    return fmt.quantity(statistics.median(medians), unit).removesuffix(" cycles") if medians else fmt.NOTHING


def change_interval(scale: Scale, one: Confirmation) -> str:
    """Return a change with its interval: `+8.2 % (+7.1 to +9.4)`."""
    from farm.results.analysis.statistics import change_text

    if math.isnan(one.change):
        return fmt.NOTHING
    low, high = ("…" if math.isinf(end) else change_text(scale, end).split()[0] for end in (one.low, one.high))
    # Rounding and adding 0.0 avoids "-0.0 %".
    return f"{change_text(scale, round(one.change, 6) + 0.0)} ({low} to {high})"


def differing_lines(good: StoredResult, new: StoredResult, facts: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Yield the differences between both results."""
    from farm.results.analysis.history import fact_line

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


# `farm perf bisect`: first run, or first commit of a checkout, in which a job is worse.


_MOST_FILES = 20
_WORDS = {"confirmed": "bad", "refuted": "good", "unknown": "unknown"}


@click.command("bisect")
@click.argument("job")
@click.option("--good", metavar="RUN", help="Run before the job got worse: an id, or latest~20.")
@click.option("--bad", metavar="RUN", help="Run after the job got worse: an id, or latest.")
@click.option("--commits", metavar="GOOD..BAD", default="", help="Search commits of a checkout, not runs.")
@click.option("--checkout", type=opt.FOLDER, help="Source tree of ExecuTorch; otherwise the checkout of --toolchain.")
@click.option("--toolchain", default="", callback=opt.named, metavar="NAME",
              help="Toolchain of farm.toml with the checkout; otherwise found by the checkout.")  # fmt: skip
@click.option("--build-command", "build", default="", metavar="COMMAND",
              help="Command that builds native parts changed by a commit; otherwise build in farm.toml.")  # fmt: skip
@opt.soc_option("SoC, if JOB has no target and results on several.")
@click.option("--precision", metavar="PRECISION", help="Precision, if JOB has no target and the case has several.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Backend option; repeatable.")
@click.option(
    "--metric",
    metavar="METRIC",
    default="",
    help="Metric to follow; otherwise htp_cycles, or latency; with --commits the difference at BAD.",
)
@click.option("--markdown", type=opt.OUTPUT_FILE, help="With --commits: write the evidence here too.")
@opt.interleaved_options
@opt.json_option("Print everything, with all samples, as JSON.")
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
    opt.refuse_attached(virtual=options["virtual"])
    if options["commits"]:
        opt.refuse_given("{} is for runs: leave it or --commits out", "good", "bad", "inferences")
        return _bisect_commits(job, options)
    return _bisect_runs(job, options)


def _bisect_runs(job: str, options: dict[str, Any]) -> int:
    of_commits = ("checkout", "toolchain", "build", "soc", "precision", "options", "markdown")
    opt.refuse_given("{} is for --commits GOOD..BAD: leave it out", *of_commits)
    if not (options["good"] and options["bad"]):
        raise UsageError("name two runs with --good and --bad, or commits of a checkout with --commits GOOD..BAD")
    from farm.dispatch.request.records import config_to_run_again
    from farm.numbers.regressions.stored_pairs import bisect, find_ends

    def show_probe(result: StoredResult, probe: Probe) -> None:
        line = f"{result.run.id}  {_WORDS[probe.answer]}: {probe.reason}"
        echo("\n".join(wrapped(line)), err=opt.is_json())

    with opened(existing=True) as (config, store):
        old, new = find_ends(store, job, options["good"], options["bad"])
        selected = config_to_run_again(config, new.run, "")
        outcome = bisect(selected, store, old, new, _pairs_request(options), options["metric"], show_probe)
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
    from farm.numbers.compare import commit_bisect
    from farm.numbers.compare.sides import ComparisonRequest, SideRequest

    try:
        build = tuple(shlex.split(options["build"]))
    except ValueError as error:
        raise UsageError(f"--build-command {options['build']!r}: {error}") from None
    with opened() as (opened_config, store):
        job = _job(opened_config, name, options)
        config, checkout = commit_bisect.bisected_toolchain(
            opened_config, options["checkout"], options["toolchain"], build
        )
        commits = commit_bisect.commits_of(checkout, options["commits"])
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
        folder = commit_bisect.search_folder(config, commits, request, options["metric"])
        compare = commit_bisect.comparing(config, store, request, checkout)
        outcome = commit_bisect.bisect_commits(checkout, commits, folder, compare, options["metric"])
    if options["markdown"] is not None:
        write_file(options["markdown"], _commit_markdown(outcome))
    show(_commit_data(outcome), _commit_lines(outcome))
    return ExitCode.REGRESSION if outcome.symptom else 0


def _job(config: Config, text: str, options: dict[str, Any]) -> Job:
    from farm.dispatch.request.choose import named_job

    target = {name: options[name] for name in ("soc", "precision", "options")}
    job = named_job(config, text, "farm perf bisect", **target)
    if job.case.pte:
        raise UsageError(f"{text} is a .pte file that was compiled elsewhere: no commit changes it")
    return job


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
    from farm.numbers.compare.commit_bisect import compiled_values

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
    from farm.report.formats.github import escaped
    from farm.report.formats.review import compare_markdown

    lines = [f"### {escaped(outcome.job.name)}", "", *(f"* {escaped(line)}" for line in _facts(outcome)), ""]
    return "\n".join([*lines, compare_markdown(outcome.report)])


def _commit_data(outcome: CommitOutcome) -> dict[str, object]:
    from farm.report.formats.review import compare_data

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
