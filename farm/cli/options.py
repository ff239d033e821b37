"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from farm.system.durations import in_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration; otherwise $FARM_CONFIG, or the nearest farm.toml upwards that nobody else can write.",
)

_ONE_OFF = (
    click.option("--virtual", type=click.IntRange(1, 1), metavar="1", help="Run it on a virtual device."),
    click.option(
        "--iterations",
        type=click.IntRange(1, 100_000),
        default=3,
        show_default=True,
        help="Timed executions of every inference.",
    ),
    click.option(
        "--warm-up",
        type=click.IntRange(0, 100_000),
        default=1,
        show_default=True,
        help="Executions before those, not timed.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(min=1),
        default=300.0,
        show_default=True,
        metavar="SECONDS",
        help="Longest that it may take on the device.",
    ),
)


_DEVICES = (
    click.option(
        "--virtual",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Run on N virtual devices a SoC, with an HTP simulator, instead of attached ones.",
    ),
    click.option(
        "--device",
        "devices",
        multiple=True,
        metavar="NAME",
        help="Only attached devices of this name or serial; repeatable.",
    ),
    click.option(
        "--label", "labels", multiple=True, help="Only attached devices with this label; repeatable: with all."
    ),
    click.option(
        "--devices",
        "most_devices",
        type=click.IntRange(min=1),
        metavar="N",
        help="At most N attached devices a SoC; otherwise all that are free.",
    ),
)


_PAIRS = (
    click.option(
        "--pairs",
        type=click.IntRange(5, 1000),
        default=10,
        show_default=True,
        metavar="N",
        help="Times that both are run, one after the other.",
    ),
    click.option(
        "--inferences",
        type=click.IntRange(1, 10_000),
        default=5,
        show_default=True,
        metavar="N",
        help="Of each of them in a pair; without JOB up to 20 of short ones.",
    ),
    click.option(
        "--device", metavar="NAME", help="This attached device; otherwise that of the newer run, or one like it."
    ),
    click.option("--virtual", is_flag=True, help="A virtual device of its own: as of itself for virtual results."),
)


def duration(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """Return `90s`, `10m`, `1.5h`, `1h30m` or `2d` in seconds: the callback of an option."""
    if value is None:
        return None
    seconds = in_seconds(value)
    if seconds is None:
        problem = f"{value!r}: expected a time of at most 30 days, such as 90s, 10m, 1h30m or 2d"
        raise click.BadParameter(problem, context, option)
    return seconds


def one_off_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what a command that runs one program has: `virtual`, `iterations`, `warm_up`, `timeout_s`."""
    return _with(_ONE_OFF, command)


def pairs_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what a command that measures pairs has: `pairs`, `inferences`, `device`, `virtual`."""
    return _with(_PAIRS, command)


def devices_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what a command that runs on many devices has: `virtual`, or `devices`, `labels`, `most_devices`."""
    return _with(_DEVICES, command)


def _with(options: Iterable[Callable[..., Any]], command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(tuple(options)):
        command = option(command)
    return command
