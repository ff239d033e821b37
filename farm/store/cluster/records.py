"""What the rows of a shared farm say. Times are on the database's clock: epoch, milliseconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from farm.builds.compile.protocol import BuildReply
from farm.policy.retries import Tried
from farm.policy.situation import Lease, Priority, Situation
from farm.results.attempt import Attempt
from farm.store.records import ArtifactRecord
from farm.suites.suite import Job

OrderState = Literal["open", "cancelled", "ended"]
BuildState = Literal["waiting", "built", "failed"]
NightState = Literal["running", "ended", "stopped", "lost", "missed", "skipped"]


class ShardJob(msgspec.Struct, frozen=True):
    """A job of a shard, and the key of its bundle."""

    job: Job
    key: str
    expected_s: float = 0.0
    """Wall time that its history says it takes on a device; 0 is not known."""
    failed_before: bool = False
    """Its newest verdict before this run, on such devices, was failed."""
    history: tuple[Tried, ...] = ()
    """What other devices found, oldest first: another is to try it."""


class NewShard(msgspec.Struct, frozen=True):
    """Jobs that one device runs one after the other, about a minute of them."""

    soc: str
    jobs: tuple[ShardJob, ...]
    expected_s: float
    position: int
    """Among the shards of its run: the smaller goes first."""
    avoid: tuple[str, ...] = ()
    """Ids of devices that do not get it: they have tried it."""
    needs: tuple[str, ...] = ()
    """Keys of bundles that it waits for besides those of its jobs: the canary of its SoC."""


class NewBuild(msgspec.Struct, frozen=True):
    """A bundle that a build host makes."""

    key: str
    toolchain: str
    """The id of the toolchain, by content: `farm.dispatch.cluster.toolchain_id`."""
    job: Job
    versions: dict[str, str]
    source: str = ""
    """SHA-256 of the archive with the code of the case; empty for code that farm ships."""
    position: int = 0
    anew: bool = False
    """It is made although a build host has it."""


class NewOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is submitted."""

    run_id: str
    user: str
    priority: Priority
    purpose: str
    """The command, for people."""
    terms: bytes
    """JSON of `farm.dispatch.cluster.terms.WorkTerms`: how its jobs are run. Opaque here."""
    devices: tuple[str, ...] = ()
    """Names, serials or ids of the devices that it may use; empty for all."""
    labels: tuple[str, ...] = ()
    """Every one of which a device has to have."""
    most_devices: int | None = None
    """Of each SoC, at once; None for all that are free."""
    classes: tuple[str, ...] = ()
    """What it has a runtime for: `SM8650/hardware/android`; empty for every device."""
    most_failures: int | None = None
    """After so many failed jobs nothing else begins; None for no end."""
    until_ms: int | None = None
    """After that nothing begins; None for no end."""
    budget_s: float | None = None
    """So long from now, on the database's clock, in place of `until_ms`."""
    protocol: int
    """Of its terms: agents with another one do not get it."""


class Order(msgspec.Struct, frozen=True):
    """A run on the shared farm as it is now."""

    run_id: str
    user: str
    priority: Priority
    purpose: str
    state: OrderState
    submitted_ms: int
    cancelled_by: str
    terms: bytes
    devices: tuple[str, ...]
    labels: tuple[str, ...]
    most_devices: int | None
    waiting: int
    """Shards that wait."""
    held: int
    """Shards that a device runs."""
    ended: int
    lacking: int
    """Bundles that are not made yet."""
    classes: tuple[str, ...] = ()
    is_late: bool = False
    """Its time was over before it ended, or is now."""


class AgentId(msgspec.Struct, frozen=True):
    """One life of an agent: what a former life of the same name says is refused."""

    name: str
    token: str
    """Of its leases; new with every life."""
    may_lease: bool = True
    """True unless the login belongs to a build host, which holds no devices and shards."""


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent says of itself and of the devices of its host with every heartbeat."""

    host: str
    pid: int
    version: str
    """Of farm, for people."""
    protocol: int
    """Agents and clients with another one are refused."""
    draining: bool = False
    devices: tuple[AgentDevice, ...] = ()
    toolchains: tuple[str, ...] = ()
    """Ids of the toolchains that it builds with; empty for a host that does not build."""
    offered: tuple[OfferedToolchain, ...] = ()
    """What these are, for people."""


class OfferedToolchain(msgspec.Struct, frozen=True):
    """A toolchain that a build host compiles with, for one backend."""

    id: str
    """By content: `farm.dispatch.cluster.toolchain_id`."""
    name: str
    """As its host calls it."""
    backend: str
    facts: dict[str, str] = {}
    """Versions and the beginnings of hashes: what another toolchain differs in."""


class AgentDevice(msgspec.Struct, frozen=True):
    """A device of an agent's host."""

    id: str
    serial: str
    soc: str
    kind: str
    os: str
    labels: tuple[str, ...] = ()
    name: str = ""
    refused: str = ""
    """Why the agent cannot use it now; empty when it can."""

    @property
    def called(self) -> str:
        """What messages call it."""
        return self.name or self.serial


