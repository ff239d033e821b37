"""`farm perf compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND
from farm.base.errors import UsageError
from farm.cli.options import (
    ATTACHED,
    OUTPUT_FILE,
    devices_options,
    json_option,
    limit_option,
    named,
    pull_request_option,
    refuse_attached,
    refuse_given,
)
from farm.cli.output import as_called, opened, show, width, write_file

if TYPE_CHECKING:
    from pathlib import Path

    from farm.numbers.compare.compare import CompareOutcome
_SAME = ("suites", "backend", "precisions", "options", "keyword", "virtual", "most_devices", "pairs")
"""Parameters that are fields of the request."""


@click.command("compare")
@click.option("--toolchain", "toolchains", multiple=True, callback=named, metavar="NAME|PATH|VERSION",
              help="Once for both sides, twice for A and B; otherwise the default.")  # fmt: skip
@click.option("--qnn", multiple=True, callback=named, metavar="VERSION|PATH",
              help="QNN SDK: once for both sides, twice for A and B.")  # fmt: skip
@click.option("--options", "side_options", multiple=True, metavar="'NAME=VALUE ...'",
              help="Backend options of a side, may be empty: twice for A and B.")  # fmt: skip
@click.option("--checkout", default="", callback=named, metavar="FOLDER",
              help="B is this source tree of ExecuTorch in its present state ...")  # fmt: skip
@click.option("--base", default="", callback=named, metavar="COMMIT",
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
@devices_options
@click.option("--pairs", type=click.IntRange(10, 1000), default=10, show_default=True, metavar="N",
              help="Least number of pairs; more for many jobs.")  # fmt: skip
@click.option("--programs-only", is_flag=True, help="Compile and compare programs; run nothing, need no device.")
@click.option("--html", type=OUTPUT_FILE, help="Write the page here as well.")
@pull_request_option()
@limit_option("Jobs of a kind that are listed.")
@json_option("Print everything as JSON instead of a summary.")
def command(*, html: Path | None, limit: int, programs_only: bool, **given: Any) -> int:
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
    from farm.cli.running.reviews import find_pull_request, post_review
    from farm.dispatch.pool.fleet import Choice
    from farm.numbers.compare.compare import compare_sides
    from farm.numbers.compare.request import ComparisonRequest, sides_of
    from farm.report.formats.review import compare_review

    if not given["suites"]:
        raise UsageError("--suite must be given; 'farm suites' lists the suites")
    refuse_attached(virtual=given["virtual"])
    if programs_only:
        refuse_given("{} is for execution: leave it, or --programs-only, out", *ATTACHED)
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
    _deliver(outcome, html=html, limit=limit)
    post_review(pull, lambda: compare_review(outcome.report))
    return outcome.exit_code


def _deliver(outcome: CompareOutcome, *, html: Path | None, limit: int) -> None:
    """Print the comparison, write the page if asked, and the summary of a GitHub step. Raises UsageError."""
    from farm.numbers.compare.compare import PAGE_FILE
    from farm.report.formats.compare import compare_commands, compare_data, compare_markdown
    from farm.report.formats.github import add_summary
    from farm.report.terminal.compare import compare_lines

    report, page = outcome.report, outcome.folder / PAGE_FILE
    if html is not None:
        write_file(html, page.read_text(encoding="utf-8"))
    add_summary(lambda: compare_markdown(report))
    lines = [*compare_lines(report, limit, width()), *compare_commands(report), f"page: {html or page}"]
    show(compare_data(report), lines)
