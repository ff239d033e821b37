"""`farm lab agent`: host registration, shards on the host's devices, and builds for other hosts, until it is stopped.

A single thread makes all decisions about devices (`HostAgent.run`), in the order of events. Other threads do slow work
and send it their results: claims, heartbeats and hints (`shared_jobs.py`), results (`recorder.py`),
bundles and runtimes (`prepare.py`), scans for attached devices (`host_devices.py`), builds (`builds.py`) and
messages (`farm.dispatch.cluster.delivery`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from farm import __version__
from farm.base.errors import AgentRefusedError, FarmError, InfraError, UsageError
from farm.base.files import write_atomically
from farm.base.interrupts import noticing_deaths
from farm.base.log_setup import JsonFormatter, logged_to
from farm.base.processes import hide_environment
from farm.dispatch.cluster.agent.host_devices import Attachments, DeviceRunners, HostDevices
from farm.dispatch.cluster.agent.shared_jobs import AgentLink, SharedJobs
from farm.dispatch.cluster.files import Preparer
from farm.dispatch.cluster.nightly_starter import NightlyStarter, receivers_of
from farm.dispatch.device_forks import device_forks
from farm.dispatch.dispatcher import Dispatcher
from farm.dispatch.messages import ForkedProcess
from farm.dispatch.notify.delivery import find_receivers
from farm.dispatch.notify.quarantine import Announcer
from farm.dispatch.recorder import Recorder, open_result_log
from farm.store.cluster.records import AgentFacts, AgentId, HeartbeatReply
from farm.store.records import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.base.fork_server import ForkServer
    from farm.devices.device import Device
    from farm.dispatch.cluster.agent.builds import BuildHost
    from farm.dispatch.cluster.delivery import MessageDelivery
    from farm.dispatch.cluster.nightly_starter import NightlyStarter
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
_SCAN_SECONDS = 3.0
"""Interval between two scans of attached devices."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create the folder of an agent, and lock it while the body runs.

    Raises AgentRefusedError if another process has the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InfraError(f"{folder}: {error.strerror}: an agent keeps its result log there") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AgentRefusedError(
                f"an agent {folder.name} runs on this host already: "
                "end that one, or give this one another name with '--name'"
            ) from None
        yield
    finally:
        os.close(lock)


LOG_NAME = "agent.log"
"""Log file of an agent, in its folder."""
_LAST_SECONDS = 15.0
"""Time in which an ending agent tries to record its results; the rest stays in the result log."""


