"""`farm lab roles`."""

from __future__ import annotations

from pathlib import Path

import click

from farm.cli.options import json_option
from farm.cli.output import echo, notice, opened, print_json


@click.command("roles")
@click.option("--apply", "is_applied", is_flag=True, help="Apply the SQL instead of printing it.")
@click.option("--prefix", metavar="NAME", default="farm", show_default=True,
              help="Prefix of the groups' names, if two farms share a server.")  # fmt: skip
@json_option()
def command(*, is_applied: bool, prefix: str, as_json: bool, config_file: Path | None) -> None:
    """Print or apply the SQL for roles and their rights on PostgreSQL.

    \b
    farm_agent       records results and runs submitted jobs; removes nothing
    farm_builder     makes bundles: the login of a host that only compiles
    farm_server      farm serve: acts for its accounts; writes no result
    farm_reader      reads

    These are groups. A host has a role that signs in, and is a member of one:
    CREATE ROLE host_a LOGIN; GRANT farm_agent TO host_a. Persons act by the
    server (FARM_SERVER, FARM_TOKEN). The owner of the tables upgrades, prunes
    and sets quotas; without roles every user signs in as the owner. Sign in as
    a superuser to apply the SQL, or let one run it: farm lab roles | psql DATABASE
    """
    from farm.store.rights.rights import KINDS

    with opened(config_file) as (_, store):
        roles = store.roles
        # The rights include the tables of messages to agents, so the tables must exist.
        store.messages.require()
        sql = roles.script(prefix)
        if is_applied:
            roles.apply(prefix)
    groups = [f"{prefix}_{kind}" for kind in KINDS]
    if as_json:
        print_json({"groups": groups, "sql": sql, "applied": is_applied})
    elif is_applied:
        notice(f"the groups are {', '.join(groups)}: GRANT one to each role that signs in")
    else:
        echo(sql, whole=True)
