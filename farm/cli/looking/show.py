"""`farm show`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from farm.base.errors import UsageError
from farm.cli.options import FOLDER, json_option
from farm.cli.output import echo, reading, show

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.store.artifacts import ArtifactStore
    from farm.store.records import JobFile


@click.command("show")
@click.argument("job")
@click.option("--run", "ref", metavar="RUN", help="Result of this run, not the newest: latest, latest~1 or an id.")
@click.option("--files", "folder", type=FOLDER, metavar="FOLDER",
              help="Write the kept files here, such as inputs and outputs of failed attempts.")  # fmt: skip
@json_option("Print the job in full as JSON.")
def command(job: str, ref: str | None, folder: Path | None) -> None:
    """Show a job in full: attempts, logs with their tracebacks, numbers, files, commands to run it again.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one
    job matches. Nothing is cut.
    """
    import msgspec

    from farm.report.model.summary import summarize
    from farm.report.terminal.job import job_lines
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
        _write(kept, files, folder)


def _write(kept: ArtifactStore, files: Sequence[JobFile], folder: Path) -> None:
    """Write the files of each attempt into a folder of its own, `attempt-1` and so on, below `folder`."""
    from farm.store.transfer.files import export

    for number in sorted({one.attempt for one in files}):
        for path in export(kept, [one for one in files if one.attempt == number], folder / f"attempt-{number}"):
            echo(f"file: {path}", err=True)
