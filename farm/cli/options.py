"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration; otherwise $FARM_CONFIG, or the nearest farm.toml upwards.",
)
