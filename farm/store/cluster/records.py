"""Records of a shared farm. Times are on the database's clock: epoch, milliseconds."""

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
NightlyState = Literal["running", "ended", "stopped", "lost", "missed", "skipped"]


class PlannedJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Job of a run or a shard with the key of its bundle."""

    job: Job
    key: str
    expected_s: float = 0.0
    """Expected wall time on a device, from its history; 0 if unknown."""
    failed_before: bool = False
    """True if the newest verdict before this run, on such devices, is `failed`."""
    history: tuple[Tried, ...] = ()
    """Results of other devices, oldest first, for a job that a further device has to try."""
    cached: bool = False
    """True if this machine had the bundle when the run, or its shard, began here."""


class NewShard(msgspec.Struct, frozen=True):
    """Shard to insert: about a minute of jobs that one device runs one after the other."""

    soc: str
    jobs: tuple[PlannedJob, ...]
    expected_s: float
    position: int
    """Place among the shards of its run: smaller numbers go first."""
    avoid: tuple[str, ...] = ()
    """Ids of devices that do not get the shard because they have tried it."""
    needs: tuple[str, ...] = ()
    """Keys of bundles that the shard waits for besides its jobs' bundles: the health check of its SoC."""


class NewBuild(msgspec.Struct, frozen=True):
    """Bundle for a build host to make."""

    key: str
    toolchain: str
    """Id of the toolchain, by content: `farm.dispatch.cluster.terms`."""
    job: Job
    versions: dict[str, str]
    source: str = ""
    """SHA-256 of the archive with the code of the case; empty for code that farm ships."""
    position: int = 0
    anew: bool = False
    """True for a bundle to build again although it exists."""


class NewOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Run to submit."""

    run_id: str
    user: str
    priority: Priority
    purpose: str
    """Command, for people."""
    terms: bytes
    """JSON of `farm.dispatch.cluster.terms.WorkTerms`: settings for its jobs. Opaque here."""
    devices: tuple[str, ...] = ()
    """Names, serials or ids of the devices that the run may use; empty for all."""
    labels: tuple[str, ...] = ()
    """Labels that a device needs, all of them."""
    most_devices: int | None = None
    """Most devices of each SoC at once; None for all free ones."""
    classes: tuple[str, ...] = ()
    """Kinds of devices that the run has a runtime for: `SM8650/hardware/android`; empty for every device."""
    most_failures: int | None = None
    """Number of failed jobs after which nothing else begins; None for no limit."""
    budget_s: float | None = None
    """Seconds from the submission on, by the database's clock, after which nothing begins; None for no limit."""
    protocol: int
    """Protocol of the terms: agents with another protocol do not get the run."""


class Order(msgspec.Struct, frozen=True):
    """Present state of a run on the shared farm."""

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
    """Waiting shards."""
    held: int
    """Shards that a device runs."""
    ended: int
    lacking: int
    """Bundles that are not built yet, summed over the shards."""
    classes: tuple[str, ...] = ()
    is_late: bool = False
    """True if the order reached `until_ms` before its end."""


class AgentId(msgspec.Struct, frozen=True):
    """Registered process of an agent; calls of a former process of the same name are refused."""

    name: str
    token: str
    """Token of its leases, new with every registration."""
    may_lease: bool = True
    """True unless the login belongs to a build host, which holds no devices and shards."""


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an agent and the devices of its host."""

    host: str
    pid: int
    version: str
    """Version of farm, for people."""
    protocol: int
    """Version of the messages between hosts: agents and clients with another version are refused."""
    draining: bool = False
    devices: tuple[AgentDevice, ...] = ()
    toolchains: tuple[str, ...] = ()
    """Ids of the toolchains of a build host; empty for other hosts."""
    offered: tuple[OfferedToolchain, ...] = ()
    """Descriptions of these toolchains, for people."""


class OfferedToolchain(msgspec.Struct, frozen=True):
    """Toolchain of a build host for one backend."""

    id: str
    """Id by content: `farm.dispatch.cluster.terms`."""
    name: str
    """Name on its host."""
    backend: str
    facts: dict[str, str] = {}
    """Versions and the first digits of hashes, which distinguish toolchains."""


class AgentDevice(msgspec.Struct, frozen=True):
    """Device of an agent's host."""

    id: str
    serial: str
    soc: str
    kind: str
    os: str
    labels: tuple[str, ...] = ()
    name: str = ""
    refused: str = ""
    """Reason why the agent cannot use the device now; empty for a usable device."""

    @property
    def called(self) -> str:
        """Name of the device in messages."""
        return self.name or self.serial


class Agent(msgspec.Struct, frozen=True):
    """Agent in the view of others."""

    name: str
    user: str
    started_ms: int
    heartbeat_ms: int
    alive: bool
    facts: AgentFacts
    is_draining: bool = False
    """True for an agent that takes no new work."""


