"""`farm serve`."""

from __future__ import annotations

from pathlib import Path

import click

from farm.cli.options import config_option
from farm.cli.output import echo
from farm.config.settings import load_config


@click.command("serve")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8470, show_default=True, help="0 takes a free one.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File with the token to log in with; otherwise $FARM_SERVE_TOKEN.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the address as JSON.")
@config_option
def command(*, host: str, port: int, token_file: Path | None, as_json: bool, config_file: Path | None) -> None:
    """Show the store in a browser: status, runs, devices, history, live.

    Nothing can be changed. Without --host only this machine can look, and
    needs no token unless one is set; beyond it, a token is needed.
    """
    import os

    from farm.serve.security import read_token, require_token
    from farm.serve.server import listen, serve, url_of

    config = load_config(config_file)
    token = read_token(token_file, os.environ)
    require_token(host, token)
    with listen(host, port) as bound:
        address = str(bound.getsockname()[0])
        # A name may mean something else by now.
        require_token(address, token)
        if as_json:
            import json

            echo(json.dumps({"schema": 1, "url": url_of(bound), "token": bool(token)}))
        else:
            echo(f"farm: {url_of(bound)}{' (with a token)' if token else ''}, until Ctrl-C")
        serve(config, address, token, bound)
