"""The time that a run may take: which jobs fit into it, and what happens when it is over."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from farm.dispatch.request.selection import Version, by_value, costs, schedule
from farm.report.model.format import duration
from farm.store.values import judged_by
from farm.store.view import SkipReason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from farm.store.cluster.records import PlannedJob
    from farm.store.records import ExpectedJob

logger = logging.getLogger(__name__)


class Budget:
    """Begins when it is made: waiting for devices and compiling take of it."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds` is None for as long as it takes."""
        length = float("inf") if seconds is None else seconds
        self._words = f"the budget of {duration(length)}"
        self.end_s = time.monotonic() + length
        """On the clock of `time.monotonic`."""
        self.seconds = seconds
        self.is_limited = seconds is not None
        self.is_over = False
        """True once the budget ended during jobs."""

    @property
    def left_s(self) -> float | None:
        """Remaining seconds; None for an unlimited budget."""
        return max(0.0, self.end_s - time.monotonic()) if self.is_limited else None

    def cut(
        self,
        planned: Sequence[PlannedJob],
        past: Mapping[str, ExpectedJob],
        *,
        devices: Mapping[str, int],
        builders: int,
        first: Collection[str] = (),
    ) -> tuple[list[PlannedJob], dict[str, SkipReason]]:
        """Return the jobs that fit, in the order to begin them, and the others with the reason.

        The most valuable fit first (`selection.by_value`); `devices` is how many there are of each SoC.
        """
        left = self.end_s - time.monotonic()
        by_id = {one.job.id: one for one in planned}
        now = {one.job.id: Version(one.key, judged_by(one.job)) for one in planned}
        order = [by_id[job_id] for job_id in by_value(now, past, first)]
        expected = costs(
            [(one.job.id, one.job.target.soc, one.key) for one in order], past, {one.key: one.cached for one in planned}
        )
        too_long = {cost.job_id: cost.build + cost.run for cost in expected if cost.build + cost.run > left}
        ends = schedule([cost for cost in expected if cost.job_id not in too_long], devices=devices, builders=builders)
        fitting = [by_id[job_id] for job_id, end in ends.items() if end <= left]
        kept = {one.job.id for one in fitting}
        skipped = {}
        for job_id in by_id.keys() - kept:
            reason = f"did not fit into {self._words}"
            if left <= 0:
                reason = f"{self._words} was over before anything could begin"
            elif job_id in too_long:
                reason = f"takes about {duration(too_long[job_id])}, more than what is left of {self._words}"
            skipped[job_id] = _skipped(reason, past.get(job_id))
        return fitting, skipped

    def unbegun(self, job_ids: Iterable[str], past: Mapping[str, ExpectedJob]) -> dict[str, SkipReason]:
        """Return why jobs had not begun at the end."""
        return {job_id: _skipped(f"had not begun when {self._words} was over", past.get(job_id)) for job_id in job_ids}

    @contextmanager
    def watched(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call `stop` at the end, from another thread, unless the body has ended by then."""

        def end() -> None:
            self.is_over = True
            stop()
            logger.info("%s is over: the running jobs are finished, and nothing begins any more", self._words)

        if not self.is_limited:
            yield
            return
        timer = threading.Timer(max(0.0, self.end_s - time.monotonic()), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _skipped(reason: str, past: ExpectedJob | None) -> SkipReason:
    """Return the reason of a skipped job, with its last known result."""
    if past is None:
        return SkipReason(reason)
    return SkipReason(reason, past.last.time_ms, past.last.outcome, past.last.run_id)
