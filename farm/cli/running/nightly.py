"""`farm nightly`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from farm.base.errors import ExitCode, UsageError
from farm.cli.options import FILE, configured, json_option, pull_request_option
from farm.cli.output import asked_server, echo, notice, show, width

if TYPE_CHECKING:
    from pathlib import Path

    from farm.dispatch.nightly.record import NightlyRun


@click.command("nightly")
@click.argument("file", type=FILE, metavar="nightly.toml")
@click.option("--check", is_flag=True, help="Print the plan, and errors of the file; run nothing.")
@click.option("--resume", is_flag=True, help="Finish the last nightly run of this name, killed or interrupted.")
@pull_request_option()
@json_option("Print the nightly run, or its plan, as JSON.")
def command(file: Path, *, check: bool, resume: bool, pull_request: str) -> int:
    """Run a matrix of SoCs, suites, backends and options within a budget.

    Each [[run]] on each of its backends is a run as of farm run, one after
    the other; a failing run does not stop the next. Then come the pages, the
    exports and notifications: see docs/guides/nightly.md. Ctrl-C and SIGTERM
    finish the running jobs and report; --resume goes on.

    \b
    Exit codes, the first that holds: 130 interrupted; 2 usage or
    configuration; 1 a job failed; 3 only regressions; 4 no device or
    infrastructure; 5 nothing was run; 0 otherwise. With --check: 6 for a run
    that this machine is not set up for.
    """
    from farm.dispatch.nightly.plan import matrix, matrix_lines, read_plan
    from farm.dispatch.notify.channels import hide_secrets, missing_secrets

    if check and resume:
        raise UsageError("--check runs nothing, and --resume runs: leave one of them out")
    if not check and asked_server() is not None:
        raise UsageError(
            "the server of $FARM_SERVER starts no nightly runs: list the file in [agent] nights of a device host, or "
            "unset FARM_SERVER to run it with the store of this machine (docs/guides/nightly.md, 'Several hosts')"
        )
    config = configured()
    plan, jobs = read_plan(file, config)
    hide_secrets(plan.webhooks, plan.mail)
    for lacking in missing_secrets(plan.webhooks, plan.mail):
        notice(f"a notification cannot be sent: {lacking}")
    if check:
        rows = matrix(config, plan, jobs)
        answer = {"schema": 2, "nightly_run": plan.name, "budget_s": plan.budget_s, "runs": rows}
        show(answer, matrix_lines(plan.name, rows, plan.budget_s, width()))
        if any(row.problem for row in rows):
            return ExitCode.MISSING_TOOL
        return 0 if any(row.jobs for row in rows) else ExitCode.NOTHING

    from farm.cli.output import find_pull_request, post_review
    from farm.cli.progress import QuietFront, make_front
    from farm.cli.running.cell_steps import confirm_suspected, debug_failures
    from farm.dispatch.nightly.nightly_run import run_nightly
    from farm.dispatch.nightly.render import nightly_review

    pull = find_pull_request(pull_request)
    front = partial(make_front, QuietFront)
    nightly_run = run_nightly(config, plan, front, confirm_suspected, debug_failures, resume=resume)
    _show_nightly_run(nightly_run)
    post_review(pull, lambda: nightly_review(nightly_run))
    assert nightly_run.code is not None  # noqa: S101 - it has ended
    return nightly_run.code


def _show_nightly_run(nightly_run: NightlyRun) -> None:
    from farm.dispatch.nightly.render import nightly_annotations, nightly_lines, nightly_markdown
    from farm.report.formats.github import add_summary

    add_summary(lambda: nightly_markdown(nightly_run))
    # GitHub reads standard error as well as standard output, which may be JSON.
    for line in nightly_annotations(nightly_run):
        echo(line, err=True)
    show({"schema": 2, "nightly_run": nightly_run}, nightly_lines(nightly_run, width()))
