"""A `.pte` that a user has and that generates text, with prompts -> the one job that runs it, its bundle, its tokens.

Torch-free.
"""

from __future__ import annotations

import hashlib
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import runs_on_cpu
from farm.base.errors import ConfigError, UsageError
from farm.base.hashes import sha256_of
from farm.builds.bundles.bundle import Bundle, Generation
from farm.builds.bundles.generation import DECODE, generation_of, padded, write_tokens
from farm.builds.bundles.ready import read_ready
from farm.builds.program.pte import Method, read_pte
from farm.devices.execution.raw import RESULT_FILE, TOKENS_FILE, RawResult
from farm.dispatch.request.profiling import require_profilable
from farm.replay.one_off import OneOffOutcome, OneOffRequest, run_one
from farm.replay.ready_program import ReadyRequest, check_runnable, made, ready_case, ready_target
from farm.replay.scripts import require_new
from farm.results.runner_report import Generated, ReportError, read_report
from farm.suites.generate import Generate, require_for_text
from farm.suites.prompts import Tokens, read_tokens
from farm.suites.suite import Job

if TYPE_CHECKING:
    from farm.base.config.settings import Config
    from farm.results.attempt import Attempt
    from farm.store.store import Store

TOKENS = "tokens.json"
"""File of generated tokens by prompt, in the user's folder."""

# A bundle that is made in another way is another one.
_RECIPE = 1
_WHERE = "how a .pte is made"
# Prompts and tokens have 31 bits.
_PAIR = re.compile(r"^([0-9]{1,9}) ([0-9]{1,9})$", re.MULTILINE)


class GeneratingProgram:
    """A program with its prompts, checked against each other; nothing is written yet."""

    def __init__(self, path: Path, method: Method, generation: Generation, prompts: Tokens, job: Job) -> None:
        self.path, self.generation, self.prompts, self.job = path, generation, prompts, job
        self._method = method

    def bundle(self, config: Config) -> Bundle:
        """Return the program's bundle, made if the cache lacks it. Raises InfraError for an unwritable cache."""
        target = self.job.target
        parts = (_RECIPE, self.job.case.kwargs, target.soc, target.backend, self.generation)
        inputs = partial(write_tokens, prompts=self.prompts)
        return made(config, self.path, self._method, self.job, parts, inputs, generation=self.generation)


def plan_generation(asked: ReadyRequest, file: Path, new: int, stop: tuple[int, ...] = ()) -> GeneratingProgram:
    """Return the program of `asked` with the prompts of `file`, `.npy` or `.json` as `prompts_file` of a case.

    The program generates at most `new` tokens after each prompt, up to a token of `stop`. Raises ConfigError for an
    invalid file or unsuitable prompts, IllegalTargetError for a program of another SoC or backend, UsageError,
    UnknownNameError.
    """
    prompts = _prompts(file)
    program = read_pte(asked.model)
    generation = generation_of(program, prompts=prompts, new=new, stop=stop)
    method = program.method(DECODE, _WHERE)
    target = ready_target(asked, program)
    require_profilable(asked.profile, direct=target.direct)
    if not runs_on_cpu(target.backend):
        require_for_text(asked.model.name, target.backend, direct=target.direct)
    check_runnable(asked, method, target)
    case = msgspec.structs.replace(ready_case(asked), method=DECODE)
    read_ready(Job(msgspec.structs.replace(case, pte=str(asked.model.absolute())), target), _WHERE)
    # The hashes replace a module: the measurement belongs to this program with these prompts.
    content = {"model": sha256_of(asked.model), "inputs": hashlib.sha256(padded(prompts).tobytes()).hexdigest()}
    generate = Generate(new=new, stop=stop, context=generation.context)
    case = msgspec.structs.replace(case, kwargs=content, samples=len(prompts), generate=generate)
    return GeneratingProgram(asked.model, method, generation, prompts, Job(case, target))


def _prompts(path: Path) -> Tokens:
    try:
        prompts = read_tokens(path)
    except (OSError, ValueError) as error:
        raise ConfigError(path, "", getattr(error, "strerror", None) or str(error)) from None
    if not prompts:
        raise ConfigError(path, "", "has no prompt")
    if () in prompts:
        raise ConfigError(path, "", f"prompt {prompts.index(())} has no token")
    return prompts


class GenerationOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    one: OneOffOutcome
    generated: tuple[Generated, ...]
    """Entries by prompt and round; as far as it came, for a run that did not finish."""


def run_generation(
    config: Config, store: Store, program: GeneratingProgram, request: OneOffRequest, folder: Path | None
) -> GenerationOutcome:
    """Run a program that generates, record it, leave its tokens in `folder`, and return how it ended.

    Raises as `run_one`.
    """
    found: list[Generated] = []
    if folder is not None:
        require_new(folder, make=True)

    def look(raw: RawResult, attempt: Attempt) -> Attempt:
        found[:] = _generated(raw, program.generation)
        if folder is not None and found:
            _save(folder, found[: len(program.prompts)])
        return attempt

    one = run_one(config, store, request, lambda _tools, _supervisor: program.bundle(config), look)
    return GenerationOutcome(one, tuple(found))


def _generated(raw: RawResult, generation: Generation) -> tuple[Generated, ...]:
    try:
        report = read_report(raw.folder / RESULT_FILE)
    except (ReportError, OSError):
        # The attempt carries the problem of the report.
        report = None
    if report is not None and report.generated:
        return report.generated
    try:
        return before_the_end((raw.folder / TOKENS_FILE).read_text("ascii", "replace"), generation)
    except OSError:
        return ()


def before_the_end(text: str, generation: Generation) -> tuple[Generated, ...]:
    """Return the tokens of a runner without a report, from its TOKENS_FILE: a line `prompt token` for each.

    With a time to fill, only the first round counts: tokens beyond a prompt's number are left out. Pure.
    """
    tokens: dict[int, list[int]] = {}
    for prompt, token in _PAIR.findall(text):
        if (line := int(prompt)) < len(generation.prompt_tokens):
            tokens.setdefault(line, []).append(int(token))
    return tuple(
        Generated(line, generation.prompt_tokens[line], tuple(_first_round(tokens[line], line, generation)))
        for line in sorted(tokens)
    )


def _first_round(tokens: list[int], line: int, generation: Generation) -> list[int]:
    most = min(generation.new, generation.context - generation.prompt_tokens[line] + 1)
    end = next((index + 1 for index, token in enumerate(tokens) if token in generation.stop), most)
    return tokens[: min(end, most)]


def is_cut_short(entry: Generated, generation: Generation) -> bool:
    """Return whether nothing that was asked for ended `entry`: the runner itself ended."""
    return entry.ended == "new" and len(entry.tokens) < generation.new and not set(entry.tokens) & set(generation.stop)


def _save(folder: Path, generated: list[Generated]) -> None:
    tokens = {one.line: one.tokens for one in generated}
    lists = [tokens.get(line, ()) for line in range(max(tokens) + 1)]
    try:
        (folder / TOKENS).write_bytes(msgspec.json.encode(lists))
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None
