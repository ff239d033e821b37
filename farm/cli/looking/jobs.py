"""`farm jobs show`, `bundle`, `coverage` and `profile`: one job, or the operators of all jobs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import click
import msgspec

from farm.base.backends.registry import DEFAULT_BACKEND, runs_on_cpu
from farm.base.errors import FarmError, NoStoreError, UsageError
from farm.cli import options as opt
from farm.cli.output import as_called, echo, echo_coloured, opened, print_json, reading, show, width, write_file
from farm.report.model import format as fmt
from farm.report.terminal.layout import STUBBED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from farm.builds.bundles.bundle import Bundle
    from farm.report.model.coverage import Coverage
    from farm.report.model.sections import OriginSum
    from farm.report.terminal.profile import JobChanges
    from farm.store.artifacts import ArtifactStore
    from farm.store.records import ArtifactRecord, ProfileRecord
    from farm.suites.suite import Job, Target


# `farm show`.


@click.command("show")
@click.argument("job")
@click.option("--run", "ref", metavar="RUN", help="Result of this run, not the newest: latest, latest~1 or an id.")
@click.option("--files", "folder", type=opt.FOLDER, metavar="FOLDER",
              help="Write the kept files here, such as inputs and outputs of failed attempts.")  # fmt: skip
@opt.json_option("Print the job in full as JSON.")
def show_command(job: str, ref: str | None, folder: Path | None) -> None:
    """Show a job in full: attempts, logs with their tracebacks, numbers, files, commands to run it again.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one
    job matches. Nothing is cut.
    """
    from farm.report.model.summary import summarize
    from farm.report.terminal.run import job_lines
    from farm.serve.pages.jobs import JobQuery, job_page
    from farm.store.values import jsonable

    with reading() as reader:
        kept = reader.artifacts
        if folder is not None and kept is None:
            raise UsageError("--files copies from the store: leave it out, the server has the files on the job's page")
        facts = reader.read(job_page, JobQuery(job=job, run=ref or "", own=True, charts=False))
    view, files = facts.run, facts.files
    places = {one.sha256: path for one in files if kept is not None and (path := kept.find(one.sha256))}
    summary = summarize(view)
    item = summary.jobs[0]
    found = item.job
    of_run = {
        name: value for name, value in jsonable(msgspec.to_builtins(view)).items() if name not in ("jobs", "schema")
    }
    answer = {
        "job": jsonable(msgspec.to_builtins(found)),
        "outcome": item.outcome,
        "reason": item.reason,
        "run": of_run,
        "files": [{**msgspec.structs.asdict(one), "path": str(places.get(one.sha256, ""))} for one in files],
        "again": dict(facts.commands),
    }
    if folder is not None and not files:
        reason = "failures.keep_attempts in farm.toml sets how many failed attempts of a run have some"
        raise UsageError(f"no file is kept of {found.id} in run {view.id}: {reason}")
    show(answer, job_lines(summary, item, files, places))
    if folder is not None and kept is not None:
        for number in sorted({one.attempt for one in files}):
            _write(kept, [one for one in files if one.attempt == number], folder / f"attempt-{number}")


def _write(kept: ArtifactStore, files: Sequence[ArtifactRecord], folder: Path) -> None:
    from farm.store.transfer.runs import export

    for path in export(kept, files, folder):
        echo(f"file: {path}", err=True)


# `farm jobs bundle`: copies the bundle of a job into a folder.


@click.command("bundle")
@click.argument("job", callback=opt.named)
@click.option("--to", "folder", required=True, type=opt.FOLDER, help="Folder for the bundle: a new or an empty one.")
@click.option("--run", "ref", metavar="RUN", help="Bundle of this run: latest, latest~1 or an id.")
@click.option("--compiled", is_flag=True,
              help="Bundle that JOB compiles to today, from the cache: of no run.")  # fmt: skip
@opt.toolchain_option()
@opt.json_option("Print the written files as JSON.")
def bundle_command(job: str, folder: Path, ref: str | None, toolchain: str, *, compiled: bool) -> None:
    """Copy the bundle of JOB into a folder: the .pte, inputs, references,
    and a README.md with the commands to run it by hand with qnn_executor_runner.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one
    job matches. It is the exact bundle of its newest result, or of its result
    in --run. With --compiled JOB is a whole id, and the bundle is the result of
    farm run --compile-only. Nothing is overwritten.

    \b
    Exit codes: 0 written; 2 usage; 4 the bundle could not be compiled again;
    7 no result, or its bundle is gone.
    """
    from farm.replay.bundle_folder import README, require_new, write_bundle_folder

    require_new(folder)
    if compiled and ref is not None:
        raise UsageError("--compiled takes no result of a run: leave out --compiled or --run")
    bundle, job_id, target, about = _of_today(job, toolchain) if compiled else _of_result(job, ref, toolchain)
    write_bundle_folder(bundle, job_id, target, about, folder)
    answer = {"job": job_id, "key": bundle.manifest.key, "folder": str(folder), "about": about}
    show(answer, [*about, f"{folder}: {README} has the commands to run it"])


def _compile_command(job: Job, suite: str, toolchain: str) -> str:
    """Return the command that compiles one job; `suite` is its name or its path."""
    target = job.target
    words = ["farm", "run", "--compile-only", "--soc", target.soc, "--suite", suite, "--backend", target.backend]
    words += ["--precision", target.precision, "-k", job.case.name]
    words += [word for name, value in target.options for word in ("--option", f"{name}={value}")]
    return shlex.join([*words, *(["--toolchain", toolchain] if toolchain else [])])


def _of_result(job: str, ref: str | None, toolchain: str) -> tuple[Bundle, str, Target, list[str]]:
    from farm.dispatch.request.records import config_to_run_again
    from farm.replay.stored_result import find_stored_result, stored_bundle, target_of

    try:
        with opened(readonly=True, existing=True) as (config, store):
            stored = find_stored_result(store, job, ref)
    except FarmError as error:
        if ref is not None or not isinstance(error, UsageError | NoStoreError):
            raise
        raise UsageError(f"{error}; --compiled takes the bundle that 'farm run --compile-only' left") from None
    selected = config_to_run_again(config, stored.run, toolchain)
    bundle = stored_bundle(selected, stored, virtual=stored.kind == "virtual")
    attempt = stored.attempt
    about = [
        f"The bundle of {stored.description}.",
        f"There it {attempt.verdict}{f': {attempt.reason}' if attempt.reason else ''}.",
    ]
    return bundle, stored.view.id, target_of(stored.view), about


def _of_today(job: str, toolchain: str) -> tuple[Bundle, str, Target, list[str]]:
    from farm.builds.bundles.cache import BundleCache
    from farm.builds.bundles.reuse import find_bundle_for
    from farm.builds.toolchains.selection import prepare, use_toolchain
    from farm.dispatch.request.choose import named_job

    config = use_toolchain(opt.configured(), toolchain)
    chosen = named_job(config, job, "farm jobs bundle --compiled")
    cache = BundleCache(config.cache_dir)
    found = find_bundle_for(chosen, prepare(config), cache)
    bundle = cache.lookup(found.key) if found.cached else None
    if bundle is None:
        suite = job.partition("[")[0].rpartition("/")[0]
        raise UsageError(f"{chosen.id} is not compiled as it is today: {_compile_command(chosen, suite, toolchain)}")
    return bundle, chosen.id, chosen.target, ["Bundle that the job compiles to today; it may never have run."]


# `farm jobs coverage`.


_LEAST_WIDTH, _MOST_WIDTH = 60, 100


@click.command("coverage")
@opt.soc_option("SoC of the results; otherwise the only SoC with results.")
@click.option("--backend", metavar="BACKEND", default=DEFAULT_BACKEND, show_default=True, help="Backend with QNN.")
@click.option("--suite", "suites", metavar="SUITE", multiple=True,
              help="Suite, repeatable; otherwise quantized_ops and fp_ops, or the suites of the runs.")  # fmt: skip
@click.option("--run", "runs", metavar="RUN", multiple=True,
              help="Run, repeatable; otherwise the newest result of every job, of any run.")  # fmt: skip
@opt.branch_option()
@click.option("--markdown", type=opt.OUTPUT_FILE, help="Write a page with the table here.")
@opt.json_option("Print every cell as JSON instead of a table.")
def coverage_command(
    soc: str | None,
    backend: str,
    suites: tuple[str, ...],
    runs: tuple[str, ...],
    branch: str | None,
    markdown: Path | None,
) -> None:
    """Show every operator that ExecuTorch's Qualcomm backend builds, in every precision, and the results of its cases.

    Operators are the backend's builders (op_NAME.py). A job counts for the operator in its program with the fewest
    cases; a cell shows the worst state of its jobs, and how many have it. Above the table is the number of ATen
    operators of ExecuTorch's own tests with a case; below it are the operators whose tests consist of other operators.
    """
    from farm.report.model.coverage import read_coverage
    from farm.report.terminal.coverage import coverage_lines, coverage_markdown

    with opened(readonly=True) as (config, store):
        table, about = read_coverage(store, config.suite_folders, soc, backend, suites, runs, branch)
    if markdown is not None:
        write_file(markdown, coverage_markdown(table, about, as_called()))
    if opt.is_json():
        print_json({"schema": 3, **_as_json(table, about)})
        return
    columns = max(_LEAST_WIDTH, min(_MOST_WIDTH, width()))
    echo_coloured("\n".join(coverage_lines(table, about, columns)))
    if markdown is not None:
        echo(f"written: {markdown}", err=True)


def _as_json(table: Coverage, about: Iterable[str]) -> Mapping[str, Any]:
    def rows(part: Iterable[Any]) -> list[dict[str, Any]]:
        return [
            {
                "name": row.name,
                "operators": row.targets,
                "without": row.without,
                "cells": {
                    precision: {
                        "state": cell.state,
                        "count": cell.count,
                        "in_passing": cell.in_passing,
                        "jobs": [item.job_id for item in cell.items],
                    }
                    for precision, cell in row.cells.items()
                },
            }
            for row in part
        ]

    return {
        "soc": table.soc,
        "backend": table.backend,
        "about": list(about),
        "precisions": table.precisions,
        "counts": table.counts,
        "builders": rows(table.rows),
        "aten": {"tested": table.tested, "made_of_others": table.made_of_others, "without": table.untested},
        "beyond": rows(table.beyond),
        "jobs": table.items,
    }


# `farm jobs profile`.


@click.command("profile")
@click.argument("job", required=False)
@click.option("--run", "run", metavar="RUN", help="Profile of this run, instead of the newest profile.")
@click.option("--diff", nargs=2, metavar="RUN RUN", help="Compare the profiles of two runs; of all jobs without JOB.")
@click.option("--by", type=click.Choice(["module", "line"]),
              help="Sum the times by module of the model, or by line of its code.")  # fmt: skip
@click.option("--depth", type=click.IntRange(min=1), metavar="N",
              help="With --by module: shorten modules to N names: layers.3 of layers.3.conv for 2.")  # fmt: skip
@opt.limit_option("Most rows of a table.")
@opt.json_option("Print every row as JSON instead of tables.")
def profile_command(
    job: str | None,
    run: str | None,
    diff: tuple[str, str] | None,
    by: str | None,
    depth: int | None,
    limit: int,
) -> None:
    """Show where the time of JOB goes, node by node, in its newest attempt that has a profile.

    Each node is shown with its module of the model and its line of code, if known.

    JOB is suite/case, a whole job id, a suite, or a pattern with * and ?. Figures are medians over the timed
    inferences. 'farm run --profile detailed' makes profiles. 'farm show --files' writes the kept files.
    """
    from farm.report.model.sections import origin_sums

    if diff is not None:
        if run or by:
            raise UsageError("--diff takes two runs, and neither --run nor --by")
        _compare(job or "*", diff, limit)
        return
    if depth and by != "module":
        raise UsageError("--depth is for --by module")
    if job is None:
        raise UsageError("which JOB? Give suite/case; or --diff RUN RUN alone, for all jobs of two runs")
    with opened(readonly=True) as (_, store):
        found = store.history.profiles(job, store.runs.resolve(run) if run else None)
    sums = [origin_sums(one.operators, by_line=by == "line", depth=depth or 0) if by else () for one in found]
    if by and not any(sums):
        raise UsageError(
            f"of {job} no module or line is known: its programs were compiled by an older farm or elsewhere, or their "
            "nodes have no names of the model, as on the CPU"
        )
    both = list(zip(found, sums, strict=True))
    with_sums = [{**msgspec.to_builtins(record), "sums": one} for record, one in both]
    lines = [line for record, one in both for line in ("", *_shown(record, _tables(record, one, by, limit)))]
    show({"profiles": with_sums if by else found}, lines[1:])


def _tables(record: ProfileRecord, sums: Sequence[OriginSum], by: str | None, limit: int) -> list[str]:
    from farm.report.terminal.profile import profile_lines, sum_lines

    if not by:
        return profile_lines(record.operators, limit, width())
    return sum_lines(sums, "source line" if by == "line" else by, limit, width()) or ["  no module or line is known"]


def _shown(record: ProfileRecord, tables: Sequence[str]) -> list[str]:
    from farm.builds.bundles.key import stub_of

    started = fmt.local_time(record.time_ms)
    n = max((row.n for row in record.operators), default=0)
    counted = f", {fmt.plural(n, 'inference')}" if n else ""
    lines = [
        record.job_id,
        f"  run {record.run_id}, {started:%Y-%m-%d %H:%M}, {record.verdict}{counted}",
        f"  on {record.device_kind} device {record.device}" if record.device else "  no device",
    ]
    if not runs_on_cpu(record.backend) and stub_of(record.facts):
        lines.append(f"  {STUBBED}")
    elif record.device_kind == "virtual":
        time = "time of the host's processor" if runs_on_cpu(record.backend) else "host time of a simulator"
        lines.append(f"  VIRTUAL: {time}: not comparable with hardware")
    lines += ["", *tables]
    if record.artifacts:
        lines += ["", *(f"  kept: {artifact.kind}, {artifact.size:,} bytes" for artifact in record.artifacts)]
    return lines


def _compare(job: str, runs: tuple[str, str], limit: int) -> None:
    from farm.report.terminal.profile import change_lines, job_changes

    with opened(readonly=True) as (_, store):
        run_ids = [store.runs.resolve(run) for run in runs]
        before, after = (store.history.profiles(job, run_id) for run_id in run_ids)
    found = job_changes(before, after)
    if all(one.refused for one in found):
        reason = found[0].refused if found else f"{before[0].run_id} and {after[0].run_id} profiled different jobs"
        raise UsageError(f"nothing to compare: {reason}")
    lines: list[str] = []
    for one in found:
        lines += _heading(one)
        lines += ["", *change_lines(one.nodes, limit, width()), ""] if not one.refused else [""]
    lines += ["  ~ the ranges of before and after overlap."]
    lines += ["  A run is one sample: a change without ~ may be noise, too."]
    if any(one.device_kind == "virtual" for one in found):
        lines.append("  VIRTUAL: two runs of one program on the simulator often differ by half.")
    show({"schema": 2, "jobs": found}, lines)


def _heading(one: JobChanges) -> Sequence[str]:
    lines = [one.job_id, f"  {one.before_run} -> {one.after_run}, {one.device_kind or 'no'} device"]
    if one.before_job != one.job_id:
        lines[:1] = [one.before_job, f"  against {one.job_id}"]
    lines += [f"  NOT COMPARED: {one.refused}"] if one.refused else []
    return lines + [f"  differs: {difference}" for difference in one.differences]
