"""`farm exec` and `farm jobs rerun`: one program or one stored result on one device."""

from __future__ import annotations

import re
import statistics
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click
import msgspec

from farm.base.errors import IllegalTargetError, UsageError
from farm.base.text import one_line
from farm.cli import options as opt
from farm.cli.output import acted, as_called, echo, notice, opened, print_json, show, width
from farm.devices.execution.raw import MOST_SECONDS
from farm.report.model import format as fmt
from farm.report.terminal.layout import SIMULATED, columns
from farm.suites.suite import Job, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.builds.bundles.bundle import Generation
    from farm.replay.exec_plan import GeneratingProgram, NamedModule, PlannedProgram
    from farm.replay.one_off import LlamaProgram, OneOffOutcome
    from farm.replay.ready_program import OutputFigures, ReadyProgram, ReadyRequest
    from farm.replay.repro import ReproOutcome
    from farm.results.attempt import Attempt, Comparison, Measurement
    from farm.results.runner_report import Generated


# `farm exec --prompt`: a program that generates text, on one device.


_ENDED = {
    "stop": ", the last of them a stop token",
    "context": ", then the context was full",
    "seconds": ", then the time was over",
    "early": ", then it ended early",
}
_LINE = 78
_WHOLE = 512
"""Tokens of one prompt that are printed."""


def text_lines(
    program: GeneratingProgram, one: OneOffOutcome, generated: Sequence[Generated], seconds: int | None
) -> list[str]:
    """Return the generated tokens and their times, for a terminal."""
    from farm.report.model.sections import generation_of
    from farm.report.terminal.run import generation_lines

    generation, attempt = program.generation, one.attempt
    if attempt is None:
        return ["interrupted"]
    by = f"prompts by {generation.prefill} at a time" if generation.prefill else "prompts token by token"
    found = _head(program.job, one.kind, attempt)
    found += [f"  {generation.mode}: context {generation.context}, vocabulary {generation.vocabulary}, {by}"]
    host_time = "host time" if one.kind == "virtual" else ""
    # Later rounds repeat the prompts of the first round.
    for entry in generated[: len(program.prompts)]:
        found += ["", *_prompt_lines(entry, generation)]
    if rounds := generated[len(program.prompts) :]:
        found += ["", f"  then {fmt.plural(len(rounds), 'more prompt')}, the same in turns"]
    facts = {} if seconds is None else {"seconds": str(seconds)}
    if figures := generation_of(attempt, facts):
        found += ["", *(f"  {line}" for line in generation_lines(figures, host_time))]
    return [*found, "", *(f"note: {note}" for note in attempt.notes), *_end(one)]


def _ended(entry: Generated, generation: Generation) -> str:
    from farm.replay.exec_plan import is_cut_short

    return "early" if is_cut_short(entry, generation) else entry.ended


def _prompt_lines(entry: Generated, generation: Generation) -> Iterator[str]:
    count = fmt.plural(len(entry.tokens), "token")
    taken = fmt.plural(entry.prompt_tokens, "token")
    yield f"  prompt {entry.line} ({taken}): {count}{_ENDED.get(_ended(entry, generation), '')}"
    first, rate = _milliseconds(entry.first_token_ns), _rate(entry)
    if first is not None:
        after = f", {fmt.rate(rate)} tokens/s after it" if rate is not None else ""
        yield f"    first token after {fmt.milliseconds(first)} ms{after}"
    tokens = " ".join(map(str, entry.tokens[:_WHOLE]))
    yield from textwrap.wrap(tokens, _LINE, initial_indent=" " * 4, subsequent_indent=" " * 4)
    if len(entry.tokens) > _WHOLE:
        yield f"    ... and {len(entry.tokens) - _WHOLE} more: --json or --output has all"


