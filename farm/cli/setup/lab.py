"""`farm lab`: agents, queue, accounts, audit, roles, quotas and notices of a shared farm."""

from __future__ import annotations

import re
import time
from functools import partial
from typing import TYPE_CHECKING

import click

from farm.base.config.settings import Config
from farm.base.errors import ExitCode, UnknownNameError, UsageError
from farm.base.text import one_line
from farm.cli.options import SuggestingGroup, config_option, configured, is_json, json_option, limit_option, yes_option
from farm.cli.output import echo, is_verbose, notice, opened, print_json, reading, require_consent, show, width
from farm.report.model.format import short_age
from farm.report.terminal.layout import LEAST_WIDTH, columns, wrapped

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator, Sequence

    from farm.base.config.runs import NotifyConfig
    from farm.dispatch.cluster.queue import QueuedRun
    from farm.policy.situation import Lease
    from farm.store.cluster.records import Agent


# `farm lab accounts`, `audit`, `roles`, `quota` and `notify`: commands for the owner of a shared farm.


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
    from farm.store.rights import KINDS

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
    if subject is not None and not _SUBJECT.fullmatch(subject):
        raise UsageError(f"{subject!r}: expected user:NAME or label:NAME, such as user:ada or label:camera")
    if remove and (subject is None or most is not None):
        raise UsageError("--remove takes the quota of one user or label, and no number")
    with opened(existing=True) as (_, store):
        if remove:
            if subject not in store.quotas.all():
                raise UsageError(f"{subject} has no quota: 'farm lab quota' lists the quotas")
            require_consent(f"the quota of {subject}", yes=yes)
        if subject is not None and (most is not None or remove):
            store.quotas.set(subject, None if remove else most, store.user)
        found = store.quotas.all()
    shown = {name: count for name, count in sorted(found.items()) if subject in (None, name)}
    lines = [f"{subject} has no quota" if subject else "no quota is set"]
    if shown:
        lines = columns([("of", "devices at most"), *((name, str(count)) for name, count in shown.items())])
    show({"quotas": shown}, lines)


@click.command("notify")
@click.option("--test", is_flag=True, help="Send a test notice to all receivers.")
@json_option()
def notify_command(*, test: bool) -> int:
    """Show the receivers of notices about quarantined devices, or test them.

    Receivers are [[notify.webhook]] and [notify.mail] of farm.toml. With
    --test: exit code 4 if a delivery failed. See docs/explanation/health.md.
    """
    from farm.dispatch.notify.channels import hide_secrets, missing_secrets

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
    from farm.dispatch.notify.channels import origin

    for number, hook in enumerate(config.webhook, start=1):
        secret = f"${hook.url_env}" if hook.url_env else hook.url_file
        yield f"webhook {number}: {origin(hook.url) if hook.url else f'address in {secret}'}, {hook.template}"
    if (mail := config.mail) is not None:
        yield f"mail to {', '.join(mail.to)} by {mail.host}:{mail.port}{'' if mail.starttls else ', without STARTTLS'}"


# `farm lab agent`: executes jobs and compiles on a host for a shared farm.


_INDENT = "    "
_STDERR = 2
"""File descriptor."""
_NIGHTS = 5


@click.group("agent", cls=SuggestingGroup, invoke_without_command=True)
@click.option("--name", default="", metavar="NAME", help="Name of this host in the farm; otherwise its hostname.")
@click.option("--build/--no-build", "builds", default=None, help="Compile for other hosts; otherwise as in farm.toml.")
@click.option("--no-devices", is_flag=True, help="Run nothing on devices: a host that only compiles.")
@click.option("--log", "log_form", type=click.Choice(["text", "json"]), default="text", show_default=True,
              help="Form of log lines on standard error. FARM_LOG has the levels.")  # fmt: skip
@config_option
@click.pass_context
def agent_command(context: click.Context, name: str, *, builds: bool | None, no_devices: bool, log_form: str) -> None:
    """Let this host's devices, and its compilers, work for a shared farm.

    \b
    farm lab agent                        devices attached to this host
    farm lab agent --build                its compilers as well
    farm lab agent --build --no-devices   only its compilers
    farm lab agent list                   all hosts, their devices and their state
    farm lab agent drain HOST             finish a host's jobs and end

    The agent runs until SIGTERM or Ctrl-C. It then finishes the running jobs
    and leaves the others to other hosts; a second signal interrupts the running
    jobs. Results that the store has not received are kept on this host's disk.
    See docs/guides/three_hosts.md for systemd units.
    """
    if context.invoked_subcommand is not None:
        return
    config = configured()
    _require_shared(config)
    builds = config.agent.build if builds is None else builds
    if no_devices and not builds and not config.agent.nights:
        raise UsageError("--no-devices leaves this host nothing to do: with --build it compiles")
    from farm.dispatch.cluster.agent.host_agent import HostAgent, stop_by_signal

    agent = HostAgent(config, name, builds=builds, has_devices=not no_devices)
    _begin_log(agent.name, log_form)
    stop_by_signal(agent)
    agent.run()


def _begin_log(name: str, form: str) -> None:
    """Log on standard error: as JSON, in the format of the journal, or with the time in front."""
    from farm.base import log_setup

    formatter: logging.Formatter = log_setup.LineFormatter("%H:%M:%S")
    if form == "json":
        formatter = log_setup.JsonFormatter(agent=name)
    elif log_setup.is_journal(_STDERR):
        formatter = log_setup.JournalFormatter()
    log_setup.begin_logging(log_setup.RecordHandler(partial(echo, err=True), formatter), verbose=is_verbose())


