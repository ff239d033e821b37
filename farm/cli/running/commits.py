"""`farm perf bisect --commits`: the first bad commit of a checkout."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from farm.base.errors import UsageError
from farm.base.exit_codes import ExitCode
from farm.base.text import one_line
from farm.cli.output import as_called, opened, show, width, write_file
from farm.report.terminal.layout import wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.toolchains.commits import Commit
    from farm.numbers.compare.commit_bisect import BisectOutcome
    from farm.suites.suite import Job

_MOST_FILES = 20


def bisect_over_commits(config_file: Path | None, name: str, options: dict[str, Any], *, as_json: bool) -> int:
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
    with opened(config_file) as (opened_config, store):
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
        write_file(options["markdown"], _markdown(outcome))
    show(_data(outcome), _lines(outcome), as_json=as_json)
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


def _lines(outcome: BisectOutcome) -> Iterator[str]:
    from farm.report.terminal.compare import compare_lines

    yield one_line(outcome.job.name)
    for line in _facts(outcome):
        yield from wrapped(f"  {line}", hanging="    ")
    yield ""
    yield from compare_lines(outcome.report, 1, width())


def _facts(outcome: BisectOutcome) -> Iterator[str]:
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


def _program(outcome: BisectOutcome) -> Iterator[str]:
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


def _markdown(outcome: BisectOutcome) -> str:
    """Return the evidence to paste into an issue."""
    from farm.report.formats.compare import compare_markdown
    from farm.report.formats.github import escaped

    lines = [f"### {escaped(outcome.job.name)}", "", *(f"* {escaped(line)}" for line in _facts(outcome)), ""]
    return "\n".join([*lines, compare_markdown(outcome.report)])


def _data(outcome: BisectOutcome) -> dict[str, object]:
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