def text_data(program: GeneratingProgram, one: OneOffOutcome, generated: Sequence[Generated]) -> dict[str, object]:
    """Return the generated tokens and the time of every step, for JSON."""
    generation = program.generation
    return {
        **run_data(program.job, one),
        "mode": generation.mode,
        "context": generation.context,
        "vocabulary": generation.vocabulary,
        "prompts": [list(prompt) for prompt in program.prompts],
        "generated": [
            {
                "prompt": entry.line,
                "prompt_tokens": entry.prompt_tokens,
                "tokens": entry.tokens,
                "ended": _ended(entry, generation),
                "first_token_ms": _milliseconds(entry.first_token_ns),
                "total_ms": _milliseconds(entry.total_ns),
                "prefill_tokens_per_second": _prefill_rate(entry),
                "decode_tokens_per_second": _rate(entry),
                "prefill_ns": entry.prefill_ns,
                "steps_ns": entry.steps_ns,
            }
            for entry in generated
        ],
    }


def run_data(job: Job, one: OneOffOutcome) -> dict[str, object]:
    """Return a run of one job for JSON."""
    return {
        "job": job.id,
        "run": one.run_id,
        "exit_code": one.exit_code,
        "device_kind": one.kind,
        "attempt": one.attempt,
        "report": str(one.report),
    }


