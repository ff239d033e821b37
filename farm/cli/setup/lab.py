"""`farm lab accounts`, `audit`, `roles`, `quota` and `notify`: commands for the owner of a shared farm."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from farm.base.errors import UsageError
from farm.base.exit_codes import ExitCode
from farm.base.text import one_line
from farm.cli.options import configured, is_json, json_option, limit_option, yes_option
from farm.cli.output import echo, notice, opened, print_json, require_consent, show
from farm.report.terminal.layout import columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.base.config.notify import NotifyConfig

_ROLES = ("viewer", "developer", "operator")
_SUBJECT = re.compile(r"(user|label):[^\s:]{1,80}")


@click.command("accounts")
@click.option("--add", metavar="NAME", help="Make an account and print its token, which is shown only once.")
@click.option("--role", type=click.Choice(_ROLES), default="viewer", show_default=True, help="Role of the new account.")
@click.option("--remove", metavar="NAME", help="Remove an account: its token and its sessions end.")
@yes_option
@json_option()
def accounts_command(*, add: str | None, role: str, remove: str | None, yes: bool) -> None:
    """List, make and remove the accounts of farm serve.

    \b
    viewer       reads
    developer    leases, runs and cancels for itself, remarks on alerts
    operator     also for others; takes devices out of service, checks them

    With an account every request to farm serve needs one. A new token for a
    name: remove the account and add it again.
    """
    from farm.store.accounts import Role

    if add is not None and remove is not None:
        raise UsageError("give --add or --remove, not both")
    with opened() as (_, store):
        if add is not None:
            token = store.accounts.add(add, Role(role))
            show({"name": add, "role": role, "token": token}, [token])
            return
        if remove is not None:
            require_consent(f"account {remove}", yes=yes)
            store.accounts.remove(remove)
            show({"removed": remove}, [f"account {one_line(remove)} is removed"])
            return
        found = store.accounts.all()
    rows = [(one_line(one.name), str(one.role), _time(one.created_ms)) for one in found]
    lines = columns([("name", "role", "since"), *rows]) if rows else ["no account: farm serve is read-only"]
    show({"accounts": found}, lines)


@click.command("audit")
@click.option("--user", default="", metavar="NAME", help="Only actions of this user.")
@limit_option("Newest actions.")
@json_option()
def audit_command(*, user: str, limit: int) -> None:
    """Show the actions of accounts on farm serve, also the refused ones, newest first."""

    with opened(readonly=True) as (_, store):
        found = store.accounts.audit(limit, user)
    rows = [
        (_time(one.time_ms), one_line(one.user), one.action, one_line(one.outcome, 60), one_line(one.asked, 120))
        for one in found
    ]
    lines = columns([("when", "user", "action", "outcome", "asked"), *rows]) if rows else ["no action yet"]
    show({"actions": found}, lines)


def _time(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_ms / 1000))


@click.command("roles")
@click.option("--apply", "is_applied", is_flag=True, help="Apply the SQL instead of printing it.")
@click.option("--prefix", metavar="NAME", default="farm", show_default=True,
              help="Prefix of the groups' names, if two farms share a server.")  # fmt: skip
@json_option()
def roles_command(*, is_applied: bool, prefix: str) -> None:
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

    with opened() as (_, store):
        roles = store.roles
        # The rights include the tables of messages to agents, so the tables must exist.
        store.messages.require()
        sql = roles.script(prefix)
        if is_applied:
            roles.apply(prefix)
    groups = [f"{prefix}_{kind}" for kind in KINDS]
    if is_json():
        print_json({"groups": groups, "sql": sql, "applied": is_applied})
    elif is_applied:
        notice(f"the groups are {', '.join(groups)}: GRANT one to each role that signs in")
    else:
        echo(sql, whole=True)


@click.command("quota")
@click.argument("subject", required=False, metavar="[user:NAME|label:NAME]")
@click.argument("most", required=False, type=click.IntRange(min=0), metavar="[N]")
@click.option("--remove", is_flag=True, help="Remove the quota.")
@yes_option
@json_option()
def quota_command(*, subject: str | None, most: int | None, remove: bool, yes: bool) -> None:
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

    _check(subject, most, remove=remove)
    with opened(existing=True) as (_, store):
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
    show({"quotas": shown}, lines if shown else nothing)


def _check(subject: str | None, most: int | None, *, remove: bool) -> None:
    if subject is not None and not _SUBJECT.fullmatch(subject):
        raise UsageError(f"{subject!r}: expected user:NAME or label:NAME, such as user:ada or label:camera")
    if remove and (subject is None or most is not None):
        raise UsageError("--remove takes the quota of one user or label, and no number")


@click.command("notify")
@click.option("--test", is_flag=True, help="Send a test notice to all receivers.")
@json_option()
def notify_command(*, test: bool) -> int:
    """Show the receivers of notices about quarantined devices, or test them.

    Receivers are [[notify.webhook]] and [notify.mail] of farm.toml. With
    --test: exit code 4 if a delivery failed. See docs/explanation/health.md.
    """
    from farm.dispatch.notify.credentials import hide_secrets, missing_secrets

    config = configured()
    if not config.notify.is_set:
        raise UsageError(
            f"{config.file or 'farm.toml'}: notify: no receiver: add [[notify.webhook]] or [notify.mail], "
            "as docs/reference/configuration.md has them"
        )
    hide_secrets(config.notify.webhook, config.notify.mail)
    if not test:
        missing = list(missing_secrets(config.notify.webhook, config.notify.mail))
        answer = {"receivers": list(_receivers(config.notify)), "missing": missing}
        show(answer, [*_receivers(config.notify), *(f"MISSING: {line}" for line in missing)])
        return ExitCode.USAGE if missing else 0
    from farm.dispatch.notify.delivery import find_receivers, send_notices
    from farm.dispatch.notify.quarantine import made_up_notice, quarantine_notices

    receivers = find_receivers(config.notify.webhook, config.notify.mail)
    deliveries = send_notices(quarantine_notices(receivers, made_up_notice()), None)
    show({"deliveries": deliveries}, [one.line for one in deliveries])
    return 0 if all(one.ok for one in deliveries) else ExitCode.INFRA


def _receivers(config: NotifyConfig) -> Iterator[str]:
    from farm.dispatch.notify.webhook import origin

    for number, hook in enumerate(config.webhook, start=1):
        secret = f"${hook.url_env}" if hook.url_env else hook.url_file
        yield f"webhook {number}: {origin(hook.url) if hook.url else f'address in {secret}'}, {hook.template}"
    if (mail := config.mail) is not None:
        yield f"mail to {', '.join(mail.to)} by {mail.host}:{mail.port}{'' if mail.starttls else ', without STARTTLS'}"
