"""`farm devices`."""

from __future__ import annotations

import shutil
import textwrap
import time
from typing import TYPE_CHECKING

import click

from farm.cli.options import config_option

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from farm.engine.survey import DeviceRow

_WATCH_SECONDS = 2.0
_STYLES = {"ready": "green", "absent": "dim", "out": "yellow", "quarantined": "bold red"}
_HEALTH_STYLES = {"suspect": "yellow", "quarantined": "bold red"}


@click.command("devices")
@click.argument("names", nargs=-1, metavar="[DEVICE|SOC]...")
@click.option("--watch", is_flag=True, help="Look again every two seconds, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; with --watch, one line each time.")
@config_option
def command(*, names: tuple[str, ...], watch: bool, as_json: bool, config_file: Path | None) -> None:
    """Show the attached devices: what they are, how they are, who has them.

    The SoC is what the device says itself. Those that were attached before
    are shown as absent.
    """
    from farm.config import load_config
    from farm.engine.survey import find_rows, survey
    from farm.processes import Supervisor
    from farm.store.store import open_store

    config = load_config(config_file)
    with Supervisor() as supervisor, open_store(config.store_url) as store:

        def look() -> list[DeviceRow]:
            return find_rows(survey(config, store, supervisor), names)

        if watch:
            _watch(look, as_json=as_json)
        elif as_json:
            from farm.cli.output import print_json

            print_json({"devices": look()})
        else:
            _console().print(_listing(look()), soft_wrap=True)


def _watch(look: Callable[[], list[DeviceRow]], *, as_json: bool) -> None:
    """Show until Ctrl-C, which is how it ends."""
    import contextlib
    import sys

    import msgspec
    from rich.live import Live

    with contextlib.suppress(KeyboardInterrupt):
        if as_json or not sys.stdout.isatty():
            while True:
                found = look()
                line = msgspec.json.encode({"schema": 1, "devices": found}).decode() if as_json else _listing(found)
                click.echo(line)
                time.sleep(_WATCH_SECONDS)
        with Live(console=_console(), auto_refresh=False) as live:
            while True:
                live.update(_listing(look()), refresh=True)
                time.sleep(_WATCH_SECONDS)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _listing(found: Sequence[DeviceRow]) -> Text:
    """Return two lines for each device, and a third for what is wrong with it; 80 columns hold them."""
    from rich.text import Text

    text = Text()
    if not found:
        text.append(
            "no device is attached: connect one by USB, name one in farm.toml, or try 'farm virtual up --soc SM8650'"
        )
    width = max((len(row.name or row.serial) for row in found), default=0)
    for number, row in enumerate(found):
        if number:
            text.append("\n")
        text.append((row.name or row.serial).ljust(width), style="bold")
        text.append(f"  {row.soc or '?':<8}{row.kind:<9}")
        text.append(f"{row.state:<12}", style=_STYLES.get(row.state, "red"))
        text.append(f"{row.health:<12}", style=_HEALTH_STYLES.get(row.health, ""))
        text.append(_holder(row) or ("free" if row.state == "ready" else ""))
        text.append(_wrapped(", ".join(_details(row))), style="dim")
        if row.reason or row.health_reason:
            text.append(_wrapped(row.reason or row.health_reason), style="yellow")
    return text


def _wrapped(text: str) -> str:
    width = max(40, shutil.get_terminal_size().columns)
    indent = "    "
    return "\n" + textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _holder(row: DeviceRow) -> str:
    if not row.holder:
        return ""
    until = time.strftime(" until %H:%M", time.localtime(row.until_ms / 1000)) if row.until_ms else ""
    return f"{row.holder}{until}"


def _details(row: DeviceRow) -> list[str]:
    details = [row.serial] if row.name and row.name != row.serial else []
    details += [row.product] if row.product else []
    details += [f"on {row.host}"] if row.host else []
    details += ["/".join(row.backends)] if row.backends else []
    if row.root is not None:
        details.append("root" if row.root else "not root")
    if row.battery_percent is not None:
        details.append(f"battery {row.battery_percent} %")
    if row.temperature_c is not None:
        details.append(f"{row.temperature_c:.1f} C")
    if row.free_bytes is not None:
        details.append(f"{row.free_bytes / 1e9:.1f} GB free")
    if row.last_seen_ms:
        details.append(f"seen {_ago(row.last_seen_ms)}")
    details += [f"#{label}" for label in row.labels]
    return details or ["nothing is known of it"]


def _ago(time_ms: int) -> str:
    seconds = max(0.0, time.time() - time_ms / 1000)
    if seconds < 10:
        return "now"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
