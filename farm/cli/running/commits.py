"""`farm bisect --commits`: the first bad commit of a checkout."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farm.cli.output import as_called, notice, show, write_file
from farm.cli.running.confirm import asked_inferences
from farm.errors import UsageError
from farm.report.terminal.layout import SIMULATED, wrapped

if TYPE_CHECKING:
    from farm.config.settings import Config
    from farm.regressions.commit_records import CommitsRequest
    from farm.regressions.commit_session import CommitsOutcome
    from farm.store.store import Store
    from farm.suites.suite import Job

EVIDENCE_FILE = "evidence.md"
REGRESSION = 3
"""Exit code: something got worse, and since when is shown."""


def bisect_over_commits(
    config: Config, store: Store, jobs: tuple[str, ...], options: dict[str, Any], *, as_json: bool
) -> int:
    """Search, show what is found, and return the exit code. Raises UsageError, NoDeviceError, InfraError."""
    from farm.regressions.commit_session import bisect_commits

    request, found = _request(config, jobs, options)
    outcome = bisect_commits(config, store, request, found, as_called(), notice, anew=options["anew"])
    return _end(config, outcome, options, as_json=as_json)


def resume_over_commits(
    config: Config, store: Store, jobs: tuple[str, ...], options: dict[str, Any], *, as_json: bool
) -> int:
    """Go on with a bisection, or show what a finished one found; otherwise as `bisect_over_commits`."""
    from farm.regressions.commit_records import read_state
    from farm.regressions.commit_session import bisect_commits, find_bisection, outcome_of
    from farm.toolchains.commits import Checkout

    given = ("commits", "checkout", "build", "toolchain", "metric", "soc", "precision", "options", "device", "anew")
    if jobs or any(options[name] for name in given):
        raise UsageError("--resume goes on with what was asked: leave jobs and everything else out")
    folder = find_bisection(config, options["resume"])
    state = read_state(folder)
    if state.is_finished:
        outcome = outcome_of(Checkout(Path(state.request.checkout)), folder, state)
    else:
        found = [_job(config, job_id, {}) for job_id in state.request.jobs]
        outcome = bisect_commits(config, store, state.request, found, as_called(), notice)
    return _end(config, outcome, options, as_json=as_json)


def _request(config: Config, jobs: tuple[str, ...], options: dict[str, Any]) -> tuple[CommitsRequest, list[Job]]:
    from farm.regressions.commit_session import commits_request
    from farm.toolchains.select import absolute_ref

    if not jobs:
        raise UsageError("name one job at least: suite/case[SoC-htp-precision], or suite/case with --soc")
    target = {name: options[name] for name in ("soc", "precision", "options")}
    found = {job.id: job for job in (_job(config, text, target) for text in jobs)}
    request = commits_request(
        config,
        options["checkout"],
        options["commits"],
        jobs=tuple(found),
        metric=options["metric"],
        build=_words(options["build"]),
        # It may go on from another folder.
        toolchain=absolute_ref(options["toolchain"]),
        virtual=options["virtual"],
        device=options["device"],
        pairs=options["pairs"],
        **asked_inferences(options),
    )
    return request, list(found.values())


def _job(config: Config, text: str, target: dict[str, Any]) -> Job:
    from farm.request.named_job import named_job

    job = named_job(config, text, "farm bisect", **target)
    if job.case.pte:
        raise UsageError(f"{text} is a .pte that was compiled already: no commit makes another of it")
    return job


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--build {text!r}: {error}") from None


def _end(config: Config, outcome: CommitsOutcome, options: dict[str, Any], *, as_json: bool) -> int:
    from farm.regressions.commit_evidence import data, markdown, text_lines
    from farm.regressions.commit_records import QuestionKind
    from farm.toolchains.worktrees import toolchain_at

    state = outcome.state
    toolchain = config.toolchains.get(state.request.toolchain) or toolchain_at(config, Path(state.request.checkout))
    evidence = markdown(outcome, toolchain.commit_url)
    write_file(outcome.folder / EVIDENCE_FILE, evidence)
    if options["markdown"] is not None:
        write_file(options["markdown"], evidence)
    lines = [part for line in text_lines(outcome) for part in (wrapped(line, hanging="    ") if line else [""])]
    if state.request.virtual and outcome.found:
        lines.append(SIMULATED)
    show(data(outcome), lines, as_json=as_json)
    if outcome.found:
        return REGRESSION
    questions = (search.question for search in state.searches.values())
    is_refused = any(one is not None and one.kind is QuestionKind.REFUSED for one in questions)
    return UsageError.exit_code if is_refused else 0
