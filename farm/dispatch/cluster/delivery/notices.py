"""Task of Procrastinate that sends a notice to a receiver of this host: one attempt per job and time.

The process that queued a notice tries first, for some minutes (`farm.dispatch.notify.delivery`).
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError, StoreError
from farm.base.text import one_line
from farm.dispatch.notify.credentials import NotifyError
from farm.dispatch.notify.delivery import Delivery
from farm.store.messages.messages import NoticeArguments

if TYPE_CHECKING:
    from collections.abc import Iterable

    from procrastinate.jobs import Job

    from farm.dispatch.notify.delivery import Receiver
    from farm.store.store import Store

logger = logging.getLogger(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 10.0, 600.0
_MOST_TRIES = 42
"""Number of attempts, about six hours."""


class TryAgainError(Exception):
    """Failed attempt of a job, to be repeated at `at`."""

    def __init__(self, at: datetime) -> None:
        super().__init__(at)
        self.at = at


def retry_wait_s(tries: int) -> float:
    """Return the time until the next attempt after `tries` failed ones. Pure."""
    return min(_FIRST_WAIT_S * 2.0 ** min(tries - 1, 60), _LONGEST_WAIT_S)


class NoticeTask:
    """Notices for the receivers of this host. Any thread may call it."""

    def __init__(self, store: Store, receivers: Iterable[Receiver]) -> None:
        self._store = store
        self._receivers = {one.queue: one for one in receivers}
        self._sent: set[int] = set()
        """Jobs that were sent here: the database may go away before it has the end of the job."""

    @property
    def queues(self) -> tuple[str, ...]:
        """Names of the queues of its receivers."""
        return tuple(self._receivers)

    def attempt(self, job: Job) -> None:
        """Attempt a notice once, and record its outcome. Raises TryAgainError."""
        receiver = self._receivers[job.queue]
        try:
            notice = msgspec.convert(job.task_kwargs, NoticeArguments)
        except msgspec.ValidationError as error:
            logger.warning("a notice for %s is dropped: its row is unreadable: %s", receiver.to, error)
            return
        delivery = Delivery(receiver.to, ok=True)
        try:
            if job.id not in self._sent:
                receiver.deliver(notice.message, job.lock or "")
        except NotifyError as error:
            if error.may_pass and job.attempts + 1 < _MOST_TRIES:
                raise TryAgainError(self._after(retry_wait_s(job.attempts + 1))) from None
            delivery = Delivery(receiver.to, ok=False, problem=str(error))
        else:
            self._sent.add(job.id or 0)
        level = logging.INFO if delivery.ok else logging.WARNING
        logger.log(level, "notice of %s: %s", one_line(notice.about, 200), delivery.line)
        if notice.claim:
            with suppress(FarmError):
                self._store.quarantines.add_outcome(notice.claim, delivery.line)

    def _after(self, wait_s: float) -> datetime:
        """Return the time in `wait_s` on the clock of the database, by which jobs are due."""
        try:
            now_s = self._store.leases.now_ms() / 1000
        except StoreError:
            now_s = time.time()
        return datetime.fromtimestamp(now_s + wait_s, UTC)