@agent_command.command("list", short_help="List hosts, their devices and last nightly runs.")
@json_option()
def list_agents() -> None:
    """List the hosts of the farm, their devices and the users of these, and the last nightly runs they started."""
    from farm.dispatch.cluster.nightly_starter import nightly_lines

    _require_shared(configured())
    with opened(existing=True) as (_, store):
        agents = store.cluster.agents()
        leases = {lease.device: lease for lease in store.leases.all()}
        nightly_runs = store.cluster.nightly_runs.recent(_NIGHTS)
    answer = [
        {
            "name": agent.name,
            "user": agent.user,
            "alive": agent.alive,
            "draining": agent.is_draining,
            "started_ms": agent.started_ms,
            "heartbeat_ms": agent.heartbeat_ms,
            "facts": agent.facts,
        }
        for agent in agents
    ]
    lines = [*agent_lines(agents, leases, max(LEAST_WIDTH, width())), *nightly_lines(nightly_runs)]
    show({"schema": 2, "agents": answer, "nightly_runs": nightly_runs}, lines)


@agent_command.command("drain", short_help="Finish the running jobs of a host, then end.")
@click.argument("name", metavar="HOST")
@json_option()
def drain(name: str) -> None:
    """Let the agent of a host finish its running jobs, take no others, and end.

    Jobs that it has not begun are left to other hosts.
    """
    _require_shared(configured())
    with opened(existing=True) as (_, store):
        if not store.cluster.drain(name):
            known = [agent.name for agent in store.cluster.agents()]
            raise UnknownNameError("agent", name, known, "('farm lab agent list' shows them)")
    show({"agent": name}, [f"{name} ends as soon as its running jobs have finished"])


def agent_lines(agents: Sequence[Agent], leases: dict[str, Lease], columns: int) -> Iterator[str]:
    """Yield the lines about agents and their devices, of at most `columns` characters. Pure."""
    if not agents:
        yield "no agent: 'farm lab agent' on a host with devices starts one"
    for agent in agents:
        facts = agent.facts
        state = f"silent for {short_age(agent.heartbeat_ms)}" if not agent.alive else ""
        state = state or ("ends when it is done" if agent.is_draining or facts.draining else "there")
        line = f"{agent.name}: {state}, for {agent.user}, farm {facts.version}, process {facts.pid}"
        yield from wrapped(line, columns)
        for device in facts.devices:
            lease = leases.get(device.id)
            holder = f"with {lease.user}: {lease.purpose}" if lease is not None and lease.token else "free"
            what = " ".join(filter(None, (device.soc, device.kind, *device.labels)))
            line = f"{_INDENT}{device.called} ({what or 'not asked'}): {device.refused or holder}"
            yield from wrapped(line, columns)
        for one in facts.offered:
            yield from wrapped(f"{_INDENT}compiles {one.backend} with {one.name}", columns)


def _require_shared(config: Config) -> None:
    from farm.dispatch.cluster.client.devices import require_shared

    require_shared(config.is_shared)


# `farm lab queue`: waiting runs and commands of a shared farm, with the reason and the expected time.


# Names come last, since they are cut when the terminal is narrow.
_HEAD = ("run", "age", "runs on", "waiting", "builds", "begins", "ends", "user")


@click.command("queue")
@click.option("--mine", is_flag=True, help="Only your runs and commands.")
@json_option()
def queue_command(*, mine: bool) -> None:
    """Show the unfinished runs on a shared farm, and other waiting commands.

    The jobs of a run are divided into shards of about a minute. For each run
    the table shows the number of devices at work, of waiting shards and of
    bundles to compile, and the estimated start of its next shard and end of the
    run, from earlier durations. Reasons for waiting stand below the run.
    Commands that wait for devices without a submitted run are listed last.

    A person comes before a nightly run; among users of the same urgency the
    user with the fewest devices is next: see docs/explanation/leases.md.
    farm lab quota limits the devices of a user.
    """
    from farm.cli.devices.devices import waiting_lines
    from farm.serve.pages.queue import QueueQuery, queue_page

    with reading() as reader:
        facts = reader.read(queue_page, QueueQuery(mine=mine))
    at_most, now_ms = max(width(), LEAST_WIDTH), time.time_ns() // 1_000_000
    lines = [*queue_lines(facts.runs, now_ms, at_most), *waiting_lines(facts.waiting, facts.wanted, at_most)]
    answer = {"runs": facts.runs, "waiting": facts.waiting}
    show({"schema": 2, **answer}, lines or ["nothing waits and nothing runs"])


def queue_lines(runs: Sequence[QueuedRun], now_ms: int, at_most: int) -> Iterator[str]:
    """Yield the lines about submitted runs, none longer than `at_most`."""
    if not runs:
        return
    head, *rows = columns([_HEAD, *(_cells(run, now_ms) for run in runs)])
    yield head[:at_most]
    for run, row in zip(runs, rows, strict=True):
        yield row if len(row) <= at_most else f"{row[: at_most - 1]}…"
        for why in run.why:
            yield from wrapped(f"{_INDENT}{one_line(why)}", at_most, _INDENT)


def _cells(run: QueuedRun, now_ms: int) -> list[str]:
    begins, ends = _about(run.starts_s), _about(run.ends_s)
    if run.cancelled:
        begins, ends = "-", "cancelled"
    elif run.running:
        begins = "runs"
    user = one_line(run.user)
    return [
        run.run_id,
        _about(max(0.0, (now_ms - run.submitted_ms) / 1000)),
        str(run.running),
        str(run.waiting),
        str(run.lacking),
        begins,
        ends,
        f"{user}, nightly run" if run.priority == "nightly" else user,
    ]


def _about(seconds: float | None) -> str:
    """Return a time as one rounded number, since it is an estimate."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return "now"
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"
