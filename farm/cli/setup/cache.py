"""`farm cache`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import click

from farm.bundles.cache import BundleCache, leftovers
from farm.cli.options import config_option, json_option
from farm.cli.output import echo, show
from farm.config.settings import load_config
from farm.errors import UsageError
from farm.report.model.format import plural, short_age, size
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from farm.bundles.cache import Leftover

_AGE = re.compile(r"(\d+)([smhd])")
_SIZE = re.compile(r"(\d+)([kMGT]?)B?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@click.group("cache", invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Show (without a word more) or prune compiled bundles, and what compiles left.

    A compile that is ended (time, memory, Ctrl-C, a crash) leaves files; farm
    removes them then, or at the next compile when it was killed itself.
    """
    if context.invoked_subcommand is None:
        context.invoke(show_bundles)


@command.command("show")
@json_option("Print JSON instead of a table.")
def show_bundles(config_file: Path | None = None, *, as_json: bool = False) -> None:
    """List the bundles, most recently used first."""
    cache = BundleCache(load_config(config_file).cache_dir)
    entries, left = cache.entries(), leftovers(cache.root)
    rows = [[entry.key[:12], size(entry.nbytes), short_age(entry.used_ms), entry.job_id] for entry in entries]
    lines = columns(rows, right=(1, 2)) if rows else []
    lines.append(f"{len(entries)} bundles, {size(sum(entry.nbytes for entry in entries))} in {cache.root}")
    lines += [f"{_total(left)}: 'farm cache prune' and the next compile remove them"] if left else []
    show({"bundles": entries, "leftovers": left}, lines, as_json=as_json)


@command.command("prune")
@config_option
@click.option("--older", metavar="AGE", help="Not used for so long: 30d, 12h, 90m.")
@click.option("--keep", metavar="SIZE", help="Least recently used beyond this size: 10GB, 500MB.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--dry-run", is_flag=True, help="Say what would go, remove nothing.")
def prune(config_file: Path | None, older: str | None, keep: str | None, *, everything: bool, dry_run: bool) -> None:
    """Remove bundles, and what compiles that were ended left behind."""
    if sum(map(bool, (older, keep, everything))) != 1:
        raise UsageError("say what to remove: one of --older AGE, --keep SIZE, --all")
    cache = BundleCache(load_config(config_file).cache_dir)
    left = leftovers(cache.root)
    removed = cache.prune(
        older_than_s=_parse(older, _AGE, _SECONDS, "--older", "30d") if older else 0.0,
        keep_bytes=int(_parse(keep, _SIZE, _BYTES, "--keep", "10GB")) if keep else None,
        dry_run=dry_run,
    )
    freed = size(sum(entry.nbytes for entry in removed))
    more = f", and {_total(left)}" if left else ""
    echo(f"{'would remove' if dry_run else 'removed'} {len(removed)} bundles, {freed}{more}")


def _total(left: Sequence[Leftover]) -> str:
    """Return how much is left over, for people."""
    files, nbytes = sum(one.files for one in left), sum(one.nbytes for one in left)
    return f"{plural(len(left), 'folder')} that compiles left, with {files} files, {size(nbytes)}"


def _parse(text: str, pattern: re.Pattern[str], units: dict[str, int], option: str, example: str) -> float:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r} is not understood, expected something like {example}")
    return float(match[1]) * units[match[2]]