class Agent(msgspec.Struct, frozen=True):
    """An agent as others see it."""

    name: str
    user: str
    started_ms: int
    heartbeat_ms: int
    alive: bool
    facts: AgentFacts
    is_draining: bool = False
    """It takes no more work."""


class HeldShard(msgspec.Struct, frozen=True):
    """A shard that a device of an agent is to run, under a lease."""

    id: int
    run_id: str
    jobs: tuple[ShardJob, ...]
    """Those that are left."""
    lease: Lease
    """Of the device, in the name of the run's user. Its fence is that of the shard."""
    terms: bytes
    others: tuple[str, ...] = ()
    """Ids of other living devices that the run may use: they could try what fails here."""
    builds: dict[str, Build] = {}
    """By key, of all `jobs`."""


class Build(msgspec.Struct, frozen=True):
    """A bundle as others find it."""

    key: str
    state: BuildState
    archive: str = ""
    """SHA-256 of its archive in the artifacts' store, once it is built."""
    nbytes: int = 0
    reply: BuildReply | None = None
    log: str = ""
    """The end of what the compiler printed, of a build that failed."""


class HeldBuild(msgspec.Struct, frozen=True):
    """Bundle that a build host makes, with its job of Procrastinate."""

    task: NewBuild
    job: int
    attempt: int
    """Number of times that the job was put back: another worker has had it where that differs."""


class ShardResult(msgspec.Struct, frozen=True):
    """What a device found out about one job of a shard."""

    shard: int
    device: str
    fence: int
    job_id: str
    attempts: tuple[Attempt, ...]
    """Oldest first; the artifacts belong to the last."""
    artifacts: tuple[ArtifactRecord, ...] = ()
    repeat: tuple[Tried, ...] = ()
    """All of its history, where another device is to try the job; empty where it has its verdict."""
    avoid: tuple[str, ...] = ()
    """Ids of devices that cannot run the job, if another device of the same host is to try it."""
    outvoted: tuple[str, ...] = ()
    """Devices, as the history names them, on which the job had failed, if it passed here."""


class Claimed(msgspec.Struct, frozen=True):
    """Shards that an agent has from answered claims."""

    shards: frozenset[tuple[int, int]] = frozenset()
    """Id and fence of each."""


class Minded(msgspec.Struct, frozen=True):
    """What an agent learns with a heartbeat."""

    lost: tuple[str, ...] = ()
    """Devices whose leases are not the agent's any more: stop at once, nothing of it is recorded."""
    wanted: dict[str, str] = {}
    """Devices that others have a better right to, and who: hand over after the running job."""
    cancelled: tuple[str, ...] = ()
    """Runs of which nothing is wanted any more: stop at once."""
    stopped: tuple[str, ...] = ()
    """Runs of which nothing more may begin, as they are late or too much has failed: finish what runs."""
    claimable: tuple[str, ...] = ()
    """SoCs of idle devices of the agent for which there is work."""
    replaced: bool = False
    """Another agent has this one's name: stop."""
    drain: bool = False
    """Somebody wants it to take no more work, and to end when what it has is done."""
    claimed: Claimed = Claimed()
    """Shards of the agent that the store still counts as held."""


class Mended(msgspec.Struct, frozen=True):
    """What was put right."""

    lines: tuple[str, ...] = ()
    """What was done, for people."""
    is_busy: bool = False
    """There are runs that go on."""


class NightStart(msgspec.Struct, frozen=True):
    """A night that was due once."""

    name: str
    due_ms: int
    state: NightState
    agent: str
    """Who started it, or found that it was not to be started."""
    started_ms: int
    ended_ms: int | None
    exit_code: int | None
    """Of `farm nightly`."""
    why: str
    """Why it was left out, or what it said at its end."""


class RunProgress(msgspec.Struct, frozen=True):
    """What who follows a submitted run has not seen yet, and what goes on."""

    last: int
    """What to look from the next time."""
    attempts: tuple[dict[str, Any], ...]
    """Oldest first, as listeners of a run are told of them."""
    retried: frozenset[str]
    """Jobs that another device is to try."""
    running: dict[str, str]
    """The job that each device runs, by what the device is called."""
    building: tuple[str, ...]
    """Jobs whose bundles are being made."""
    built: int
    """Bundles that were made, or cannot be."""
    to_build: int
    """Of so many that were not there."""
    order: Order
    finished: bool
    exit_code: int | None


class ShardSum(msgspec.Struct, frozen=True):
    """The shards of a submitted run for one SoC, in sums."""

    run_id: str
    soc: str
    waiting: int
    waiting_s: float
    held: int
    held_s: float
    """What they still take, as expected."""


class QueueView(msgspec.Struct, frozen=True):
    """All that is said of who waits for what."""

    now_ms: int
    orders: tuple[Order, ...]
    """Those that have not ended, the most urgent first."""
    situations: dict[str, Situation]
    """By SoC, where something waits or is held."""
    sums: tuple[ShardSum, ...]
    quotas: dict[str, int]
    agents: tuple[Agent, ...]
