"""`farm socs`."""

from __future__ import annotations

import click
import msgspec

from farm.profiles import load_socs


@click.command("socs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(*, as_json: bool) -> None:
    """List the SoCs that farm knows, and what each has."""
    socs = load_socs().values()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"schema": 1, "socs": list(socs)})).decode())
        return
    click.echo(f"{'SoC':<10}{'id':>4}  {'HTP':<5}{'VTCM':>7}  {'LPAI':<6}{'backends':<16}product")
    for soc in socs:
        lpai = f"v{soc.lpai_version}" if soc.lpai_version else "-"
        line = f"{soc.name:<10}{soc.soc_id:>4}  V{soc.htp_arch:<4}{soc.vtcm_mb:>3} MiB  {lpai:<6}"
        click.echo(f"{line}{', '.join(soc.backends):<16}{soc.product}".rstrip())
