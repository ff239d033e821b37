"""`farm exec`."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option, one_off_options
from farm.cli.output import as_called, echo, print_json
from farm.config.settings import load_config
from farm.errors import UsageError
from farm.report.model import format as fmt

if TYPE_CHECKING:
    from farm.replay.ready_program import ReadyProgram
    from farm.replay.ready_run import OutputFigures, ReadyOutcome
    from farm.results.attempt import Attempt

_PROFILES = ("auto", "off", "basic", "detailed")
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("exec")
@click.argument("model", metavar="MODEL.pte", type=_FILE)
@click.argument("more", nargs=-1, type=_FILE, metavar="")
@click.option("--inputs", multiple=True, type=_FILE, metavar="FILE...",
              help="Inputs, .npy or raw, in the order of the program, for one inference after another.")  # fmt: skip
@click.option("--input-list", type=_FILE, metavar="FILE",
              help="The same from a file: a line for each inference, with names of files beside it.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="For random inputs, which it takes where no files are named.")  # fmt: skip
@click.option("--expect", multiple=True, type=_FILE, metavar="FILE",
              help="What an output should be, .npy or raw; compared, not judged. Repeatable.")  # fmt: skip
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
              help="Save the outputs here, raw and .npy; and the profile, if one was asked for.")  # fmt: skip
@click.option("--soc", default="", help="SoC to run on; what the program was compiled for may be left out.")
@click.option("--backend", default="", help="Backend; what the program was compiled for may be left out.")
@click.option("--device", help="Run it on this attached device: name, serial or id.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Run-time backend option; repeatable.")
@click.option("--profile", type=click.Choice(_PROFILES), default="auto", show_default=True,
              help="How closely to look inside; detailed shows every node.")  # fmt: skip
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Most rows of a profile.")
@one_off_options
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead.")
@config_option
def command(
    model: Path,
    more: tuple[Path, ...],
    inputs: tuple[Path, ...],
    input_list: Path | None,
    seed: int,
    expect: tuple[Path, ...],
    output: Path | None,
    soc: str,
    backend: str,
    virtual: int | None,
    device: str | None,
    options: tuple[str, ...],
    profile: str,
    limit: int,
    iterations: int,
    warm_up: int,
    timeout_s: float,
    config_file: Path | None,
    *,
    as_json: bool,
) -> int:
    """Run a ready .pte file on a device, and show its outputs, latency and profile.

    Nothing says what its outputs should be, so nothing is judged: it ran, or it did not. The run is in the store, as a
    job of the suite exec.

    \b
    Exit codes: 0 it ran; 1 it could not be loaded or executed; 2 usage, or
    a program for something else; 4 no device or infrastructure;
    130 interrupted.
    """
    from farm.pool.fleet import Choice
    from farm.replay.one_off import OneOffRequest
    from farm.replay.ready_program import ReadyRequest, plan_ready
    from farm.replay.ready_run import run_ready
    from farm.request.profiling import Profile
    from farm.store.store import open_store

    if virtual and device:
        raise UsageError("--device is for attached devices: leave it, or --virtual, out")
    config = load_config(config_file)
    ready = plan_ready(
        ReadyRequest(
            model=model,
            inputs=_input_files(inputs, more, input_list),
            expect=expect,
            seed=seed,
            soc=soc,
            backend=backend,
            options=options,
            virtual=bool(virtual),
            profile=Profile(profile),
        )
    )
    if ready.is_random:
        _say(f"NO INPUTS WERE NAMED: they are random (seed {seed}), and so the outputs mean little")
    request = OneOffRequest(
        job=ready.job,
        virtual=bool(virtual),
        otherwise="--virtual 1",
        choice=Choice((device,)) if device else Choice(),
        iterations=iterations,
        warm_up=warm_up,
        timeout_s=timeout_s,
        profile=Profile(profile),
        command=as_called(),
    )
    with open_store(config.store_url) as store:
        outcome = run_ready(config, store, ready, request, output, _say)
    if as_json:
        print_json(_data(ready, outcome))
    else:
        echo("\n".join(_text(ready, outcome, limit)))
    if output is not None and outcome.outputs:
        echo(f"outputs: {output}", err=True)
    return outcome.one.exit_code


def _input_files(inputs: tuple[Path, ...], more: tuple[Path, ...], input_list: Path | None) -> tuple[Path, ...]:
    if len(inputs) > 1 and more:
        raise UsageError(f"{more[0]} stands alone: give --inputs once, before all files, or before each of them")
    if input_list is None:
        return (*inputs, *more)
    if inputs or more:
        raise UsageError("--input-list names all inputs: leave other files out")
    from farm.replay.tensor_files import read_list

    return tuple(read_list(input_list))


def _say(text: str) -> None:
    echo(f"farm: {text}", err=True)


def _text(ready: ReadyProgram, outcome: ReadyOutcome, limit: int) -> list[str]:
    attempt = outcome.one.attempt
    if attempt is None:
        return ["interrupted"]
    lines = [ready.job.id, f"  on {outcome.one.kind} device {attempt.device}"]
    lines += [f"  {attempt.verdict}: {attempt.reason}"] if attempt.reason else []
    lines += ["", *(_input_line(ready, index) for index in range(len(ready.method.inputs)))]
    for figures in outcome.outputs:
        lines += _output_lines(figures, several=len(ready.samples) > 1)
    lines += _expected_lines(attempt)
    lines += ["", *_time_lines(attempt)]
    if attempt.operators:
        from farm.report.terminal.profile import profile_lines

        lines += ["", *profile_lines(attempt.operators, limit, shutil.get_terminal_size().columns)]
    lines += ["", *(f"note: {note}" for note in attempt.notes)]
    if outcome.one.kind == "virtual":
        lines.append("VIRTUAL: times and cycles are of a simulator, not comparable with hardware")
    return [*lines, f"report: {outcome.one.report}"]


def _input_line(ready: ReadyProgram, index: int) -> str:
    tensor = ready.samples[0][index]
    return f"  input {index}   {tensor.dtype.name}{list(tensor.shape)}  {ready.sources[index]}"


def _output_lines(one: OutputFigures, *, several: bool) -> list[str]:
    where = f"  output {one.output}  " + (f"inference {one.sample}  " if several else "")
    named = (("min", one.least), ("max", one.greatest), ("mean", one.mean), ("std", one.std))
    figures = [f"{name} {value:.6g}" for name, value in named if value is not None]
    figures += [f"{count} {name}" for name, count in (("NaN", one.nan), ("infinite", one.infinite)) if count]
    values = " ".join(f"{value:.6g}" for value in one.first)
    return [f"{where}{one.dtype}{list(one.shape)}", f"    {'  '.join(figures)}", f"    first: {values}"]


def _expected_lines(attempt: Attempt) -> list[str]:
    lines = []
    for one in attempt.comparisons:
        if one.mismatch is not None:
            figures = f"{fmt.percent(one.mismatch)} of the elements differ"
        else:
            figures = (
                f"SQNR {fmt.decibel(one.sqnr_db)} dB, cosine {fmt.cosine(one.cosine)}, max abs {fmt.small(one.max_abs)}"
            )
        lines.append(f"  output {one.output}  against what was expected: {figures}")
    return lines


def _time_lines(attempt: Attempt) -> list[str]:
    lines = []
    for one in attempt.measurements:
        if one.unit not in ("ns", "cycles") or not one.samples:
            continue
        spread = ""
        if len(one.samples) > 1:
            spread = f" (median of {len(one.samples)}; {fmt.quantity(min(one.samples), one.unit)} to "
            spread += f"{fmt.quantity(max(one.samples), one.unit)})"
        lines.append(f"  {one.metric:<14} {fmt.quantity(statistics.median(one.samples), one.unit)}{spread}")
    return lines


def _data(ready: ReadyProgram, outcome: ReadyOutcome) -> dict[str, object]:
    one = outcome.one
    return {
        "job": ready.job.id,
        "run": one.run_id,
        "exit_code": one.exit_code,
        "device_kind": one.kind,
        "inputs": [
            {"dtype": tensor.dtype.name, "shape": tensor.shape, "source": source}
            for tensor, source in zip(ready.samples[0], ready.sources, strict=True)
        ],
        "random_inputs": ready.is_random,
        "inferences": len(ready.samples),
        "outputs": outcome.outputs,
        "attempt": one.attempt,
        "report": str(one.report),
    }
