"""Options of `farm exec` and `farm jobs rerun` for a `qnn_llama_runner` of the user in place of farm's runner."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from farm.base.errors import UsageError
from farm.cli.options import FILE, refuse_together, typed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from farm.replay.llama_program import LlamaProgram

_FOR_OURS = {
    "iterations": "--iterations", "warm_up": "--warm-up", "stop": "--stop", "seconds": "--seconds",
    "options": "--option", "profile": "--profile", "script": "--script",
}  # fmt: skip


class NamedProgram(NamedTuple):
    """Values of the options."""

    program: Path | None
    tokenizer: Path | None
    libraries: tuple[Path, ...]
    flags: tuple[str, ...]

    def found(self) -> LlamaProgram | None:
        """Return the program to run; None for farm's own runner. Raises UsageError for options that exclude others."""
        if self.program is None:
            rest = {"--tokenizer": self.tokenizer, "--library": self.libraries, "--program-flag": self.flags}
            refuse_together(rest, "{} is for --program")
            return None
        if self.tokenizer is None:
            raise UsageError("--program always loads a tokenizer: name it, with --tokenizer")
        if ours := typed(**_FOR_OURS):
            raise UsageError(f"{ours[0]} is for farm's own runner: leave it, or --program, out")
        from farm.replay.llama_program import LlamaProgram

        return LlamaProgram(program=self.program, tokenizer=self.tokenizer, libraries=self.libraries, flags=self.flags)


def program_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command receives them as `by: NamedProgram`."""

    @functools.wraps(command)
    def run(
        *arguments: Any,
        by_program: Path | None,
        by_tokenizer: Path | None,
        by_library: tuple[Path, ...],
        by_flag: tuple[str, ...],
        **given: Any,
    ) -> Any:
        return command(*arguments, by=NamedProgram(by_program, by_tokenizer, by_library, by_flag), **given)

    options = (
        click.option("--program", "by_program", type=FILE, metavar="FILE",
                     help="Generate with ExecuTorch's own qnn_llama_runner, which you have built."),
        click.option("--tokenizer", "by_tokenizer", type=FILE, metavar="FILE",
                     help="With --program: the tokenizer, which it always loads."),
        click.option("--library", "by_library", type=FILE, multiple=True, metavar="FILE",
                     help="With --program: a library that it needs; repeatable."),
        click.option("--program-flag", "by_flag", multiple=True, metavar="NAME=VALUE",
                     help="With --program: another flag, as decoder_model_version=qwen3; repeatable."),
    )  # fmt: skip
    for option in reversed(options):
        run = option(run)
    return run
