"""`farm lab agent`: executes jobs and compiles on a host for a shared farm."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from farm.base.config.settings import Config
from farm.base.errors import UnknownNameError, UsageError
from farm.cli.options import SuggestingGroup, config_option, configured, json_option
from farm.cli.output import echo, is_verbose, opened, show, width
from farm.report.model.format import short_age
from farm.report.terminal.layout import LEAST_WIDTH, wrapped

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator, Sequence

    from farm.policy.situation import Lease
    from farm.store.cluster.records import Agent

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
def command(context: click.Context, name: str, *, builds: bool | None, no_devices: bool, log_form: str) -> None:
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
    from farm.base.log_setup import (
        JournalFormatter,
        JsonFormatter,
        LineFormatter,
        RecordHandler,
        begin_logging,
        is_journal,
    )

    formatter: logging.Formatter
    if form == "json":
        formatter = JsonFormatter(agent=name)
    else:
        formatter = JournalFormatter() if is_journal(_STDERR) else LineFormatter("%H:%M:%S")
    begin_logging(RecordHandler(partial(echo, err=True), formatter), verbose=is_verbose())


@command.command("list", short_help="List hosts, their devices and last nightly runs.")
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


@command.command("drain", short_help="Finish the running jobs of a host, then end.")
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
