"""Usage errors of click as one line in the words of farm."""

from __future__ import annotations

import click

from farm.base.errors import UnknownNameError


def refusal(error: click.ClickException) -> str:
    """Return one line with the error of a command line, and the command that prints the correct usage."""
    context = getattr(error, "ctx", None)
    if isinstance(error, click.NoSuchOption):
        options = context.command.get_params(context) if context is not None else []
        known = [name for one in options if isinstance(one, click.Option) for name in one.opts if name.startswith("--")]
        # A short option has one letter, so a suggestion would be arbitrary.
        near = known if error.option_name.startswith("--") else ()
        return f"{UnknownNameError('option', error.option_name, near)} {_see(context)}".rstrip()
    problem = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.MissingParameter) and error.param is not None:
        kind = "argument" if isinstance(error.param, click.Argument) else "option"
        problem = f"{_name(error.param)} is missing, an {kind} that is needed"
    elif isinstance(error, click.BadParameter) and error.param is not None:
        problem = f"{_name(error.param)}: {' '.join(error.message.split()).rstrip('.')}"
    else:
        problem = problem[:1].lower() + problem[1:]
    return f"{problem} {_see(context)}".rstrip()


def _name(param: click.Parameter) -> str:
    return param.opts[-1] if isinstance(param, click.Option) else param.human_readable_name.upper()


def _see(context: click.Context | None) -> str:
    return f"({context.command_path} --help)" if context is not None else ""
