"""Builds of `farm lab agent --build`: the agent takes build tasks, makes their bundles and uploads them.

A slot is a thread with one builder process, as in the pool of a single machine, and one worker of Procrastinate. A free
slot takes one task in one transaction, so that no task waits behind a long compile on one host while another host is
idle. A slot is no `procrastinate.worker.Worker`: that class aborts its jobs when a connection breaks, while their
compiles go on. Users' code is imported in builder processes alone.

Toolchains are farm's own environment and the ones in farm.toml, read again every half minute.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from farm.base.config.toolchains import DEFAULT
from farm.base.errors import (
    ArtifactLostError,
    ArtifactsError,
    FarmError,
    LeaseLostError,
    RowRefusedError,
    StoreError,
    StoreLostError,
    UsageError,
)
from farm.base.files import own_folder
from farm.base.paths import data_folder
from farm.base.processes import Supervisor
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import HOST_CPU, bundle_key, named_files, recipe_digest, recipe_now, source_as_of_ns
from farm.builds.compile.pool import BuilderGate, BuilderSettings, BuilderSlot, sweep
from farm.builds.compile.processes import BuilderTemplate
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.dispatch.cluster.files import failed_build, sent_build, unpack_source
from farm.dispatch.cluster.terms import offered
from farm.dispatch.device_forks import SECRETS

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.base.config.settings import Config
    from farm.builds.bundles.bundle import Bundle
    from farm.builds.toolchains.toolchain import Toolchain
    from farm.store.cluster.records import AgentId, HeldBuild, NewBuild, OfferedToolchain
    from farm.store.objects.objects import Objects
    from farm.store.store import Store
    from farm.suites.suite import Case, Job

logger = logging.getLogger(__name__)

# A look takes 0.2 s of the processor for each toolchain (2-core machine). Until the next look, runs of a checkout that
# has just changed on a build host are refused, as no host has that toolchain.
_LOOK_EVERY_S = 30.0
_MISSING = "missing"


_OF_THE_AGENT = ("SSH_AUTH_SOCK",)
"""Environment variables of an agent, beside SECRETS, that give access and that no builder needs."""


class HostToolchains:
    """Toolchains of this host. Any thread may call the methods; one thread at a time looks."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._looking = threading.Lock()
        self._tools: dict[str, Toolchain] = {}
        """Toolchains by name."""
        self._offered: tuple[OfferedToolchain, ...] = ()
        self._problems: dict[str, str] = {}
        self._looked_s = float("-inf")

    @property
    def offered(self) -> tuple[OfferedToolchain, ...]:
        """Offered toolchains of this host as of the last look; none before the first."""
        return self._offered

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the offered toolchains, sorted."""
        return tuple(sorted(one.id for one in self._offered))

    def find(self, toolchain: str) -> Toolchain | None:
        """Return the toolchain of an id; None if this host does not have it, or no longer has it."""
        return next((self._tools.get(one.name) for one in self._offered if one.id == toolchain), None)

    def look(self, *, at_once: bool = False) -> None:
        """Read the toolchains anew if the last look is half a minute old, or always with `at_once`.

        An unusable toolchain is logged once and left out. Environments of releases are created here.
        """
        with self._looking:
            if not at_once and time.monotonic() < self._looked_s + _LOOK_EVERY_S:
                return
            found = {name: tools for name in (DEFAULT, *self._config.toolchains) if (tools := self._look_at(name))}
            # Keep the objects of unchanged toolchains: a builder takes another object for another toolchain.
            same = {} if at_once else self._tools
            self._tools = {
                name: same[name] if name in same and same[name].versions == one.versions else one
                for name, one in found.items()
            }
            self._publish()
            self._looked_s = time.monotonic()

    def _publish(self) -> None:
        known: dict[str, OfferedToolchain] = {}
        for name, tools in self._tools.items():
            for one in offered(name, tools.versions):
                if recipe_now(one.backend) != recipe_digest(one.backend):
                    # Builders that start now would compile by another recipe than the one in the keys.
                    problem = (
                        f"farm was upgraded: restart this agent, which builds nothing for {one.backend} until then"
                    )
                    self._warn_once(one.backend, problem)
                else:
                    known.setdefault(one.id, one)
        self._offered = tuple(known.values())

    def _look_at(self, name: str) -> Toolchain | None:
        from farm.builds.toolchains.selection import prepare, use_toolchain

        try:
            tools = prepare(use_toolchain(self._config, name))
        except FarmError as error:
            self._warn_once(name, f"toolchain {name} is not offered: {error}")
            return None
        lacking = [package for package in ("torch", "executorch") if tools.versions.get(package) == _MISSING]
        if lacking:
            self._warn_once(name, f"toolchain {name} is not offered: it has no {' and no '.join(lacking)}")
            return None
        self._problems.pop(name, None)
        # A builder imports developers' code, which must not read the agent's secrets.
        env = tools.compiler.env | dict.fromkeys((*SECRETS, *_OF_THE_AGENT), "")
        return msgspec.structs.replace(tools, name=name, compiler=msgspec.structs.replace(tools.compiler, env=env))

    def _warn_once(self, subject: str, problem: str) -> None:
        if self._problems.get(subject) != problem:
            self._problems[subject] = problem
            logger.warning(problem)


# Legal module names of a manifest: a path may reach the folder beside the suite's, but no further.
_MODULE = re.compile(r"(\.{0,2}[\w-]+(\.[\w-]+)*:[\w.]+)?")
_HOST_CPUS = ("arm", "x86")


class RefusedBuildError(FarmError):
    """Refusal of this host to make a bundle of that key; another host may make it."""


def prepare_build(task: NewBuild, tools: Toolchain, job: Job, log: Path) -> BuildRequest:
    """Return the request to a builder; `job` is the task's job, with its code on this host.

    The key is computed anew: a bundle is only made under the key that this host's toolchain, farm and copy of the code
    give. Raises RefusedBuildError if that key differs from the key of `task`.
    """
    require_inside(job.case)
    wanted = task.versions.get(HOST_CPU, "")
    versions = tools.versions | ({HOST_CPU: wanted} if wanted in _HOST_CPUS else {})
    try:
        key = bundle_key(job, versions)
    except (OSError, UsageError) as error:
        raise RefusedBuildError(f"the code of {job.id} cannot be read: {error}") from error
    if key != task.key:
        raise RefusedBuildError(why_another_key(task, job))
    return BuildRequest(job, key, versions, str(log), anew=task.anew, suite_as_of_ns=source_as_of_ns(job))


def why_another_key(task: NewBuild, job: Job) -> str:
    """Return why a host with the toolchain of `task` computes another key, and the user's next step."""
    if not task.source:
        return (
            f"its suite {Path(job.case.folder).name or job.case.suite} is not as it was where {job.id} was submitted: "
            "install the same version of farm on both"
        )
    return (
        f"{job.id} has another key here: a package that its suite imports is not as it was where the run was "
        "submitted: install the same wheels on both, or submit with --build-on here"
    )


