"""`farm socs`."""

from __future__ import annotations

import click

from farm.cli.output import echo, print_json
from farm.suites.socs import load_socs


@click.command("socs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(*, as_json: bool) -> None:
    """List the SoCs that farm knows, and what each has."""
    socs = load_socs().values()
    if as_json:
        print_json({"socs": list(socs)})
        return
    echo(f"{'SoC':<9}{'id':>3}  {'HTP':<4}{'VTCM':>6}  {'LPAI':<5}{'backends':<25}product")
    for soc in socs:
        lpai = f"v{soc.lpai_version}" if soc.lpai_version else "-"
        line = f"{soc.name:<9}{soc.soc_id:>3}  V{soc.htp_arch:<3}{soc.vtcm_mb:>2} MiB  {lpai:<5}"
        echo(f"{line}{', '.join(soc.backends):<25}{soc.product}".rstrip())