class HostAgent:
    """Agent of one host of a shared farm."""

    def __init__(
        self,
        config: Config,
        name: str = "",
        *,
        builds: bool = False,
        has_devices: bool = True,
        devices: Callable[[], Sequence[Device]] | None = None,
        processes: Callable[[Device], ForkedProcess] | None = None,
        rest_s: float = 60.0,
        fetch_s: float = 15.0,
    ) -> None:
        """`builds` makes this host a build host.

        `devices` replaces the attached devices, `processes` makes their processes. A device on which a shard could not
        begin rests for `rest_s`. Hosts that reach the artifact store get a shard after `fetch_s` without it here.
        """
        self._config, self._rest_s, self._fetch_s = config, rest_s, fetch_s
        self.name = name or config.agent.name or socket.gethostname()
        self._builds, self._has_devices = builds, has_devices
        self._find = devices
        self._dispatcher = Dispatcher(processes or self._device_process)
        self._forks: ForkServer | None = None
        self._is_draining = False
        self._drainer = threading.Thread(target=self._drain_others, daemon=True, name="drain")
        self._ended_by: FarmError | None = None
        self._is_replaced = False
        """True once another agent has the name."""
        self._is_aborting = threading.Event()
        self._patience_s = float("inf")
        self._ending = threading.Event()
        self._stack = contextlib.ExitStack()
        self._build_host: BuildHost | None = None
        self._nightly_runs: NightlyStarter | None = None
        self._delivery: MessageDelivery | None = None

    def run(self) -> None:
        """Serve the shared farm until `stop` is called. Raises FarmError if this host cannot, or must not.

        Raises AgentRefusedError if another agent has the name, or if the farm has an incompatible version.
        """
        from farm.base.processes import Supervisor
        from farm.base.toml_tables import prepare_decoders
        from farm.store.store import open_store

        prepare_decoders()
        # Before anything starts that would inherit their secrets.
        self._receivers = find_receivers(self._config.notify.webhook, self._config.notify.mail)
        for nightly_run in self._config.agent.nights:
            self._receivers += receivers_of(nightly_run.file)
        hide_environment()
        with self._stack:
            self._stack.enter_context(noticing_deaths(self._thread_died))
            store = open_store(self._config.store_url, connections=4 if self._builds else 2)
            self._store: Store = self._stack.enter_context(store)
            if (self._has_devices or self._config.agent.nights) and not self._store.cluster.may_lease:
                raise UsageError(
                    f"{self._store.user} may only build: start the agent with --build --no-devices and without nightly "
                    "runs, or let the login be a member of the group of agents (docs/guides/three_hosts.md, 'Roles')"
                )
            self._supervisor = self._stack.enter_context(Supervisor())
            self._folder = self._config.state_dir / "agent" / self.name
            self._stack.enter_context(locked(self._folder))
            self._stack.enter_context(logged_to(self._folder / LOG_NAME, JsonFormatter(agent=self.name)))
            self._open_parts()
            self._look_at_devices(is_first=True)
            self._agent = self._register()
            # The next process of this agent takes over the leases of this token, if this one ends without `leave`.
            write_atomically(self._token, self._agent.token, mode=0o600, durable=True)
            try:
                self._begin()
                self._dispatcher.run(self._is_over, self._tick)
            finally:
                self._end()
        if self._ended_by is not None:
            raise self._ended_by

    def stop(self) -> None:
        """Finish running jobs, put back the rest, and end; a second call breaks off running jobs. Safe in a signal."""
        if self._ending.is_set():
            self._is_aborting.set()
        self._ending.set()
        self._dispatcher.post(self._drain)

    def _thread_died(self, why: str) -> None:
        """End the agent, which its service manager starts again."""
        self._ended_by = self._ended_by or InfraError(f"{why}: the agent ends, to be started again")
        self._dispatcher.post(lambda: None)

    def _open_parts(self) -> None:
        from farm.store.objects.objects import open_objects

        objects = open_objects(self._config, patience_s=self._fetch_s)
        preparer = Preparer(
            self._config, objects, self._store.cluster.build_of, self._folder / "runs", self._store.files.lose_bundle
        )
        self._stack.callback(preparer.close)
        self._log = open_result_log(self._folder)
        self._link = AgentLink(
            self._store,
            self.facts,
            on_reply=lambda reply, until_s: self._dispatcher.post(partial(self._apply_reply, reply, until_s)),
            on_hints=self._apply_hints,
            on_claimed=lambda held, until_s: self._dispatcher.post(partial(self._runners.claimed, held, until_s)),
            ttl_s=self._config.leases.ttl_s,
            heartbeat_s=self._config.leases.heartbeat_s,
        )
        self._recorder = Recorder(self._link.record, self._log, preparer)
        self._jobs = SharedJobs(
            self._dispatcher, self._store, self._recorder, self._link, preparer,
            device_of=lambda device: self._runners.get(device).device, changed=self._changed,
        )  # fmt: skip
        self._runners = DeviceRunners(
            self._jobs, self._dispatcher, lambda runner: self._jobs.aside(runner.close), self._rest_s
        )
        self._announcer = Announcer(self._config, self._store)
        self._host_devices = HostDevices(self._config, self._store, self._supervisor, self._find)
        if self._config.agent.nights:
            self._nightly_runs = NightlyStarter(self._config, self._store)
        if self._builds:
            from farm.dispatch.cluster.agent.builds import BuildHost

            self._build_host = BuildHost(self._config, self._store, objects)
            self._build_host.toolchains.look()

    def _register(self) -> AgentId:
        """Register, waiting until a dead agent of the same name has expired in the store.

        Needed on a host that lost its folder, or took over the name of another. Raises AgentRefusedError if that agent
        lives on.
        """
        ttl_s, before = self._config.leases.ttl_s, self._token.read_text() if self._token.exists() else ""
        facts = self.facts()
        # The database may have started a moment ago: agents expire only after it has been up for a lease duration.
        deadline = time.monotonic() + 2 * ttl_s + _RETRY_SECONDS
        while True:
            try:
                return self._store.cluster.register(self.name, facts, ttl_s, user=self._store.user, replaces=before)
            except AgentRefusedError as error:
                if not error.may_pass or time.monotonic() > deadline or self._ending.wait(_RETRY_SECONDS):
                    raise

    @property
    def _token(self) -> Path:
        """File with the token of this process; it stays behind if the process ends without its end in the store."""
        return self._folder / "token"

    def _begin(self) -> None:
        agent = self._agent
        self._link.begin(agent)
        self._recorder.begin()
        self._store.cluster.begun(agent)
        self._link.start()
        if self._build_host is not None:
            self._build_host.begin(agent)
        if self._nightly_runs is not None:
            self._nightly_runs.begin(agent)
        if agent.may_lease:
            self._begin_delivery()
        kinds = f"{len(self._runners)} devices" if self._has_devices else "no devices"
        compiles = f", compiles with {len(self.facts().toolchains)} toolchains" if self._build_host is not None else ""
        logger.info("agent %s of %s is there: %s%s", self.name, self._store.user, kinds, compiles)
        if self._has_devices:
            threading.Thread(target=self._keep_looking, daemon=True, name="attached").start()
        self._runners.open()

    def _begin_delivery(self) -> None:
        from farm.dispatch.cluster.delivery import MessageDelivery, NoticeTask, recover

        checks = self._nightly_runs.checks() if self._nightly_runs is not None else {}
        ttl_s, is_stable = self._config.leases.ttl_s, self._link.is_stable
        recover_work = partial(recover, self._store, ttl_s=ttl_s, is_stable=is_stable)
        notices = NoticeTask(self._store, self._receivers)
        self._delivery = MessageDelivery(self._store, recover=recover_work, ttl_s=ttl_s, checks=checks, notices=notices)
        self._delivery.start()

    def _device_process(self, device: Device) -> ForkedProcess:
        if self._forks is None:
            self._forks = device_forks(self._supervisor)
        return ForkedProcess(self._forks, self._folder / "logs" / f"{device.id.replace('/', '_')}.log")

    # The decision thread.

    def _tick(self) -> None:
        for runner in self._runners.all():
            runner.tick()

    def _abort(self) -> None:
        self._is_aborting.clear()
        # The store may be away: leases end by themselves then.
        self._patience_s = time.monotonic() + _LAST_SECONDS
        for runner in self._runners.all():
            runner.abort("the agent ends")
        if self._build_host is not None:
            self._build_host.stop()

    def _is_over(self) -> bool:
        if self._is_aborting.is_set():
            self._abort()
        if self._ended_by is not None or time.monotonic() > self._patience_s:
            return True
        if not self._is_draining or self._drainer.is_alive():
            return False
        return self._runners.are_free

    def _drain(self) -> None:
        if self._is_draining:
            return
        self._is_draining = True
        logger.info("finishing what runs; nothing else begins")
        self._runners.drain("its agent takes no further work")
        self._link.send_heartbeat()
        self._drainer.start()

    def _drain_others(self) -> None:
        if self._nightly_runs is not None:
            self._nightly_runs.stop()
        if self._build_host is not None:
            self._build_host.drain()
        self._dispatcher.post(lambda: None)

    def _apply_reply(self, reply: HeartbeatReply, until_s: float) -> None:
        if reply.replaced:
            self._is_replaced = True
            self._ended_by = InfraError(f"another agent is called {self.name} by now: this one ends")
            return
        self._runners.apply(reply, until_s)
        for soc in reply.claimable:
            self._link.claim(soc)
        if reply.drain:
            self._ending.set()
            self._drain()

    def _apply_hints(self, hints: set[str]) -> bool:
        """Apply hints, and return whether a heartbeat should follow at once. Called in the thread of the link."""
        runners = self._runners.all()
        is_urgent = False
        for hint in hints:
            word, _, name = hint.partition(" ")
            if word == "work":
                self._link.claim(name, also_busy=self._runners.has(name))
            elif word == "build" and self._build_host is not None:
                self._build_host.wake()
            elif word == "cancel":
                is_urgent = is_urgent or any(name in runner.runs for runner in runners)
                if self._build_host is not None:
                    self._build_host.send_heartbeat()
            elif word == "wanted":
                self._link.decided(name)
                is_urgent = is_urgent or any(
                    runner.device.soc == name and runner.lease is not None for runner in runners
                )
            elif word == "ended":
                self._dispatcher.post(partial(self._forget_run, name))
            elif word == "drain":
                is_urgent = is_urgent or name == self.name
        return is_urgent

    # Attached devices.

    def _keep_looking(self) -> None:
        while not self._ending.wait(_SCAN_SECONDS):
            self._look_at_devices()
            if self._jobs.has_quarantined:
                self._jobs.has_quarantined = False
                self._announcer.look()

    def _look_at_devices(self, *, is_first: bool = False) -> None:
        if not self._has_devices:
            return
        try:
            look = self._host_devices.look(self._runners.busy())
        except FarmError as error:
            if is_first:
                raise
            logger.warning("attached devices cannot be listed: %s", error)
            return
        if is_first:
            self._update_devices(look)
        else:
            self._dispatcher.post(partial(self._update_devices, look))

    def _update_devices(self, look: Attachments) -> None:
        if self._runners.update(look):
            self._changed()

    def _forget_run(self, run_id: str) -> None:
        if self._runners.forget_run(run_id):
            self._jobs.forget_run(run_id)

    def facts(self) -> AgentFacts:
        """Return the current facts of the agent, for the store."""
        host = self._build_host
        return AgentFacts(
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            protocol=PROTOCOL,
            draining=self._is_draining,
            devices=self._runners.facts(),
            toolchains=host.toolchains.ids if host is not None else (),
            offered=host.toolchains.offered if host is not None else (),
        )

    def _changed(self) -> None:
        """Send the agent's changed facts to the store at once."""
        if self._delivery is not None:
            self._link.send_heartbeat()

    def _end(self) -> None:
        """End all parts of the agent, and then its registration, unless another agent has the name by now."""
        self._ending.set()
        self._link.stop_claims()
        is_replaced = self._is_replaced
        closing = [threading.Thread(target=runner.close) for runner in self._runners.all()]
        for thread in closing:
            thread.start()
        if self._build_host is not None:
            self._build_host.stop(put_back=not is_replaced)
        if self._nightly_runs is not None:
            self._nightly_runs.stop()
        if self._delivery is not None:
            self._delivery.stop(2.0)
        for thread in closing:
            thread.join()
        self._jobs.close()
        if not self._recorder.close(_LAST_SECONDS):
            logger.warning("the store cannot be reached: the result log is sent at the next start")
        elif self._jobs.has_quarantined:
            self._announcer.close()
        self._log.close()
        self._link.close()
        if not is_replaced:
            with contextlib.suppress(FarmError):
                self._store.cluster.leave(self._agent)
                self._token.unlink(missing_ok=True)


def stop_by_signal(agent: HostAgent) -> None:
    """Have SIGTERM, SIGINT and SIGHUP end an agent: the first signal lets jobs finish, the second breaks them off."""

    def stop(*_: Any) -> None:
        agent.stop()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
