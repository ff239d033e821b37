"""Hosts with their devices and agents, and the page of a host."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from farm.base.errors import UnknownNameError
from farm.base.grouping import grouped
from farm.dispatch.pool.inventory import DeviceRow
from farm.report.model import format as fmt
from farm.serve.page import Facts, Text
from farm.serve.pages.progress import device_rows
from farm.store.cluster.records import Agent
from farm.store.queries.browse import ListedRun, RunFilter
from farm.store.store import Store

HERE = "this machine"
"""Name of the host of devices that no agent has and that belong to no other host."""
_RUNS = 20


class HostsQuery(msgspec.Struct, frozen=True):
    """Parameters of the hosts: none."""


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """Host with its devices."""

    name: str
    devices: list[DeviceRow]
    agent: Agent | None
    """Agent of a shared farm; None without one."""
    runs: int
    """Runs that it started."""
    last_ms: int
    """Start of its newest run; 0 without one."""


class HostsFacts(Facts, frozen=True, kw_only=True):
    """Hosts of devices, of agents and of runs."""

    path: ClassVar[str] = "/hosts"
    template: ClassVar[str] = "hosts.html.j2"
    hosts: list[HostRow]


class HostQuery(msgspec.Struct, frozen=True):
    """A host."""

    host: Text


class HostFacts(Facts, frozen=True, kw_only=True):
    """Host with devices, agent and runs."""

    path: ClassVar[str] = "/hosts/{host:str}"
    template: ClassVar[str] = "host.html.j2"
    host: HostRow
    runs: list[ListedRun]
    """Newest runs that it started."""


def hosts_page(store: Store, query: HostsQuery) -> HostsFacts:
    """Return the hosts of devices, agents and runs."""
    del query
    hosts = host_rows(store)
    return HostsFacts(title=fmt.plural(len(hosts), "host"), hosts=hosts)


def host_page(store: Store, query: HostQuery) -> HostFacts:
    """Return a host with its devices and newest runs."""
    hosts = {row.name: row for row in host_rows(store)}
    if query.host not in hosts:
        raise UnknownNameError("host", query.host, hosts)
    runs, _ = store.browse.runs(RunFilter(host=query.host), _RUNS)
    return HostFacts(title=f"Host {query.host}", host=hosts[query.host], runs=runs)


def host_rows(store: Store) -> list[HostRow]:
    """Return every host, sorted by name."""
    agents = {agent.name: agent for agent in store.cluster.agents()} if store.is_shared else {}
    of_agent = {device.id: agent.name for agent in agents.values() for device in agent.facts.devices}
    devices = grouped((of_agent.get(row.id) or row.host or HERE, row) for row in device_rows(store))
    used = {host.name: host for host in store.browse.hosts()}
    return [
        HostRow(
            name=name,
            devices=devices.get(name, []),
            agent=agents.get(name),
            runs=used[name].runs if name in used else 0,
            last_ms=used[name].last_ms if name in used else 0,
        )
        for name in sorted({*devices, *agents, *used})
    ]
