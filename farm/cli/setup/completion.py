"""`farm setup completion`."""

from __future__ import annotations

import click

from farm.cli.completion import SHELLS, script
from farm.cli.output import echo


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS), metavar="bash|zsh|fish")
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script with which a shell completes farm's commands, options and values.

    \b
    farm setup completion bash > ~/.local/share/bash-completion/completions/farm
    farm setup completion zsh > ~/.zfunc/_farm     (a folder of $fpath)
    farm setup completion fish > ~/.config/fish/completions/farm.fish

    Tab then offers suites, cases, SoCs, devices, runs, toolchains and more,
    from farm.toml, the store and the cache.
    """
    echo(script(context.find_root().command, shell), nl=False, whole=True)