class HeldShard(msgspec.Struct, frozen=True):
    """Shard for a device of an agent to run, under a lease."""

    id: int
    run_id: str
    jobs: tuple[PlannedJob, ...]
    """Jobs without a result."""
    lease: Lease
    """Lease of the device, in the name of the run's user, with the same fence as the shard."""
    terms: bytes
    others: tuple[str, ...] = ()
    """Ids of other living devices that the run may use: they could try the jobs that fail here."""
    builds: dict[str, Build] = {}
    """Builds of all `jobs`, by key."""


class Build(msgspec.Struct, frozen=True):
    """Bundle with the state of its build."""

    key: str
    state: BuildState
    archive: str = ""
    """SHA-256 of its archive in the artifacts' store, once built."""
    nbytes: int = 0
    reply: BuildReply | None = None
    log: str = ""
    """End of the compiler's output of a failed build."""


class HeldBuild(msgspec.Struct, frozen=True):
    """Bundle that a build host makes, with its job of Procrastinate."""

    task: NewBuild
    job: int
    attempt: int
    """Number of times that the job was put back: a different number shows that another worker had it."""


class ShardResult(msgspec.Struct, frozen=True):
    """Result of a device for one job of a shard."""

    shard: int
    device: str
    fence: int
    job_id: str
    attempts: tuple[Attempt, ...]
    """Attempts, oldest first; the artifacts belong to the last."""
    artifacts: tuple[ArtifactRecord, ...] = ()
    repeat: tuple[Tried, ...] = ()
    """Whole history of a job that is tried again; empty for a job with its verdict."""
    avoid: tuple[str, ...] = ()
    """Ids of devices that cannot run the job, if another device of the same host has to try it."""
    outvoted: tuple[str, ...] = ()
    """Ids of devices on which the job had failed, if it passed here."""

    @property
    def attempts_with_artifacts(self) -> list[tuple[Attempt, tuple[ArtifactRecord, ...]]]:
        """Attempts, oldest first, each with its artifacts."""
        last = len(self.attempts)
        return [(one, self.artifacts if number == last else ()) for number, one in enumerate(self.attempts, 1)]


Claimed = frozenset[tuple[int, int]]
"""Shards of an agent from answered claims, each by id and fence."""


class HeartbeatReply(msgspec.Struct, frozen=True):
    """Answer to an agent's heartbeat."""

    lost: tuple[str, ...] = ()
    """Devices whose leases the agent has lost: stop at once, the store refuses their results."""
    wanted: dict[str, str] = {}
    """Devices that others have a better right to, with the user: hand over after the running job."""
    cancelled: tuple[str, ...] = ()
    """Cancelled runs: stop at once."""
    stopped: tuple[str, ...] = ()
    """Runs at their time limit or failure limit: finish the running jobs and begin no others."""
    claimable: tuple[str, ...] = ()
    """SoCs of idle devices of the agent for which there is work."""
    replaced: bool = False
    """True if another agent has taken over this one's name: stop."""
    drain: bool = False
    """True for an agent that has to finish its work, take no new work and end."""
    claimed: Claimed = frozenset()
    """Shards of the agent that the store still counts as held."""


class Recovered(msgspec.Struct, frozen=True):
    """Result of a repair pass."""

    lines: tuple[str, ...] = ()
    """Repairs, for people."""
    is_busy: bool = False
    """True while runs go on."""


class NightlyStart(msgspec.Struct, frozen=True):
    """Nightly run at one due time."""

    name: str
    due_ms: int
    state: NightlyState
    agent: str
    """Agent that started the nightly run, or recorded the reason against it."""
    started_ms: int
    ended_ms: int | None
    exit_code: int | None
    """Exit code of `farm nightly`."""
    why: str
    """Reason why it was not started, or its last message."""


class RunProgress(msgspec.Struct, frozen=True):
    """News and present work of a submitted run, for its followers."""

    last: int
    """Argument `after` of the next look."""
    attempts: tuple[dict[str, Any], ...]
    """New attempts, oldest first, in the form for listeners of a run."""
    retried: frozenset[str]
    """Jobs that are tried again."""
    running: dict[str, str]
    """Running job by the name of the device."""
    building: tuple[str, ...]
    """Jobs whose bundles are being built."""
    built: int
    """Number of requested bundles whose build has ended, with or without success."""
    to_build: int
    """Number of requested bundles."""
    order: Order
    finished: bool
    exit_code: int | None


class ShardSum(msgspec.Struct, frozen=True):
    """Sums over the shards of a submitted run for one SoC."""

    run_id: str
    soc: str
    waiting: int
    waiting_s: float
    held: int
    held_s: float
    """Expected remaining time of the held shards."""


class QueueView(msgspec.Struct, frozen=True):
    """Queue of a shared farm: open orders, devices, quotas and agents."""

    now_ms: int
    orders: tuple[Order, ...]
    """Orders that have not ended, the most urgent first."""
    situations: dict[str, Situation]
    """Situations by SoC, for SoCs with waiting or held shards."""
    sums: tuple[ShardSum, ...]
    quotas: dict[str, int]
    agents: tuple[Agent, ...]
