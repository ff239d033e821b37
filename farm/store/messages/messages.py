"""Messages to agents: there is something to do. What it is says the store, which a message only makes them look at."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import text

from farm.store.messages.install import require_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sqlalchemy import Connection

    from farm.store.database import Database

_WAKE = text("SELECT coalesce(sum(farm_wake(key, value::integer)), 0) FROM json_each_text(:queues)")
# PostgreSQL's channels have names of 63 bytes at most, and Procrastinate's begin with 23 of its own.
_QUEUE_BYTES = 38
_T = TypeVar("_T")


def work_queue(soc: str) -> str:
    """Return the queue of the agents that have devices of an SoC."""
    return f"soc:{soc}"


def build_queue(toolchain: str) -> str:
    """Return the queue of the agents that build with a toolchain, by its id."""
    return f"build:{toolchain}"


def queue_name(queue: str) -> str:
    """Return the name of a queue in messages: Procrastinate's channel of it has to be one that PostgreSQL takes."""
    return queue.encode()[:_QUEUE_BYTES].decode(errors="ignore")


class Messages:
    """The messages of a store on PostgreSQL. Every method is one transaction and raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_there = False

    def require(self) -> None:
        """See to it that there are tables for messages, of a version that fits.

        Raises StoreError where this user may not make them, or they are of a newer farm; MissingToolError without
        Procrastinate.
        """
        self._database.write(require_messages)
        self._is_there = True

    def wake(self, queues: Mapping[str, int]) -> int:
        """See to it that at least so many messages wait in each queue; return how many were sent.

        Twice is as good as once: who sends after a change of rows, and again when in doubt, sends nothing too much.
        """
        wanted = {queue_name(queue): count for queue, count in sorted(queues.items()) if count > 0}
        if not wanted:
            return 0
        return self._send(lambda connection: int(connection.scalar(_WAKE, {"queues": json.dumps(wanted)}) or 0))

    def finish(self, run_id: str) -> None:
        """Send the message that a run is over, whose exit code, alerts and end some agent records."""
        self._send(lambda connection: connection.execute(text("SELECT farm_finish(:run)"), {"run": run_id}))

    def retry(self, silent_s: float) -> int:
        """Put back what workers hold that were not heard of for so long; return how many messages those were."""
        query = text("SELECT farm_retry_messages(:silent_s)")
        return self._send(lambda connection: int(connection.scalar(query, {"silent_s": silent_s}) or 0))

    def tidy(self, hours: float) -> int:
        """Remove messages that ended so long ago; return how many those were."""
        query = text("SELECT farm_tidy_messages(:hours)")
        return self._send(lambda connection: int(connection.scalar(query, {"hours": hours}) or 0))

    def _send(self, action: Callable[[Connection], _T]) -> _T:
        if not self._is_there:
            found = text("SELECT to_regprocedure('farm_wake(text, integer)') IS NOT NULL")
            with self._database.reading() as connection:
                self._is_there = bool(connection.scalar(found))
            if not self._is_there:
                self.require()
        return self._database.write(action)