def _milliseconds(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e6


def _prefill_rate(entry: Generated) -> float | None:
    return None if entry.first_token_ns is None else entry.prompt_tokens * 1e9 / entry.first_token_ns


def _rate(entry: Generated) -> float | None:
    """Return tokens per second after the first token; the runner's work between calls counts as well."""
    if entry.first_token_ns is None or entry.total_ns is None or len(entry.tokens) < 2:
        return None
    took = entry.total_ns - entry.first_token_ns
    return (len(entry.tokens) - 1) * 1e9 / took if took > 0 else None


# `farm exec` and `farm jobs rerun`: one program, or one stored result, on one device.


_PROFILES = ("auto", "off", "basic", "detailed")
_FOR_TENSORS = ("inputs", "input_list", "seed", "expect", "method", "state", "iterations", "warm_up")
"""Parameters without a meaning for a program that generates text."""
_FOR_OURS = ("iterations", "warm_up", "stop", "seconds", "options", "profile")
"""Parameters that `--program` excludes."""
_NEW = 32
"""Default of --new, as --help shows it."""
_ONCE = {"iterations": 1, "warm_up": 0, "reducible": False}


def _state(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[State, ...]:
    """Return `OUTPUT:INPUT` pairs as numbers; raises BadParameter for another format."""
    found = []
    for text in values:
        match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is not OUTPUT:INPUT, two numbers from 0, as 1:2")
        found.append(State(int(match[1]), int(match[2])))
    return tuple(found)


_program_options = opt.together(
    click.option("--program", type=opt.FILE, metavar="FILE",
                 help="Generate with ExecuTorch's own qnn_llama_runner, which you have built."),
    click.option("--tokenizer", type=opt.FILE, metavar="FILE",
                 help="With --program: the tokenizer, which it always loads."),
    click.option("--library", "libraries", type=opt.FILE, multiple=True, metavar="FILE",
                 help="With --program: a library that it needs; repeatable."),
    click.option("--program-flag", "flags", multiple=True, metavar="NAME=VALUE",
                 help="With --program: another flag, as decoder_model_version=qwen3; repeatable."),
)  # fmt: skip


def _take_program(options: dict[str, Any]) -> LlamaProgram | None:
    """Take the values of `_program_options` out of `options`; return the program, None for farm's own runner.

    Raises UsageError for options that exclude others.
    """
    named = {name: options.pop(name) for name in ("program", "tokenizer", "libraries", "flags")}
    if named["program"] is None:
        opt.refuse_given("{} is for --program", "tokenizer", "libraries", "flags")
        return None
    if named["tokenizer"] is None:
        raise UsageError("--program always loads a tokenizer: name it, with --tokenizer")
    opt.refuse_given("{} is for farm's own runner: leave it, or --program, out", *_FOR_OURS)
    from farm.replay.one_off import LlamaProgram

    return LlamaProgram(**named)


@click.command("exec")
@click.argument("model", metavar="MODEL.pte|NET.py:CLASS")
@click.argument("more", nargs=-1, type=opt.FILE, metavar="")
@click.option("--inputs", multiple=True, type=opt.FILE, metavar="FILE...",
              help="Inputs, .npy or raw, in the order of the program, for one inference after another.")  # fmt: skip
@click.option("--input-list", type=opt.FILE, metavar="FILE",
              help="The same from a file: a line for each inference, with names of files beside it.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Seed of random inputs, used without files.")  # fmt: skip
@click.option("--expect", multiple=True, type=opt.FILE, metavar="FILE",
              help="Expected output, .npy or raw; compared, not judged. Repeatable.")  # fmt: skip
@click.option("--method", metavar="METHOD", default="forward", show_default=True, help="Method of the program to run.")
@click.option("--state", "state", multiple=True, metavar="OUTPUT:INPUT", callback=_state,
              help="Each inference takes this input from this output of the one before; repeatable.")  # fmt: skip
@click.option("--prompt", type=opt.FILE, metavar="FILE",
              help="Generate text after these token ids, .npy or .json; of a static decoder.")  # fmt: skip
@click.option("--new", type=click.IntRange(1, 1_000_000), metavar="N",
              help="With --prompt: most tokens generated after each prompt; 32 by default.")  # fmt: skip
@click.option("--stop", type=click.IntRange(min=0), multiple=True, metavar="ID",
              help="With --prompt: token that ends the generation; repeatable.")  # fmt: skip
@click.option("--seconds", type=click.IntRange(1, MOST_SECONDS), metavar="S",
              help="With --prompt: generate for S seconds, to measure the loss of rate by heat.")  # fmt: skip
@click.option("--output", type=opt.FOLDER, metavar="FOLDER",
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
@click.option("--heap", is_flag=True,
              help="Measure the DSP's heap alone; each iteration, 1 by default, has a process of its own.")  # fmt: skip
@opt.limit_option("Most rows of a profile.")
@_program_options
@opt.one_off_options
@opt.purpose_options
@opt.toolchain_option("Toolchain whose runner and libraries execute it")
@opt.json_option("Print everything as JSON instead.")
def exec_command(model: str, more: tuple[Path, ...], **options: Any) -> int:
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
    from farm.dispatch.pool.fleet import Choice
    from farm.dispatch.request.profiling import Profile
    from farm.replay.exec_plan import find_module
    from farm.replay.ready_program import ReadyRequest
    from farm.store.records import Purpose

    module, other, asked = find_module(model), _take_program(options), SimpleNamespace(**options)
    opt.refuse_attached(virtual=asked.virtual)
    file: Any = Path(model) if module else opt.FILE.convert(model, None, click.get_current_context())
    program = ReadyRequest(
        model=file,
        inputs=_input_files(asked.inputs, more, asked.input_list),
        virtual=bool(asked.virtual),
        profile=Profile(asked.profile),
        **{name: options[name] for name in ("expect", "seed", "method", "state", "backend", "options")},
    )
    request = {
        "virtual": program.virtual,
        "choice": Choice((asked.device,)) if asked.device else Choice(),
        "timeout_s": asked.timeout_s,
        "profile": program.profile,
        "heap": asked.heap,
        "command": as_called(),
        "name": asked.name,
        "purpose": Purpose(asked.purpose or Purpose.LOCAL),
        **opt.executions(asked.iterations, asked.warm_up),
    }
    if asked.heap:
        opt.refuse_given("--heap is for programs that take tensors: leave {} out", "prompt")
        opt.refuse_given("--heap times nothing: leave {} out", "warm_up", "profile")
    if len(asked.socs) > 1:
        opt.refuse_given("{} is for one --soc", "device", "output", "prompt")
    if module is None:
        opt.refuse_given("{} is for a module, as net.py:Net: a .pte is compiled already", "precision")
    else:
        opt.refuse_given("{} is for a .pte file", "prompt", "state")
    if asked.prompt is not None:
        return _generate(asked, program, other, request)
    opt.refuse_given("{} is for generated text: it needs --prompt", "program", "new", "stop", "seconds")
    return _execute(asked, program, module, request)


def _generate(
    asked: SimpleNamespace, program: ReadyRequest, other: LlamaProgram | None, request: dict[str, Any]
) -> int:
    """Generate text with a program, print it, and return the exit code."""
    from farm.builds.toolchains.selection import use_toolchain
    from farm.replay.exec_plan import plan_generation, run_generation
    from farm.replay.one_off import OneOffRequest, job_of

    foreign = opt.given(*_FOR_TENSORS) or (["an input"] if program.inputs else [])
    if foreign:
        raise UsageError(f"{foreign[0]} is for a program of tensors: leave it, or --prompt, out")
    if program.profile in ("basic", "detailed"):
        raise UsageError("no profile is taken while text is generated: leave --profile out")
    program = msgspec.structs.replace(program, soc="".join(asked.socs))
    text = plan_generation(program, asked.prompt, asked.new or _NEW, asked.stop)
    if other is not None:
        text.job = job_of(text.job)
    once = OneOffRequest(job=text.job, seconds=asked.seconds, program=other, **{**request, **_ONCE})
    with opened() as (config, store):
        one, generated = run_generation(use_toolchain(config, asked.toolchain), store, text, once, asked.output)
    show(text_data(text, one, generated), text_lines(text, one, generated, asked.seconds))
    _show_folder(asked.output if generated else None)
    return one.exit_code


def _execute(asked: SimpleNamespace, program: ReadyRequest, module: NamedModule | None, request: dict[str, Any]) -> int:
    """Run a program for each SoC, print its fit and its result, and return the exit code."""
    from farm.builds.toolchains.selection import use_toolchain
    from farm.dispatch.request.choose import require_dsp, require_heap
    from farm.replay.exec_plan import plan_programs
    from farm.replay.one_off import OneOffRequest
    from farm.replay.ready_program import run_ready
    from farm.store.store import open_store

    config = use_toolchain(opt.configured(), asked.toolchain)
    if asked.heap and program.virtual:
        require_dsp(config)
    programs = plan_programs(config, program, asked.socs, module, asked.precision)
    if asked.heap:
        require_heap(programs[0][0].job.target.backend)
    _show_fit(programs)
    if programs[0][0].is_random:
        notice(f"NO INPUTS GIVEN: they are random (seed {program.seed}), so the outputs mean little")
    answers: list[dict[str, object]] = []
    exit_codes = []
    with open_store(config.store_url) as store:
        for ready, fit in programs:
            one, outputs = run_ready(config, store, ready, OneOffRequest(job=ready.job, **request), asked.output)
            answers.append({**_exec_data(ready, one), "outputs": outputs, "fit": fit})
            exit_codes.append(one.exit_code)
            if not opt.is_json():
                show({}, _exec_lines(ready, one, outputs, asked.limit))
    if opt.is_json():
        print_json(answers[0] if len(answers) == 1 else {"programs": answers})
    _show_folder(asked.output if outputs else None)
    return max(exit_codes)


def _show_fit(programs: Sequence[PlannedProgram]) -> None:
    """Print the fit of each program. Raises IllegalTargetError for a program that no device can run."""
    from farm.replay.properties import Level

    if not opt.is_json():
        for ready, fit in programs:
            rows = [[str(line.level), str(line.name), one_line(line.line)] for line in fit]
            echo("\n".join([ready.job.id, *columns(rows, indent="  "), ""]))
    for ready, fit in programs:
        for line in fit:
            if line.level is Level.ERROR:
                raise IllegalTargetError(f"{ready.path.name}: {line.name}: {line.line}")


def _show_folder(folder: Path | None) -> None:
    if folder is not None:
        echo(f"outputs: {folder}", err=True)


def _input_files(inputs: tuple[Path, ...], more: tuple[Path, ...], input_list: Path | None) -> tuple[Path, ...]:
    if len(inputs) > 1 and more:
        raise UsageError(f"{more[0]} stands alone: give --inputs once, before all files, or before each of them")
    if input_list is None:
        return (*inputs, *more)
    if inputs or more:
        raise UsageError("--input-list names all inputs: leave other files out")
    from farm.replay.ready_program import read_list

    return tuple(read_list(input_list))


def _exec_lines(ready: ReadyProgram, one: OneOffOutcome, outputs: Sequence[OutputFigures], limit: int) -> list[str]:
    attempt = one.attempt
    if attempt is None:
        return ["interrupted"]
    lines = [*_head(ready.job, one.kind, attempt), "", *(
        f"  input {index}   {tensor.dtype.name}{list(tensor.shape)}  {source}"
        for index, (tensor, source) in enumerate(zip(ready.samples[0], ready.sources, strict=True))
    )]  # fmt: skip
    for figures in outputs:
        lines += _output_lines(figures, several=len(ready.samples) > 1)
    lines += [f"  {row.label}  against the expected output: {_comparison(row)}" for row in attempt.comparisons]
    lines += ["", *filter(None, map(_time_line, attempt.measurements))]
    if attempt.operators:
        from farm.report.terminal.profile import profile_lines

        lines += ["", *profile_lines(attempt.operators, limit, width())]
    return [*lines, "", *(f"note: {note}" for note in attempt.notes), *_end(one)]


def _head(job: Job, kind: str, attempt: Attempt) -> list[str]:
    reason = [f"  {attempt.verdict}: {attempt.reason}"] if attempt.reason else []
    return [job.id, f"  on {kind} device {attempt.device}", *reason]


def _end(one: OneOffOutcome) -> list[str]:
    return [*([SIMULATED] if one.kind == "virtual" else []), f"report: {one.report}"]


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


def _exec_data(ready: ReadyProgram, one: OneOffOutcome) -> dict[str, object]:
    return {
        **run_data(ready.job, one),
        "inputs": [
            {"dtype": tensor.dtype.name, "shape": tensor.shape, "source": source}
            for tensor, source in zip(ready.samples[0], ready.sources, strict=True)
        ],
        "random_inputs": ready.is_random,
        "inferences": len(ready.samples),
    }


@click.command("rerun")
@click.argument("job")
@click.option("--run", "ref", metavar="RUN", help="Result of this run: latest, latest~1 or an id.")
@click.option("--device", metavar="NAME", default="",
              help="Run it on this device: name, serial, id, or 'same' for the device of the past result.")  # fmt: skip
@_program_options
@opt.one_off_options
@opt.toolchain_option("Toolchain whose runner and libraries execute it")
@opt.json_option("Print both results as JSON instead of a table.")
def rerun_command(job: str, ref: str | None, device: str, **options: Any) -> int:
    """Run a past result of JOB again, from its exact bundle, and show both side by side.

    JOB is suite/case, a whole job id, or a pattern with * and ? that only one job matches. Without --run it is the
    newest result. The job runs on the same SoC, on a device of the same kind, with --heap and --seconds of its run.
    With --program, ExecuTorch's qnn_llama_runner generates the text, and its logits are judged by the limits of JOB;
    the result belongs to the suite qnn_llama_runner.

    \b
    Exit codes: 0 it passes now; 1 it fails now; 2 usage; 4 no device or
    infrastructure; 7 no result, or its bundle is gone; 130 interrupted.
    """
    from farm.dispatch.request.records import config_to_run_again
    from farm.replay.repro import repro
    from farm.replay.stored_result import find_stored_result

    other, virtual, toolchain = _take_program(options), bool(options["virtual"]), options["toolchain"]
    opt.refuse_attached(virtual=virtual)
    if acted("rerun", job=job, run=ref or "", virtual=virtual, taken=("ref",)):
        return 0
    asked = opt.executions(options["iterations"], options["warm_up"])
    asked |= {"virtual": virtual, "timeout_s": options["timeout_s"]}
    if other is not None:
        asked |= _ONCE
    with opened(existing=True) as (config, store):
        past = find_stored_result(store, job, ref)
        notice(past.description)
        if past.is_heap and other is None:
            opt.refuse_given(f"run {past.run.id} measured the DSP's heap: leave {{}} out", "warm_up")
        selected = config_to_run_again(config, past.run, toolchain)
        outcome = repro(selected, store, past, device=device, command=as_called(), program=other, **asked)
    show(_repro_data(outcome), _repro_lines(outcome))
    return outcome.now.exit_code


def _repro_lines(outcome: ReproOutcome) -> list[str]:
    from farm.results.analysis.history import fact_line

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
    lines += ["", f"outputs: {outcome.outputs}"]
    lines += [f"{when}: {one.reason}" for when, one in (("then", then), ("now", now.attempt)) if one.reason]
    lines += [f"differs: {fact_line(name, *values)}" for name, values in outcome.differences.items()]
    return [*lines, *_end(now)]


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
