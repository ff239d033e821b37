"""`farm run --compile-only`: its output."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from farm.cli.output import show, width
from farm.cli.progress import make_front
from farm.dispatch.run.compiling import Compilation, CompiledJob, CompileOutcome, compile_only
from farm.report.model import format as fmt
from farm.report.terminal.layout import columns, wrapped

if TYPE_CHECKING:
    from farm.base.config.settings import Config
    from farm.dispatch.request.request import RunRequest


def compile_and_show(config: Config, request: RunRequest) -> int:
    """Compile the jobs, print the result of each, and return the exit code."""
    with make_front() as front:
        compilation = compile_only(config, request, front)
    answer = {"exit_code": compilation.exit_code, "interrupted": compilation.interrupted, "jobs": compilation.jobs}
    show(answer, compiled_lines(compilation, width()))
    return compilation.exit_code


def compiled_lines(compilation: Compilation, columns_at_most: int) -> list[str]:
    """Return the result of each job, the reasons of failures, and the number of jobs by outcome."""
    rows = [["job", "", "took", "size", "partitions", "left to the CPU"], *map(_row, compilation.jobs)]
    counts = Counter(job.outcome for job in compilation.jobs)
    failures = [job for job in compilation.jobs if job.reason]
    lines = columns(rows, right=(2, 3, 4))
    if max(map(len, lines)) > columns_at_most:
        # A narrow terminal needs two lines a job, since neither its name nor its operators on the CPU can be cut.
        figures = columns([row[1:] for row in rows], right=(1, 2, 3), indent="  ")
        lines = [line for row, below in zip(rows, figures, strict=True) for line in (row[0], below)]
    lines = [_cut(line, columns_at_most) for line in lines]
    for job in failures:
        lines += ["", *wrapped(f"{job.job}: {job.reason}", columns_at_most)]
        lines += [f"  output of the compiler: {job.log}"] if job.log else []
    total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in CompileOutcome if counts[outcome])
    return [*lines, "", f"{total}; nothing was run, and nothing is recorded"]


def _cut(line: str, most: int) -> str:
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _row(job: CompiledJob) -> list[str]:
    took = f"{job.seconds:.1f} s" if job.seconds else ""
    if not job.folder:
        return [job.job, job.outcome, took, "", "", ""]
    left = ", ".join(f"{name} x{count}" for name, count in sorted(job.fallback_ops.items()))
    return [job.job, job.outcome, took, fmt.size(job.pte_bytes), str(job.partitions), left or fmt.NOTHING]
