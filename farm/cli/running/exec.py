"""`farm exec` and `farm jobs rerun`: one program, or one stored result, on one device."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from farm.base.errors import UsageError
from farm.cli.options import (
    FILE,
    FOLDER,
    FOR_ATTACHED,
    executions,
    json_option,
    limit_option,
    one_off_options,
    purpose_options,
    refuse_together,
    toolchain_option,
    typed,
)
from farm.cli.output import acted, as_called, echo, notice, opened, print_json, show, width
from farm.cli.running import exec_fit, exec_text
from farm.cli.running.program import NamedProgram, program_options
from farm.devices.execution.raw import MOST_SECONDS
from farm.dispatch.request.profiling import Profile
from farm.report.model import format as fmt
from farm.report.terminal.layout import SIMULATED, columns
from farm.suites.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.base.config.settings import Config
    from farm.replay.exec_plan import PlannedProgram
    from farm.replay.module_program import NamedModule
    from farm.replay.one_off_request import OneOffRequest
    from farm.replay.ready_program import OutputFigures, ReadyOutcome, ReadyProgram, ReadyRequest
    from farm.replay.repro import ReproOutcome
    from farm.results.attempt import Attempt, Comparison, Measurement

_PROFILES = ("auto", "off", "basic", "detailed")
_FOR_TENSORS = {
    "inputs": "--inputs", "input_list": "--input-list", "seed": "--seed", "expect": "--expect", "method": "--method",
    "state": "--state", "iterations": "--iterations", "warm_up": "--warm-up",
}  # fmt: skip
"""Options without a meaning for a program that generates text."""
_ONCE = {"iterations": 1, "warm_up": 0, "reducible": False}


def _state(_context: click.Context, _option: click.Parameter, given: tuple[str, ...]) -> tuple[State, ...]:
    """Return `OUTPUT:INPUT` pairs as numbers; raises BadParameter for another format."""
    found = []
    for text in given:
        output, colon, input_ = text.partition(":")
        if not (colon and output.isascii() and output.isdecimal() and input_.isascii() and input_.isdecimal()):
            raise click.BadParameter(f"{text!r} is not OUTPUT:INPUT, two numbers from 0, as 1:2")
        found.append(State(int(output), int(input_)))
    return tuple(found)


@click.command("exec")
@click.argument("model", metavar="MODEL.pte|NET.py:CLASS")
@click.argument("more", nargs=-1, type=FILE, metavar="")
@click.option("--inputs", multiple=True, type=FILE, metavar="FILE...",
              help="Inputs, .npy or raw, in the order of the program, for one inference after another.")  # fmt: skip
@click.option("--input-list", type=FILE, metavar="FILE",
              help="The same from a file: a line for each inference, with names of files beside it.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Seed of random inputs, used without files.")  # fmt: skip
@click.option("--expect", multiple=True, type=FILE, metavar="FILE",
              help="Expected output, .npy or raw; compared, not judged. Repeatable.")  # fmt: skip
@click.option("--method", metavar="METHOD", default="forward", show_default=True, help="Method of the program to run.")
@click.option("--state", "state", multiple=True, metavar="OUTPUT:INPUT", callback=_state,
              help="Each inference takes this input from this output of the one before; repeatable.")  # fmt: skip
@click.option("--prompt", type=FILE, metavar="FILE",
              help="Generate text after these token ids, .npy or .json; of a static decoder.")  # fmt: skip
@click.option("--new", type=click.IntRange(1, 1_000_000), metavar="N",
              help="With --prompt: most tokens generated after each prompt; 32 by default.")  # fmt: skip
@click.option("--stop", type=click.IntRange(min=0), multiple=True, metavar="ID",
              help="With --prompt: token that ends the generation; repeatable.")  # fmt: skip
@click.option("--seconds", type=click.IntRange(1, MOST_SECONDS), metavar="S",
              help="With --prompt: generate for S seconds, to measure the loss of rate by heat.")  # fmt: skip
@click.option("--output", type=FOLDER, metavar="FOLDER",
              help="Save the outputs here, raw and .npy, and the profile if taken.")  # fmt: skip
@click.option("--soc", "socs", multiple=True, metavar="SOC",
              help="SoC to run on, repeatable; otherwise the SoC that the program was compiled for.")  # fmt: skip
@click.option("--precision", default="", metavar="PRECISION",
              help="With NET.py:CLASS: precision to compile it at; 8a8w by default for htp.")  # fmt: skip
@click.option("--backend", default="", metavar="BACKEND",
              help="Backend; otherwise the backend that the program was compiled for.")  # fmt: skip
@click.option("--device", metavar="NAME", help="Run it on this attached device: name, serial or id.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="Run-time backend option; repeatable.")
@click.option("--profile", type=click.Choice(_PROFILES), default="auto", show_default=True,
              help="Profiling level; detailed shows every node.")  # fmt: skip
@click.option(
    "--heap", is_flag=True, help="Measure the DSP's heap alone; each iteration, 1 by default, has a process of its own."
)
@limit_option("Most rows of a profile.")
@program_options
@one_off_options
@purpose_options
@toolchain_option("Toolchain whose runner and libraries execute it")
@json_option("Print everything as JSON instead.")
def exec_command(
    model: str,
    more: tuple[Path, ...],
    inputs: tuple[Path, ...],
    input_list: Path | None,
    prompt: Path | None,
    new: int | None,
    stop: tuple[int, ...],
    seconds: int | None,
    output: Path | None,
    socs: tuple[str, ...],
    precision: str,
    device: str | None,
    limit: int,
    iterations: int | None,
    warm_up: int | None,
    timeout_s: float,
    name: str,
    purpose: str | None,
    toolchain: str,
    config_file: Path | None,
    *,
    heap: bool,
    by: NamedProgram,
    as_json: bool,
    **program: Any,
) -> int:
    """Run one program on a device, and show its fit, outputs, latency and profile.

    The program is a .pte file, or a torch module with example_inputs in a Python file, which farm compiles. Before a
    device is used, farm shows whether SoC, QNN and skel fit, which operators are left on the CPU, the error against
    FP32, the size and the VTCM.

    Outputs are never judged, with --expect neither: only a failed load or execution fails the job. The run is in the
    store, as a job of the suite exec.

    With --prompt the program generates text: a static decoder as ExecuTorch's Qualcomm examples export it, with the
    methods kv_forward and, if prompts are taken many tokens at a time, prefill_forward. With --program
    ExecuTorch's qnn_llama_runner generates the text; its jobs are of the suite qnn_llama_runner.

    \b
    Exit codes: 0 it ran; 1 it was not compiled, loaded or executed; 2 usage, or
    a program for another SoC or backend; 4 no device or infrastructure;
    6 missing tool; 130 interrupted.
    """
    from farm.base.config.settings import load_config
    from farm.builds.toolchains.select import use_toolchain
    from farm.dispatch.pool.fleet import Choice
    from farm.dispatch.request.choose import require_dsp, require_heap
    from farm.replay.exec_plan import plan_programs
    from farm.replay.generation import run_generation
    from farm.replay.llama_program import job_of
    from farm.replay.module_program import find_module
    from farm.replay.one_off_request import OneOffRequest
    from farm.replay.ready_program import ReadyRequest
    from farm.store.view import Purpose

    module = find_module(model)
    program |= {"model": FILE.convert(model, None, click.get_current_context()) if module is None else Path(model)}
    program |= {"virtual": bool(program["virtual"]), "profile": Profile(program["profile"])}
    if program["virtual"]:
        refuse_together({"--device": device}, FOR_ATTACHED)
    asked = ReadyRequest(inputs=_input_files(inputs, more, input_list), **program)
    asked_for = {
        "virtual": asked.virtual,
        "choice": Choice((device,)) if device else Choice(),
        "timeout_s": timeout_s,
        "profile": asked.profile,
        "heap": heap,
        "command": as_called(),
        "name": name,
        "purpose": Purpose(purpose or Purpose.LOCAL),
        **executions(iterations, warm_up),
    }
    other = by.found()
    if heap:
        refuse_together({"--prompt": prompt}, "--heap is for programs that take tensors: leave {} out")
        refuse_together({"--warm-up": warm_up, **dict.fromkeys(typed(profile="--profile"), True)},
                        "--heap times nothing: leave {} out")  # fmt: skip
    _check_together(module, precision, socs, {"--device": device, "--output": output, "--prompt": prompt}, asked)
    if prompt is not None:
        asked = msgspec.structs.replace(asked, soc="".join(socs))
        foreign = typed(**_FOR_TENSORS) or (["an input"] if asked.inputs else [])
        text = exec_text.plan(asked, prompt, new, stop, foreign)
        if other is not None:
            text.job = job_of(text.job)
        request = OneOffRequest(job=text.job, seconds=seconds, program=other, **{**asked_for, **_ONCE})
        with opened(config_file) as (config, store):
            generated = run_generation(use_toolchain(config, toolchain), store, text, request, output)
        show(exec_text.data(text, generated), exec_text.lines(text, generated, seconds), as_json=as_json)
        return _saved(output, generated.one.exit_code, there=bool(generated.generated))
    refuse_together(
        {"--program": other, "--new": new, "--stop": stop, "--seconds": seconds},
        "{} is for generated text: it needs --prompt",
    )
    config = use_toolchain(load_config(config_file), toolchain)
    if heap and asked.virtual:
        require_dsp(config)
    programs = plan_programs(config, asked, socs, module, precision)
    if heap:
        require_heap(programs[0].ready.job.target.backend)
    if not as_json:
        exec_fit.show_fit(programs)
    exec_fit.require_fit(programs)
    if programs[0].ready.is_random:
        notice(f"NO INPUTS GIVEN: they are random (seed {asked.seed}), so the outputs mean little")
    requests = [OneOffRequest(job=one.ready.job, **asked_for) for one in programs]
    return _run_programs(config, programs, requests, output, limit, as_json=as_json)


def _check_together(
    module: NamedModule | None, precision: str, socs: Sequence[str], for_one: dict[str, Any], asked: ReadyRequest
) -> None:
    """Raise UsageError for options that the program, or several SoCs, exclude; `for_one` are for one SoC."""
    if len(socs) > 1:
        refuse_together(for_one, "{} is for one --soc")
    if module is None:
        refuse_together({"--precision": precision}, "{} is for a module, as net.py:Net: a .pte is compiled already")
    else:
        refuse_together({"--prompt": for_one["--prompt"], "--state": asked.state}, "{} is for a .pte file")


def _run_programs(
    config: Config,
    programs: Sequence[PlannedProgram],
    requests: Sequence[OneOffRequest],
    output: Path | None,
    limit: int,
    *,
    as_json: bool,
) -> int:
    """Run each program, print its result, and return the exit code."""
    from farm.replay.ready_program import run_ready
    from farm.store.store import open_store

    answers: list[dict[str, object]] = []
    exit_codes = []
    with open_store(config.store_url) as store:
        for one, request in zip(programs, requests, strict=True):
            outcome = run_ready(config, store, one.ready, request, output)
            answers.append({**_exec_data(one.ready, outcome), "fit": exec_fit.data(one)})
            exit_codes.append(outcome.one.exit_code)
            if not as_json:
                show({}, _exec_lines(one.ready, outcome, limit), as_json=False)
    if as_json:
        print_json(answers[0] if len(answers) == 1 else {"programs": answers})
    return _saved(output, max(exit_codes), there=bool(outcome.outputs))


def _saved(folder: Path | None, exit_code: int, *, there: bool) -> int:
    if folder is not None and there:
        echo(f"outputs: {folder}", err=True)
    return exit_code


def _input_files(inputs: tuple[Path, ...], more: tuple[Path, ...], input_list: Path | None) -> tuple[Path, ...]:
    if len(inputs) > 1 and more:
        raise UsageError(f"{more[0]} stands alone: give --inputs once, before all files, or before each of them")
    if input_list is None:
        return (*inputs, *more)
    if inputs or more:
        raise UsageError("--input-list names all inputs: leave other files out")
    from farm.replay.tensor_files import read_list

    return tuple(read_list(input_list))


def _exec_lines(ready: ReadyProgram, outcome: ReadyOutcome, limit: int) -> list[str]:
    attempt = outcome.one.attempt
    if attempt is None:
        return ["interrupted"]
    lines = [ready.job.id, f"  on {outcome.one.kind} device {attempt.device}"]
    lines += [f"  {attempt.verdict}: {attempt.reason}"] if attempt.reason else []
    lines += ["", *(
        f"  input {index}   {tensor.dtype.name}{list(tensor.shape)}  {source}"
        for index, (tensor, source) in enumerate(zip(ready.samples[0], ready.sources, strict=True))
    )]  # fmt: skip
    for figures in outcome.outputs:
        lines += _output_lines(figures, several=len(ready.samples) > 1)
    lines += [f"  {one.label}  against the expected output: {_comparison(one)}" for one in attempt.comparisons]
    lines += ["", *filter(None, map(_time_line, attempt.measurements))]
    if attempt.operators:
        from farm.report.terminal.profile import profile_lines

        lines += ["", *profile_lines(attempt.operators, limit, width())]
    return [*lines, "", *(f"note: {note}" for note in attempt.notes), *_end(outcome.one.kind, outcome.one.report)]


def _end(kind: str, report: Path) -> list[str]:
    return [*([SIMULATED] if kind == "virtual" else []), f"report: {report}"]


def _output_lines(one: OutputFigures, *, several: bool) -> list[str]:
    where = f"  output {one.output}  " + (f"inference {one.sample}  " if several else "")
    named = (("min", one.least), ("max", one.greatest), ("mean", one.mean), ("std", one.std))
    figures = [f"{name} {value:.6g}" for name, value in named if value is not None]
    figures += [f"{count} {name}" for name, count in (("NaN", one.nan), ("infinite", one.infinite)) if count]
    values = " ".join(f"{value:.6g}" for value in one.first)
    return [f"{where}{one.dtype}{list(one.shape)}", f"    {'  '.join(figures)}", f"    first: {values}"]


def _comparison(one: Comparison) -> str:
    if one.mismatch is not None:
        return f"{fmt.percent(one.mismatch)} of the elements differ"
    return f"SQNR {fmt.decibel(one.sqnr_db)} dB, cosine {fmt.cosine(one.cosine)}, max abs {fmt.small(one.max_abs)}"


def _time_line(one: Measurement) -> str:
    """Return the median and range of a time or of heap bytes; empty for other measurements."""
    if not one.samples or (one.unit not in ("ns", "cycles") and not one.metric.startswith("dsp_heap_")):
        return ""
    spread = ""
    if len(one.samples) > 1:
        ends = " to ".join(fmt.quantity(value, one.unit) for value in (min(one.samples), max(one.samples)))
        spread = f" (median of {len(one.samples)}; {ends})"
    return f"  {one.metric:<17} {fmt.quantity(statistics.median(one.samples), one.unit)}{spread}"


def _exec_data(ready: ReadyProgram, outcome: ReadyOutcome) -> dict[str, object]:
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


@click.command("rerun")
@click.argument("job")
@click.option("--run", "ref", metavar="RUN", help="Result of this run: latest, latest~1 or an id.")
@click.option("--device", metavar="NAME", default="",
              help="Run it on this device: name, serial or id, or 'same' for that of the past result.")  # fmt: skip
@click.option("--script", type=FOLDER, metavar="FOLDER",
              help="Run nothing: write the bundle to FOLDER, with a shell script that needs only adb.")  # fmt: skip
@program_options
@one_off_options
@toolchain_option("Toolchain whose runner and libraries execute it")
@json_option("Print both results as JSON instead of a table.")
def rerun_command(
    job: str,
    ref: str | None,
    device: str,
    virtual: int | None,
    script: Path | None,
    iterations: int | None,
    warm_up: int | None,
    timeout_s: float,
    toolchain: str,
    config_file: Path | None,
    *,
    by: NamedProgram,
    as_json: bool,
) -> int:
    """Run a past result of JOB again, from its exact bundle, and show both side by side.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one job matches. Without --run it is the
    newest result. The job runs on the same SoC, on a device of the same kind, with --heap and --seconds of its run.
    With --program, ExecuTorch's qnn_llama_runner generates the text, and its logits are judged by the limits of JOB;
    the result belongs to the suite qnn_llama_runner.

    \b
    Exit codes: 0 it passes now; 1 it fails now; 2 usage; 4 no device or
    infrastructure; 7 no result, or its bundle is gone; 130 interrupted.
    """
    from farm.dispatch.request.resume import config_to_run_again
    from farm.replay.repro import repro
    from farm.replay.stored_result import find_stored_result

    if virtual:
        refuse_together({"--device": device}, FOR_ATTACHED)
    if script is not None and (device or as_json):
        raise UsageError("--script runs nothing: leave --device and --json out")
    if acted("rerun", job=job, run=ref or "", virtual=bool(virtual), as_json=as_json, taken=("ref",)):
        return 0
    asked: dict[str, Any] = {"virtual": bool(virtual), "timeout_s": timeout_s, **executions(iterations, warm_up)}
    other = by.found()
    if other is not None:
        asked |= _ONCE
    with opened(config_file, readonly=script is not None, existing=True) as (config, store):
        past = find_stored_result(store, job, ref)
        notice(past.description)
        if past.is_heap and other is None and script is None:
            refuse_together({"--warm-up": warm_up}, f"run {past.run.id} measured the DSP's heap: leave {{}} out")
        selected = config_to_run_again(config, past.run, toolchain)
        if script is not None:
            from farm.replay.repro_script import write_script

            del asked["reducible"]
            asked["named"] = typed(iterations="--iterations", warm_up="--warm-up", timeout_s="--timeout")
            echo("\n".join(write_script(selected, past, script, **asked)))
            return 0
        outcome = repro(selected, store, past, device=device, command=as_called(), program=other, **asked)
    show(_repro_data(outcome), _repro_lines(outcome), as_json=as_json)
    return outcome.now.exit_code


def _repro_lines(outcome: ReproOutcome) -> list[str]:
    from farm.results.analysis.facts import fact_line

    past, now = outcome.stored, outcome.now
    if now.attempt is None:
        return ["interrupted"]
    then = past.attempt
    rows = [
        ("", "then", "now", ""),
        ("run", past.run.id, now.run_id, ""),
        ("device", then.device, now.attempt.device, ""),
        ("", past.kind, now.kind, ""),
        ("verdict", "known issue" if then.known_issue else then.verdict, now.attempt.verdict, ""),
        *(
            (row.name, _figure(row.then, row.unit), _figure(row.now, row.unit), "=" if row.then == row.now else "")
            for row in outcome.rows
        ),
    ]
    other = [f"now as {now.attempt.job_id}"] if now.attempt.job_id != past.view.id else []
    lines = [past.view.id, *other, f"the same bundle, {then.bundle_key[:12]}", "", *columns(rows, right=(1, 2))]
    lines += ["", f"outputs: {outcome.outputs}", *_reason("then", then), *_reason("now", now.attempt)]
    lines += [f"differs: {fact_line(name, *values)}" for name, values in outcome.differences.items()]
    return [*lines, *_end(now.kind, now.report)]


def _reason(when: str, attempt: Attempt) -> list[str]:
    return [f"{when}: {attempt.reason}"] if attempt.reason else []


def _figure(value: float | None, unit: str) -> str:
    return fmt.NOTHING if value is None else fmt.quantity(value, unit)


def _repro_data(outcome: ReproOutcome) -> dict[str, object]:
    past, now = outcome.stored, outcome.now
    return {
        "job": past.view.id,
        "bundle": past.attempt.bundle_key,
        "then": {"run": past.run.id, "attempt_number": past.number, "kind": past.kind, "attempt": past.attempt},
        "now": {"run": now.run_id, "kind": now.kind, "attempt": now.attempt, "exit_code": now.exit_code},
        "rows": outcome.rows,
        "outputs": outcome.outputs,
        "differences": outcome.differences,
        "report": str(now.report),
    }
