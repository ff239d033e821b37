"""`farm debug`."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

import click

from farm.builds.program.layers import Gap, Layer, LayerStep
from farm.cli import options as opt
from farm.cli.output import as_called, echo, show, write_file
from farm.report.formats.layers_csv import layer_rows, layers_csv
from farm.report.terminal.layout import WIDTH, columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.replay.debug import DebugOutcome

_FIGURES = 21
_NAME = WIDTH - 2 * _FIGURES


@click.command("debug")
@click.argument("job")
@opt.soc_option("SoC, if JOB has no target and results on several.")
@click.option("--precision", metavar="PRECISION", help="Precision, if JOB has no target and the case has several.")
@click.option("--method", metavar="METHOD",
              help="Method of a case with several; otherwise the method that the case executes.")  # fmt: skip
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Backend option; repeatable.")
@opt.virtual_option("Run on the HTP simulator only: no device, and no column for it.", one=True)
@click.option("--sample", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="Number of the sample among the inputs of the case.")  # fmt: skip
@opt.timeout_option("Time limit of the job on one device.", 600.0)
@click.option("--operators", is_flag=True,
              help="List layers with operators ahead of time and at run time, module and line as well.")  # fmt: skip
@click.option("--csv-file", "csv_file", type=opt.OUTPUT_FILE, help="Write the figures here too.")
@opt.toolchain_option()
@opt.json_option("Print everything as JSON instead of a table.")
def command(job: str, csv_file: Path | None, toolchain: str, *, operators: bool, **options: Any) -> int:
    """Compare the numbers of JOB layer by layer, and name the first layer that goes wrong and the likely cause.

    JOB is a job's id, "suite/case[SM8650-htp-8a8w]", or suite/case with --soc and --precision, which may be left out
    if there are results on one SoC, and the case has one precision. It is compiled so that it writes the output of
    every layer, runs on the HTP simulator and on an attached device, and each layer is compared in steps: FP32 with
    quantized on the CPU (quantization), quantized with the simulator (compiler), simulator with the device (device).

    For a program with several methods one is compiled, by itself: the method that the case executes, or --method.

    \b
    Exit codes: 0 nothing diverges; 1 a layer diverges, or the job fails;
    2 usage, or a program with indistinguishable layers; 4 no device or
    infrastructure; 6 missing tool; 7 no result in the store; 130 interrupted.
    """
    from farm.builds.toolchains.selection import use_toolchain
    from farm.replay.debug import DebugRequest, debug, job_to_debug

    config = opt.configured()
    execution = {name: options.pop(name) for name in ("virtual", "sample", "timeout_s")}
    request = DebugRequest(job=job_to_debug(config, job, **options), command=as_called(), **execution)
    outcome = debug(use_toolchain(config, toolchain), request)
    show(_data(outcome, request.sample), _text(outcome, request.sample, operators=operators))
    if csv_file is not None:
        write_file(csv_file, layers_csv(outcome.layers, outcome.diagnosis))
        echo(f"csv: {csv_file}", err=True)
    return outcome.exit_code


def _text(outcome: DebugOutcome, sample: int, *, operators: bool = False) -> list[str]:
    parts = ", ".join(f"{part} {serial}" for part, serial in outcome.devices.items())
    lines = [f"{outcome.job_id}, sample {sample}", *([parts] if parts else [])]
    if outcome.layers:
        known = [step for step in LayerStep if any(step in row.gaps for row in outcome.layers)]
        lines += ["", *_table(outcome, known), ""]
        lines += [*_operators(outcome.layers, known), ""] if operators else []
    # The files include ExecuTorch's ETDump and ETRecord for its own tools.
    files = [f"files: {shlex.join(['farm', 'show', outcome.job_id])}"] if outcome.files else []
    return [*lines, *_verdict(outcome), *files, f"report: {outcome.report}"]


def _table(outcome: DebugOutcome, known: Sequence[LayerStep]) -> list[str]:
    # Three steps and a name exceed the width of a line: the name gets its own line.
    wide = len(known) * _FIGURES > WIDTH - _NAME
    indent = WIDTH - len(known) * _FIGURES
    heads = "".join(f"{step.value:>{_FIGURES}}" for step in known)
    units = f"{'MSE':>8}{'dB':>6}{'cosine':>7}" * len(known)
    lines = [" " * indent + heads, f"{'  layer':<{indent}}" + units]
    diverging = {(found.layer, step) for step, found in outcome.diagnosis.steps.items()}
    for layer in (row for row in outcome.layers if row.gaps):
        mark = "> " if any((layer.name, step) in diverging for step in known) else "  "
        name = mark + layer.name
        figures = "".join(_figures(layer.gaps.get(step)) for step in known)
        if wide or len(name) >= indent:
            lines += [name, " " * indent + figures]
        else:
            lines.append(f"{name:<{indent}}" + figures)
    return lines


def _operators(layers: Sequence[Layer], known: Sequence[LayerStep]) -> list[str]:
    """Return a row for each layer: operators ahead of time and at run time, their gap, module and source line."""
    steps = [step for step in (LayerStep.DEVICE, LayerStep.COMPILER) if step in known]
    rows = [("#", "ahead of time", "at run time", f"{steps[0]} dB" if steps else "dB", "module", "line")]
    for number, layer in enumerate((one for one in layers if one.tensor.handle is not None), start=1):
        gap = next((layer.gaps[step] for step in steps if step in layer.gaps), None)
        shown = (
            "-" if gap is None or gap.sqnr_db is None else "equal" if gap.sqnr_db == math.inf else f"{gap.sqnr_db:.1f}"
        )
        operators = " ".join(layer.exported) or layer.operator
        rows.append(
            (str(number), operators, " ".join(layer.ran) or "-", shown, layer.module or "-", layer.source or "-")
        )
    return columns(rows, right=(0, 3))


def _figures(gap: Gap | None) -> str:
    if gap is not None and gap.problem:
        return f"{'not comparable':>{_FIGURES}}"
    if gap is None:
        return f"{'-':>8}{'-':>6}{'-':>7}"
    if gap.sqnr_db == math.inf:
        return f"{'0':>8}{'equal':>6}{'1':>7}"
    return f"{_number(gap.mse, '.1e'):>8}{_number(gap.sqnr_db, '.1f'):>6}{_number(gap.cosine, '.4f'):>7}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _verdict(outcome: DebugOutcome) -> list[str]:
    attempt, diagnosis = outcome.attempt, outcome.diagnosis
    if attempt is None:
        return ["interrupted"]
    lines: list[str] = []
    if diagnosis.first is not None:
        first = diagnosis.first
        lines += [f"first divergence: {first.layer} ({first.operator})", f"likely cause: {first.step} ({first.why})"]
        layer = next((one for one in outcome.layers if one.name == first.layer), None)
        if layer is not None and (layer.module or layer.source):
            module = f"module {layer.module}" if layer.module else "the model itself"
            lines.append(f"in {', '.join(filter(None, [module, layer.source]))}")
        for step, found in diagnosis.steps.items():
            if found is not first:
                lines.append(f"{step} goes wrong at {found.layer} as well ({found.why})")
    if attempt.reason and not attempt.reason.startswith("first divergence"):
        lines.append(f"{attempt.verdict}: {attempt.reason}")
    if not lines:
        lines.append("nothing diverges")
    if "device" not in outcome.devices:
        lines.append("device: not requested; only the simulator ran")
    lines += [f"note: {note}" for note in attempt.notes]
    return [part for line in lines for part in wrapped(line)]


def _data(outcome: DebugOutcome, sample: int) -> dict[str, object]:
    attempt = outcome.attempt
    return {
        "schema": 2,
        "job": outcome.job_id,
        "run": outcome.run_id,
        "sample": sample,
        "verdict": attempt.verdict if attempt else "interrupted",
        "reason": attempt.reason if attempt else "",
        "notes": attempt.notes if attempt else (),
        "devices": outcome.devices,
        "first": outcome.diagnosis.first,
        "steps": outcome.diagnosis.steps,
        "layers": layer_rows(outcome.layers, outcome.diagnosis),
        "seconds": outcome.seconds,
        "files": outcome.files,
        "report": str(outcome.report),
    }
