"""Terms between hosts of a shared farm: settings for the jobs of a run, and ids of toolchains."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from farm.base.backends.registry import BACKENDS
from farm.base.errors import NoDeviceError
from farm.builds.bundles.key import HOST_CPU, facts_of, recipe_digest, relevant_versions
from farm.builds.runtime.native import Mode
from farm.builds.runtime.runtime import Runtime
from farm.dispatch.request.profiling import Execution
from farm.results.analysis.history import changed_facts, fact_line
from farm.store.cluster.records import Agent, OfferedToolchain, PlannedJob

# Terms of a submitted run: how its jobs are executed, stored with its order and equal for every shard.


class RemoteRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """Runtime of devices of other hosts, with its files in the artifact store."""

    soc: str
    device_kind: str
    """Kind of its devices: `virtual` or `hardware`."""
    os: str
    runtime: Runtime
    """The runtime, without local files: `hashes` has the SHA-256 by path on the device."""


class WorkTerms(Execution, frozen=True, kw_only=True):
    """Contents of a `farm.dispatch.request.request.RunPlan` except for jobs and devices."""

    protocol: int
    toolchain: str
    """Id of the toolchain, by content."""
    backend: str
    mode: Mode
    runtimes: tuple[RemoteRuntime, ...]
    health_checks: tuple[PlannedJob, ...]
    """Health checks of devices, one for each SoC."""
    budget_s: float | None = None


def decode_terms(text: bytes) -> WorkTerms:
    """Return the terms of an order. Raises msgspec.DecodeError for terms of another version of farm."""
    return msgspec.json.decode(text, type=WorkTerms)


# Id of a toolchain, by content and for one backend, which a build host and a client must have in common.
#
# A bundle's key has three parts: the job, the code of its case, and the rest: the versions and content of the
# compiler's packages, and farm's own recipe. The rest is the same for every job of a run, and its hash is the id
# here. Hosts with the same wheels have the same id in any folder, and so has a checkout of the same content. The id
# leaves out the code of a case and the packages that it imports: a build host checks them by computing the key anew.


_RECIPE = "recipe"
_SHOWN_HASH = 16
_MOST_HOSTS = 4


def toolchain_id(versions: Mapping[str, str], backend: str) -> str:
    """Return the id of a toolchain for `backend`, as hex; `versions` as in `builds.toolchains.toolchain.Toolchain`.

    HOST_CPU is no part of it: one toolchain compiles for both kinds of hosts.
    """
    parts = {"versions": _shared(versions, backend), _RECIPE: recipe_digest(backend)}
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()


def offered(name: str, versions: Mapping[str, str]) -> tuple[OfferedToolchain, ...]:
    """Return the offers of a host with one toolchain: an id for each backend."""
    return tuple(
        OfferedToolchain(toolchain_id(versions, backend), name, backend, _facts(versions, backend))
        for backend in BACKENDS
    )


def require_offered(agents: Iterable[Agent], versions: Mapping[str, str], backend: str) -> list[str]:
    """Return the names of the living build hosts that compile with this toolchain, sorted.

    Raises NoDeviceError without such a host, with the differences of the toolchains on living hosts.
    """
    building = [agent for agent in agents if agent.alive and agent.facts.toolchains]
    wanted = toolchain_id(versions, backend)
    hosts = sorted(agent.name for agent in building if wanted in agent.facts.toolchains)
    if hosts:
        return hosts
    lines = [f"{agent.name} ({', '.join(_differences(agent, versions, backend))})" for agent in building]
    more = f" and {len(lines) - _MOST_HOSTS} more" if len(lines) > _MOST_HOSTS else ""
    why = f"other toolchains are on {'; '.join(lines[:_MOST_HOSTS])}{more}" if lines else "no build host lives"
    raise NoDeviceError(
        f"no build host compiles with this toolchain for {backend}: {why}: compile here with --build-on here, "
        "install the same wheels on a build host, or name one of its toolchains with --toolchain"
    )


def _differences(agent: Agent, versions: Mapping[str, str], backend: str) -> Sequence[str]:
    """Return the differences of each toolchain of a host from this one."""
    own = _facts(versions, backend)
    found = []
    for one in agent.facts.offered:
        if one.backend == backend:
            changes = changed_facts(one.facts, own)
            lines = [
                f"farm's recipe is another: farm {agent.facts.version}" if name == _RECIPE else fact_line(name, *pair)
                for name, pair in changes.items()
            ]
            found.append(f"{one.name or 'default'}: {', '.join(lines) or 'other content'}")
    return found or ["none for this backend"]


def _facts(versions: Mapping[str, str], backend: str) -> dict[str, str]:
    return {**facts_of(_shared(versions, backend)), _RECIPE: recipe_digest(backend)[:_SHOWN_HASH]}


def _shared(versions: Mapping[str, str], backend: str) -> dict[str, str]:
    return {name: version for name, version in relevant_versions(backend, versions).items() if name != HOST_CPU}
