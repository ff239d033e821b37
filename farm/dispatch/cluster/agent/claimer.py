"""Claims of shards for the devices of an agent: one claim for all devices of an SoC, at every hint of work."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from farm.base.clock import now_s
from farm.base.errors import FarmError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.dispatch.cluster.agent.ledger import Ledger
    from farm.policy.situation import Lease
    from farm.store.cluster.records import AgentId, HeldShard
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_COALESCE_SECONDS = 0.003
"""Time in which the requests of several devices are collected for one claim."""

_RETRY_SECONDS = 1.0
_BUSY_SECONDS = 0.06
"""Delay until a claim is repeated for leases under which this agent was recording results, which a claim skips."""
_SPREAD_SECONDS = 0.1
"""Time over which agents spread their decision about busy devices: the same hint of work reaches all at once."""

_SECOND_LOOK_SECONDS = 0.25
"""Delay of the second request for that decision: the store limits its rate and may have skipped the first."""


class _ClaimRequest(NamedTuple):
    soc: str
    keep: Lease | None


class Claimer:
    """Thread that claims shards. Any thread may call its methods, which return at once."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        claimed: Callable[[HeldShard, float], None],
        ttl_s: float,
        is_stable: Callable[[], bool],
    ) -> None:
        """`claimed` receives every shard and the end of its lease, on the clock of `now_s`.

        `is_stable` as in `Claims.claim`.
        """
        self._is_stable = is_stable
        self._store, self._ledger, self._claimed, self._ttl_s = store, ledger, claimed, ttl_s
        self._agent: AgentId | None = None
        self._requests: dict[str, _ClaimRequest] = {}
        self._due: set[str] = set()
        self._undecided: dict[str, list[float]] = {}
        """Times of the next decisions about busy devices, by SoC (`time.monotonic`)."""
        self._changed = threading.Condition()
        self._is_ending = False
        self._problem = ""
        self._thread = threading.Thread(target=self._run, daemon=True, name="claims")

    def begin(self, agent: AgentId) -> None:
        """Claim in the name of `agent`."""
        self._agent = agent
        self._thread.start()

    def request(self, device: str, soc: str, keep: Lease | None) -> None:
        """Claim for a device until it has a shard."""
        with self._changed:
            self._requests[device] = _ClaimRequest(soc, keep)
            self._due.add(soc)
            self._changed.notify()

    def cancel_request(self, device: str) -> None:
        """Stop claiming for a device; the shard of a claim under way may still arrive."""
        with self._changed:
            self._requests.pop(device, None)

    def wake(self, soc: str = "", *, also_busy: bool = False) -> None:
        """Claim for the waiting devices of an SoC, as there may be work for them; of all SoCs without `soc`.

        `also_busy`: if no device of the SoC waits, request the decision which run has to hand over a device after a
        short delay, unless another agent has requested it by then.
        """
        with self._changed:
            wanted = {request.soc for request in self._requests.values()}
            self._due |= wanted & {soc} if soc else wanted
            if also_busy and soc not in wanted:
                at_s = time.monotonic() + random.uniform(0, _SPREAD_SECONDS)  # noqa: S311
                self._undecided[soc] = [at_s, at_s + _SECOND_LOOK_SECONDS]
            if self._due or also_busy:
                self._changed.notify()

    def decided(self, soc: str) -> None:
        """Note that an agent has just had the store decide which run hands over a device of an SoC."""
        with self._changed:
            self._undecided.pop(soc, None)

    def close(self) -> None:
        """Stop claiming and wait at most 5 s for the thread."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not (self._due or self._is_ending):
                    # Not wait_for: a new decision may come due meanwhile, which changes the timeout.
                    self._changed.wait(self._until_undecided())
                if self._is_ending:
                    return
            time.sleep(_COALESCE_SECONDS)
            now_s = time.monotonic()
            with self._changed:
                due, self._due = self._due, set()
                requests = dict(self._requests)
                undecided = {soc for soc, times in self._undecided.items() if times[0] <= now_s}
                later = {soc: [at_s for at_s in times if at_s > now_s] for soc, times in self._undecided.items()}
                self._undecided = {soc: times for soc, times in later.items() if times}
            for soc in sorted(due | undecided):
                mine = {device: request for device, request in requests.items() if request.soc == soc}
                if mine or soc in undecided:
                    self._claim(soc, mine)

    def _until_undecided(self) -> float | None:
        """Return the seconds until the next decision is due; None without one."""
        return max(0.0, min(self._undecided.values())[0] - time.monotonic()) if self._undecided else None

    def _claim(self, soc: str, requests: dict[str, _ClaimRequest]) -> None:
        agent = self._agent
        if agent is None:
            return
        until_s = now_s() + self._ttl_s
        keep = {device: request.keep for device, request in requests.items() if request.keep is not None}
        try:
            with self._ledger.changing:
                found = self._store.cluster.claim(
                    agent, soc, list(requests), ttl_s=self._ttl_s, keep=keep, is_stable=self._is_stable
                )
                self._take(found, requests, until_s)
        except FarmError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("nothing can be claimed: %s", error)
            self._wake_later(soc, _RETRY_SECONDS)
            return
        self._problem = ""
        if set(keep) - {held.lease.device for held in found}:
            self._wake_later(soc, _BUSY_SECONDS)

    def _wake_later(self, soc: str, seconds: float) -> None:
        timer = threading.Timer(seconds, self.wake, [soc])
        timer.daemon = True
        timer.start()

    def _take(self, found: Sequence[HeldShard], requests: dict[str, _ClaimRequest], until_s: float) -> None:
        with self._changed:
            for held in found:
                if self._requests.get(held.lease.device) is requests[held.lease.device]:
                    del self._requests[held.lease.device]
        for held in found:
            self._ledger.add(held)
            self._claimed(held, until_s)
