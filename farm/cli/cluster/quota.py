"""`farm lab quota`: limits of the devices that a user may have at once."""

from __future__ import annotations

import re
from pathlib import Path

import click

from farm.base.errors import UsageError
from farm.cli.options import json_option, yes_option
from farm.cli.output import opened, require_consent, show

_SUBJECT = re.compile(r"(user|label):[^\s:]{1,80}")


@click.command("quota")
@click.argument("subject", required=False, metavar="[user:NAME|label:NAME]")
@click.argument("most", required=False, type=click.IntRange(min=0), metavar="[N]")
@click.option("--remove", is_flag=True, help="Remove the quota.")
@yes_option
@json_option()
def command(
    *, subject: str | None, most: int | None, remove: bool, yes: bool, config_file: Path | None, as_json: bool
) -> None:
    """Show or set the number of devices that a user may have at once.

    \b
    farm lab quota                      show the quotas
    farm lab quota user:ada 4           ada has 4 devices at most
    farm lab quota label:camera 1       of those labelled camera any user has 1
    farm lab quota user:ada --remove    remove the quota

    A quota applies to all requests of a user, over all SoCs: submitted runs,
    nightly runs and single commands. A device that is held when the quota is
    set is kept until its shard or command ends. A quota of 0 lets nothing begin.
    """
    from farm.report.terminal.layout import columns

    _check(subject, most, remove=remove)
    with opened(config_file, existing=True) as (_, store):
        if subject is not None and (most is not None or remove):
            if remove and subject not in store.quotas.all():
                raise UsageError(f"{subject} has no quota: 'farm lab quota' lists the quotas")
            if remove:
                require_consent(f"the quota of {subject}", yes=yes)
            store.quotas.set(subject, None if remove else most, store.user)
        found = store.quotas.all()
    shown = {name: count for name, count in sorted(found.items()) if subject in (None, name)}
    lines = columns([("of", "devices at most"), *((name, str(count)) for name, count in shown.items())])
    nothing = [f"{subject} has no quota" if subject else "no quota is set"]
    show({"quotas": shown}, lines if shown else nothing, as_json=as_json)


def _check(subject: str | None, most: int | None, *, remove: bool) -> None:
    if subject is not None and not _SUBJECT.fullmatch(subject):
        raise UsageError(f"{subject!r}: expected user:NAME or label:NAME, such as user:ada or label:camera")
    if remove and (subject is None or most is not None):
        raise UsageError("--remove takes the quota of one user or label, and no number")