def job_here(task: NewBuild, unpack: Callable[[str, Job], Job]) -> Job:
    """Return the job of `task` with its code on this host: a suite of farm, or an archive unpacked by `unpack`.

    Raises RefusedBuildError if the farm of this host has no such suite.
    """
    if task.source:
        return unpack(task.source, task.job)
    case = task.job.case
    if not case.folder:
        return task.job
    folder = data_folder("test_suites") / Path(case.folder).name
    if not folder.is_dir():
        raise RefusedBuildError(f"farm has no suite {folder.name} here: install the version that submitted the run")
    return msgspec.structs.replace(task.job, case=msgspec.structs.replace(case, folder=str(folder)))


def require_inside(case: Case) -> None:
    """Raise RefusedBuildError for a case whose files or module lead out of its suite: no loaded manifest has such.

    The agent itself reads these files, to compute the key.
    """
    root = Path(case.folder).resolve()
    folders = case.generate.folders if case.generate is not None else ()
    for name in case.files:
        path = (root / name).resolve()
        is_there = path.is_dir() if name in folders else path.is_file()
        if not case.folder or not path.is_relative_to(root.parent) or not is_there:
            raise RefusedBuildError(f"{case.suite}/{case.name}: {name!r} is no file of its suite")
    for path in named_files(case):
        if not path.resolve().is_relative_to(root.parent):
            raise RefusedBuildError(f"{case.suite}/{case.name}: {path.name!r} is no file of its suite")
    if not _MODULE.fullmatch(case.module):
        raise RefusedBuildError(f"{case.suite}/{case.name}: {case.module!r} is no module")


