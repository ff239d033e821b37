"""`farm jobs profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from farm.base.backends.registry import runs_on_cpu
from farm.base.errors import UsageError
from farm.builds.bundles.key import stub_of
from farm.cli.options import FOLDER, OUTPUT_FILE, json_option, limit_option
from farm.cli.output import echo, opened, show, width, write_file
from farm.report.model import format as fmt
from farm.report.terminal.layout import STUBBED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.report.model.profile_tables import OriginSum
    from farm.report.terminal.profile import JobChanges
    from farm.store.records import ProfileRecord


@click.command("profile")
@click.argument("job", required=False)
@click.option("--run", "run", metavar="RUN", help="Profile of this run, instead of the newest profile.")
@click.option("--diff", nargs=2, metavar="RUN RUN", help="Compare the profiles of two runs; of all jobs without JOB.")
@click.option("--by", type=click.Choice(["module", "line"]),
              help="Sum the times by module of the model, or by line of its code.")  # fmt: skip
@click.option("--depth", type=click.IntRange(min=1), metavar="N",
              help="With --by module: shorten modules to N names: layers.3 of layers.3.conv for 2.")  # fmt: skip
@limit_option("Most rows of a table.")
@click.option("--trace", type=OUTPUT_FILE, metavar="FILE",
              help="Write a trace for ui.perfetto.dev or chrome://tracing.")  # fmt: skip
@click.option("--files", "artifacts", type=FOLDER, metavar="FOLDER",
              help="Write all files kept with the attempt, unchanged.")  # fmt: skip
@json_option("Print every row as JSON instead of tables.")
def command(
    job: str | None,
    run: str | None,
    diff: tuple[str, str] | None,
    by: str | None,
    depth: int | None,
    limit: int,
    trace: Path | None,
    artifacts: Path | None,
) -> None:
    """Show where the time of JOB goes, node by node, in its newest attempt that has a profile.

    Each node is shown with its module of the model and its line of code, if known.

    JOB is suite/case, a whole job id, a suite, or a pattern with * and ?. Figures are medians over the timed
    inferences. 'farm run --profile detailed' makes profiles.
    """
    from farm.report.model.profile_tables import origin_sums

    if diff is not None:
        if run or trace or artifacts or by:
            raise UsageError("--diff takes two runs, and neither --run, --by, --trace nor --files")
        _compare(job or "*", diff, limit)
        return
    if depth and by != "module":
        raise UsageError("--depth is for --by module")
    if job is None:
        raise UsageError("which JOB? Give suite/case; or --diff RUN RUN alone, for all jobs of two runs")
    with opened(readonly=True) as (config, store):
        found = store.history.profiles(job, store.runs.resolve(run) if run else None)
    if (trace or artifacts) and len(found) > 1:
        names = ", ".join(record.job_id for record in found[:4]) + (", ..." if len(found) > 4 else "")
        raise UsageError(f"{job} means {len(found)} jobs, files are written of one: {names}")
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
    if trace:
        _write_trace(config, found[0], trace)
    if artifacts:
        _write_artifacts(config, found[0], artifacts)


def _tables(record: ProfileRecord, sums: Sequence[OriginSum], by: str | None, limit: int) -> list[str]:
    from farm.report.terminal.profile import profile_lines, sum_lines

    if not by:
        return profile_lines(record.operators, limit, width())
    return sum_lines(sums, "source line" if by == "line" else by, limit, width()) or ["  no module or line is known"]


def _shown(record: ProfileRecord, tables: Sequence[str]) -> list[str]:
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


def _write_trace(config: Config, record: ProfileRecord, path: Path) -> None:
    from farm.report.formats.trace import chrome_trace
    from farm.results.profile.etdump import ETDUMP_LIMIT, ETDumpError, read_etdump
    from farm.store.artifacts import open_artifacts

    kept = [artifact for artifact in record.artifacts if artifact.kind == "etdump"]
    if not kept:
        raise UsageError(f"{record.job_id}: no ETDump is kept of it: a run with --profile detailed keeps one")
    with open_artifacts(config).open(kept[0].sha256) as file:
        data = file.read(ETDUMP_LIMIT + 1)
    delegates = {row.delegate.partition("[")[0] for row in record.operators if row.delegate}
    facts = {"job": record.job_id, "run": record.run_id, "device": record.device, "device_kind": record.device_kind}
    try:
        text = msgspec.json.encode(chrome_trace(read_etdump(data), facts, delegates))
    except ETDumpError as error:
        raise UsageError(f"{record.job_id}: its ETDump {error}") from None
    write_file(path, text.decode())
    echo(f"trace: {path}", err=True)


def _write_artifacts(config: Config, record: ProfileRecord, folder: Path) -> None:
    from farm.store.artifacts import open_artifacts
    from farm.store.transfer.files import export

    if not record.artifacts:
        raise UsageError(f"{record.job_id}: no file is kept of its attempt in run {record.run_id}")
    for path in export(open_artifacts(config), record.artifacts, folder):
        echo(f"file: {path}", err=True)
