"""`farm setup cache`."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click

from farm.base.errors import UsageError
from farm.base.forms import age_in_seconds
from farm.builds.bundles.cache import BundleCache, leftovers
from farm.builds.toolchains.sdks import CachedSdk, cached_sdks, removable_sdks, remove_sdk
from farm.builds.toolchains.worktrees import STALE_S, prune_worktrees, worktrees
from farm.cli.options import SuggestingGroup, configured, json_option
from farm.cli.output import as_called, show
from farm.devices.virtual.boot import kept_objects, remove_kept
from farm.report.model.format import plural, short_age, size
from farm.report.terminal.layout import columns
from farm.store.objects.objects import cached_objects, prune_objects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from farm.builds.toolchains.overview import EnvironmentRow

_SIZE = re.compile(r"(\d+)([kMGT]?)B?")
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_PRUNE = "'farm setup cache prune --older 30d --yes'"
_OTHERS = {
    "leftovers": ("folder", " that compiles left", f"{_PRUNE} and the next compile remove them"),
    "environments": ("environment", " of toolchains", "'farm setup toolchain list' shows them"),
    "sdks": ("QNN SDK", "", "'farm setup sdk list' shows them"),
    "virtual": ("virtual device", " with pushed files", f"{_PRUNE} removes the files of unused ones"),
    "worktrees": ("source tree", " of commits", f"{_PRUNE} removes the unused ones"),
    "files": ("file", " of a shared farm", f"{_PRUNE} removes them, and farm fetches them again"),
}
"""Contents of the cache besides bundles: noun, origin and next step."""


@click.group("cache", cls=SuggestingGroup, invoke_without_command=True)
@click.pass_context
def command(context: click.Context) -> None:
    """Show (without a subcommand) or prune compiled bundles, and files left by interrupted compiles.

    An interrupted compile (time, memory, Ctrl-C, a crash) leaves files; farm
    removes them at once, or at the next compile if farm itself was killed.
    """
    if context.invoked_subcommand is None:
        context.invoke(show_bundles)


@command.command("show")
@json_option("Print JSON instead of a table.")
def show_bundles() -> None:
    """List the bundles, most recently used first."""
    from farm.builds.toolchains.overview import environment_rows

    config = configured()
    cache = BundleCache(config.cache_dir)
    entries = cache.entries()
    others: dict[str, Sequence[Any]] = {
        "leftovers": leftovers(cache.root),
        "environments": environment_rows(cache.root),
        "sdks": cached_sdks(config),
        "virtual": kept_objects(cache.root),
        "worktrees": worktrees(cache.root),
    }
    rows = [[entry.key[:12], size(entry.nbytes), short_age(entry.used_ms), entry.job_id] for entry in entries]
    lines = columns(rows, right=(1, 2)) if rows else []
    lines.append(f"{len(entries)} bundles, {size(sum(entry.nbytes for entry in entries))} in {cache.root}")
    texts = _texts(others | {"files": cached_objects(cache.root)})
    lines += [f"{text}: {_OTHERS[kind][2]}" for kind, text in texts.items()]
    show({"bundles": entries, **others, "sdks": _facts(others["sdks"])}, lines)


@command.command("prune")
@click.option("--older", metavar="AGE", help="Bundles unused for this time: 30d, 12h, 90m.")
@click.option("--keep-size", "keep", metavar="SIZE", help="Least recently used bundles beyond this size: 10GB, 500MB.")
@click.option("--all", "everything", is_flag=True, help="All bundles.")
@click.option("--yes", is_flag=True, help="Remove; otherwise only list the bundles and files to remove.")
@json_option()
def prune(older: str | None, keep: str | None, *, everything: bool, yes: bool) -> None:
    """Remove bundles, and files left by interrupted compiles.

    Environments of toolchains are removed as well: by AGE or all; with --keep-size
    unusable ones, as farm's own packages have changed since. QNN
    SDKs are removed by AGE, or all, unless farm.toml names them. Files on virtual
    devices are removed by AGE, or all. Source trees
    of commits are removed by AGE, or all, unless a command uses one.

    Without --yes nothing is removed.
    """
    from farm.builds.toolchains.overview import remove_environment

    if sum(map(bool, (older, keep, everything))) != 1:
        raise UsageError("no choice of bundles: give one of --older AGE, --keep-size SIZE, --all")
    config = configured()
    cache = BundleCache(config.cache_dir)
    left = leftovers(cache.root)
    age_s = age_in_seconds(older) if older else None
    if older and age_s is None:
        raise UsageError(f"--older {older!r} is not understood, expected something like 30d")
    removed = cache.prune(older_than_s=age_s or 0.0, keep_bytes=_parse_size(keep) if keep else None, dry_run=not yes)
    least_s = 0.0 if everything else age_s
    environments, sdks = _old_environments(cache.root, least_s), removable_sdks(config, least_s)
    virtual = [] if keep else kept_objects(cache.root, age_s or 0.0)
    if yes:
        remove_kept(virtual)
        for row in environments:
            remove_environment(row)
        for sdk in sdks:
            remove_sdk(config, sdk)
    others: dict[str, Sequence[Any]] = {
        "leftovers": left,
        "environments": environments,
        "sdks": sdks,
        "virtual": virtual,
        "worktrees": prune_worktrees(cache.root, older_than_s=STALE_S if least_s is None else least_s, dry_run=not yes),
        # --keep-size limits the size of bundles; these files are small and stay.
        "files": [] if keep else prune_objects(cache.root, older_than_s=age_s or 0.0, dry_run=not yes),
    }
    texts = _texts(others)
    freed = ", and ".join([size(sum(entry.nbytes for entry in removed)), *texts.values()])
    lines = [f"{'removed' if yes else 'would remove'} {len(removed)} bundles, {freed}"]
    if not yes and (removed or texts):
        lines.append(f"nothing was removed; to remove it: {as_called()} --yes")
    show({"removed": yes, "bundles": removed, **others, "sdks": _facts(sdks)}, lines)


def _old_environments(cache_dir: Path, age_s: float | None) -> list[EnvironmentRow]:
    """Return environments unused for `age_s`; without an age the environments that no command can use."""
    from farm.builds.toolchains.overview import environment_rows

    rows = environment_rows(cache_dir)
    if age_s is None:
        return [row for row in rows if not row.current]
    horizon_ms = (time.time() - age_s) * 1000
    return [row for row in rows if row.used_ms <= horizon_ms]


def _facts(sdks: Sequence[CachedSdk]) -> list[dict[str, object]]:
    return [{"version": sdk.version, "root": str(sdk.root), "nbytes": sdk.nbytes} for sdk in sdks]


def _texts(others: Mapping[str, Sequence[Any]]) -> dict[str, str]:
    """Return number and size of the other contents of the cache, by kind."""
    return {
        kind: f"{plural(len(found), _OTHERS[kind][0])}{_OTHERS[kind][1]}, {size(sum(one.nbytes for one in found))}"
        for kind, found in others.items()
        if found
    }


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--keep-size {text!r} is not understood, expected something like 10GB")
    return int(match[1]) * _BYTES[match[2]]