# Space for a large model and the folder of its builder. With less, builds are left to hosts with more space.
_LEAST_FREE_BYTES = 512 * 2**20
# Waits between two tries to reach the database or the artifact store; finished builds are recorded afterwards.
_FIRST_WAIT_S, _MOST_WAIT_S = 0.5, 5.0
# An artifact store that refuses this host looks like an unreachable one: after this time another host gets the build.
_MOST_AWAY_S = 600.0
_NOT_RETRIED = (LeaseLostError, ArtifactLostError, RowRefusedError, StoreLostError)
# A builder that has loaded torch has half a gigabyte.
_IDLE_S = 600.0

_T = TypeVar("_T")


class BuildHost:
    """Builds of one agent. All methods but `begin`, `drain` and `stop` return at once; any thread may call them."""

    def __init__(self, config: Config, store: Store, objects: Objects) -> None:
        self._config, self._store, self._objects = config, store, objects
        self.toolchains = HostToolchains(config)
        self._cache = BundleCache(config.cache_dir)
        self._supervisor = Supervisor()
        self._stack = contextlib.ExitStack()
        self._gate = BuilderGate()
        self._changed = threading.Condition()
        self._due = False
        self._heartbeat_due = threading.Event()
        self._is_closed = False
        self._problem = ""
        self._draining = False
        self._agent: AgentId | None = None
        self._slots: list[_BuildSlot] = []
        self._toolchain_reader: threading.Thread | None = None
        self._is_full = False

    def begin(self, agent: AgentId) -> None:
        """Claim builds as `agent` from now on. A thread removes the leftovers of killed builders from the cache."""
        self._agent = agent
        folder = self._stack.enter_context(own_folder(self._config.cache_dir / "build-host", agent.token[:16]))
        settings = BuilderSettings.of(self._config, self._supervisor, folder)
        several = self._config.builders > 1
        template = BuilderTemplate(self._supervisor, self._config.cache_dir, folder) if several else None
        self._slots = [
            _BuildSlot(self, BuilderSlot(number, settings, self._gate, template), folder)
            for number in range(self._config.builders)
        ]
        for slot in self._slots:
            slot.start()
        self._heartbeat_thread = threading.Thread(target=self._keep_alive, daemon=True, name="build-heartbeats")
        self._heartbeat_thread.start()
        threading.Thread(target=sweep, args=(self._cache,), name="leftovers", daemon=True).start()
        self.wake()

    def wake(self) -> None:
        """Look for builds to claim: a hint or a message came, or a heartbeat interval has passed.

        A thread reads the toolchains again if the last look is half a minute old.
        """
        if self._toolchain_reader is None or not self._toolchain_reader.is_alive():
            self._toolchain_reader = threading.Thread(target=self.toolchains.look, name="toolchains", daemon=True)
            self._toolchain_reader.start()
        self.notify_slots()

    def send_heartbeat(self) -> None:
        """Send a heartbeat at once, as after the hint that a run was cancelled."""
        self._heartbeat_due.set()

    def _keep_alive(self) -> None:
        """Send heartbeats of the workers, stop builds that no open run wants, and look for others."""
        while not self._is_closed:
            self._heartbeat_due.wait(self._config.leases.heartbeat_s)
            self._heartbeat_due.clear()
            try:
                workers = [slot.worker for slot in self._slots if slot.worker is not None]
                abandoned = self._store.cluster.keep_workers(workers, self.making)
                self._problem = ""
            except StoreError as error:
                if str(error) != self._problem:
                    self._problem = str(error)
                    logger.warning("no heartbeat of builds: %s", error)
                continue
            for slot in self._slots:
                if slot.key in abandoned:
                    slot.abandon()
            self.wake()

    @property
    def making(self) -> tuple[str, ...]:
        """Keys of the bundles in progress: being compiled or uploaded."""
        return tuple(slot.key for slot in self._slots if slot.key)

    def drain(self) -> None:
        """Stop claiming, and return once all bundles in progress have been uploaded."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()
        for slot in self._slots:
            slot.join()
        self._close()

    def stop(self, *, put_back: bool = True) -> None:
        """End all builders at once; with `put_back` (not after the agent was replaced) others get their builds."""
        with self._changed:
            self._draining = True
            self._gate.stop()
            self._changed.notify_all()
        if not put_back:
            self._agent = None
        for slot in self._slots:
            slot.end()
        self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._heartbeat_due.set()
        for slot in self._slots:
            if slot.worker is not None:
                with contextlib.suppress(StoreError):
                    self._store.cluster.end_worker(slot.worker)
        self._supervisor.close()
        self._stack.close()

    def next_build(self, slot: _BuildSlot) -> HeldBuild | None:
        """Wait until there may be a build to take, and return the next one; None when the host drains."""
        while True:
            with self._changed:
                if not self._changed.wait_for(self._has_news, timeout=_IDLE_S):
                    slot.builder.rest()
                    self._changed.wait_for(self._has_news)
                if self._draining:
                    return None
                self._due = False
            held = self._take(slot)
            if held is not None:
                # There may be more, for another slot.
                self.notify_slots()
                return held

    def _has_news(self) -> bool:
        return self._due or self._draining

    def notify_slots(self) -> None:
        """Let a free slot look for the next build."""
        with self._changed:
            self._due = True
            self._changed.notify()

    def _take(self, slot: _BuildSlot) -> HeldBuild | None:
        if self._agent is None or not self.toolchains.ids or not self._has_room():
            return None
        try:
            if slot.worker is None:
                slot.worker = self._store.cluster.begin_worker()
            return self._store.cluster.take_build(slot.worker, self._agent.name, self.toolchains.ids)
        except StoreError as error:
            # The answer with a task may have been lost. Without further heartbeats of this worker other hosts get it.
            slot.worker = None
            logger.warning("no build can be taken: %s", error)
            return None

    def _has_room(self) -> bool:
        try:
            free = shutil.disk_usage(self._config.cache_dir).free
        except OSError as error:
            logger.warning("%s: %s: nothing is built", self._config.cache_dir, error.strerror or error)
            return False
        is_full = free < _LEAST_FREE_BYTES
        if is_full and not self._is_full:
            logger.warning(
                "%s has %s MiB left: nothing is built until there are %s: "
                "'farm setup cache prune --older 30d --yes' makes room",
                self._config.cache_dir,
                free // 2**20,
                _LEAST_FREE_BYTES // 2**20,
            )
        self._is_full = is_full
        return not is_full

    def make(self, held: HeldBuild, slot: _BuildSlot) -> None:
        """Make a bundle and report the outcome: bundle, failure or return to the queue."""
        log = slot.folder / f"{held.task.key}.log"
        try:
            tools = self.toolchains.find(held.task.toolchain)
            if tools is None:
                raise RefusedBuildError("its toolchain was changed meanwhile")
            job = job_here(held.task, self._unpack)
            request = prepare_build(held.task, tools, job, log)
            # The cache comes first: for a bundle that is there, a fresh builder need not load torch.
            bundle = None if request.anew else self._cache.lookup(request.key)
            reply = BuildReply(request.key, ok=True, seconds=0.0)
            if bundle is None:
                reply = slot.builder.build(request, tools.compiler)
                bundle = self._cache.lookup(request.key) if reply.ok else None
            if slot.is_stopped and not reply.ok:
                self._put_back(held, "stopped", tried=False)
            elif bundle is not None:
                self._send(held, bundle, reply)
            elif reply.infra or reply.ok:
                self._fail_here(held, reply)
            else:
                self._record(lambda _: self._store.cluster.record_build(held, failed_build(reply, log)))
        except FarmError as error:
            self._put_back(held, str(error), tried=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, others are to have the build
            logger.error("this is a bug in farm: %s: %s", type(error).__name__, error)  # noqa: TRY400 - one line
            self._put_back(held, f"{type(error).__name__}: {error}", tried=True)
        finally:
            log.unlink(missing_ok=True)
            slot.builder.clean_up(held.task.key)

    def _unpack(self, source: str, job: Job) -> Job:
        return self._retry_while_away(lambda: unpack_source(self._objects, self._config.cache_dir, source, job))

    def _send(self, held: HeldBuild, bundle: Bundle, reply: BuildReply) -> None:
        build = self._retry_while_away(lambda: sent_build(self._objects, bundle, reply))
        self._record(lambda _: self._store.cluster.record_build(held, build, bundle.manifest))

    def _fail_here(self, held: HeldBuild, reply: BuildReply) -> None:
        """Put a build back for another host; a full disk does not exclude this host from another try."""
        reason = reply.lost_reason
        job_id = held.task.job.id
        logger.warning("%s could not be built here: %s", job_id, reason, extra={"job": job_id})
        # A file of the toolchain may have been saved meanwhile: offer the toolchain as it is now.
        self.toolchains.look(at_once=True)
        self._put_back(held, reason, tried=self._has_room())

    def _put_back(self, held: HeldBuild, why: str, *, tried: bool) -> None:
        """Put a build back: with `tried` this host does not get it again, and without another host it has failed."""
        self._record(lambda agent: self._store.cluster.put_back_build(held, agent.name, why=why, tried=tried))

    def _record(self, write: Callable[[AgentId], object]) -> None:
        """Record an outcome by `write`, waiting for the store; a build that another host has by now is left alone."""
        agent = self._agent
        if agent is not None:
            try:
                self._retry_while_away(lambda: write(agent))
            except LeaseLostError as error:
                logger.warning("not recorded: %s", error)
            except StoreError as error:
                # The heartbeats of this worker end, and the store puts the build back for others.
                logger.warning("%s", error)

    def _retry_while_away(self, act: Callable[[], _T]) -> _T:
        """Return the result of `act`, called again while a store is away. Raises all other errors of `act`."""
        wait_s, was_noted, end_s = _FIRST_WAIT_S, False, time.monotonic() + _MOST_AWAY_S
        while True:
            try:
                return act()
            except _NOT_RETRIED:
                raise
            except StoreError as error:
                if self._gate.is_stopping or (isinstance(error, ArtifactsError) and time.monotonic() > end_s):
                    raise
                if not was_noted:
                    logger.warning("waiting: %s", error)
                    was_noted = True
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _MOST_WAIT_S)


class _BuildSlot(threading.Thread):
    """Thread with a builder, which makes one bundle after the other."""

    def __init__(self, host: BuildHost, builder: BuilderSlot, folder: Path) -> None:
        super().__init__(name="build-slot")
        self._host, self.builder, self.folder = host, builder, folder
        self.key = ""
        """Key of the bundle in progress; empty while idle."""
        self.worker: int | None = None
        """Worker of Procrastinate; None before the first job, and after an error of the database."""
        self.is_stopped = False
        """True once the bundle in progress is no longer needed."""

    def run(self) -> None:
        """Claim and make bundles until the host drains."""
        while (held := self._host.next_build(self)) is not None:
            self.is_stopped, self.key = False, held.task.key
            try:
                self._host.make(held, self)
            finally:
                self.key = ""
            self._host.notify_slots()
        self.builder.end()

    def abandon(self) -> None:
        """Stop the build in progress, and go on with the next."""
        if key := self.key:
            self.is_stopped = True
            self.builder.abandon(key)

    def end(self) -> None:
        """End the builder in any state, and wait until the thread has recorded the outcome in the store."""
        while self.is_alive():
            # The builder may be starting a process that did not exist at the last interrupt: interrupt again.
            self.is_stopped = True
            self.builder.interrupt()
            self.join(timeout=0.1)
