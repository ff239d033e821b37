"""Jobs of Procrastinate for agents: deferring, putting back and removing them.

A notice is a job in the queue of its receiver. Rows have the receiver's name and no secret.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec
from sqlalchemy import Connection, text

from farm.store.leases.rows import always_stable
from farm.store.messages.install import ensure_messages, require_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.store.database import Database

_T = TypeVar("_T")
# Defers jobs for builds of open runs, and for ends of runs, without one, and looks for jobs of dead workers: one
# statement, as idle farms execute it as well.
_LOOK = text("""
    SELECT farm_defer_builds(ARRAY(SELECT key FROM build WHERE state = 'waiting' AND EXISTS (
               SELECT 1 FROM build_wanted JOIN run_order USING (run_id)
               WHERE build_wanted.key = build.key AND failure IS NULL AND run_order.state = 'open'))),
           farm_finish_runs(ARRAY(SELECT run_id FROM run_order JOIN run ON run.id = run_id
               WHERE finished_ms IS NULL AND NOT EXISTS (
                   SELECT 1 FROM procrastinate_jobs WHERE queueing_lock = 'finish:' || run_id AND status = 'doing'))),
           EXISTS (SELECT 1 FROM procrastinate_jobs AS job WHERE status = 'doing' AND NOT EXISTS (
               SELECT 1 FROM procrastinate_workers WHERE id = job.worker_id
               AND last_heartbeat >= now() - make_interval(secs => :silent_s))) AS is_stalled
""")

NOTIFY = "farm.notify"
"""Name of Procrastinate's task."""
_DEFER = text("""
    SELECT key, procrastinate_defer_jobs_v1(ARRAY[ROW(queue, 'farm.notify', 0, key, key, args,
        now() + make_interval(secs => :grace_s))::procrastinate_job_to_defer_v1])
    FROM jsonb_to_recordset(CAST(:notices AS jsonb)) AS notice (queue text, key text, args jsonb)
    WHERE NOT EXISTS (SELECT 1 FROM procrastinate_jobs WHERE queueing_lock = key AND status IN ('todo', 'doing'))
""")
_END_NOTICE = text("""
    SELECT procrastinate_finish_job_v1(id, 'succeeded', true) FROM procrastinate_jobs
    WHERE queueing_lock = :key AND status = 'todo' AND task_name = 'farm.notify'
""")
_DROP = text("""
    SELECT coalesce(args ->> 'about', ''), procrastinate_finish_job_v1(id, 'failed', true)
    FROM procrastinate_jobs AS job
    WHERE task_name = 'farm.notify' AND status = 'todo' AND NOT EXISTS (
        SELECT 1 FROM procrastinate_events AS event
        WHERE event.job_id = job.id AND event.at > now() - interval '1 day')
""")


class Message(msgspec.Struct, frozen=True):
    """Text of a notice for one receiver."""

    body: str
    """JSON for a webhook, text for mail."""
    subject: str = ""
    html: str = ""


class NoticeArguments(msgspec.Struct, frozen=True):
    """Arguments of a job that sends a notice."""

    message: Message
    about: str
    claim: int = 0
    """Id of the health event that records the outcome; 0 for none."""


class QueuedNotice(msgspec.Struct, frozen=True):
    """Notice in the queue of its receiver, with the columns of `_DEFER`."""

    queue: str
    key: str
    """Name of the notice, of which at most one job waits or runs."""
    args: NoticeArguments


def defer_notices(connection: Connection, notices: Sequence[QueuedNotice], grace_s: float) -> list[str]:
    """Queue notices, for agents from `grace_s` on, and return the keys of notices that were not queued before."""
    ensure_messages(connection)
    asked = {"notices": msgspec.json.encode(notices).decode(), "grace_s": grace_s}
    return [row.key for row in connection.execute(_DEFER, asked)]


class Messages:
    """Messages of a store on PostgreSQL. Every method is one transaction; raises StoreError."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._is_there = False

    def require(self) -> None:
        """Ensure tables for messages in the present version.

        Raises StoreError if this user may not create them, or for tables of a newer farm; MissingToolError without
        Procrastinate.
        """
        self._database.write(require_messages)
        self._is_there = True

    def retry(self, silent_s: float, is_stable: Callable[[], bool] = always_stable) -> int:
        """Put back the jobs of workers without a heartbeat for `silent_s`, and return their number.

        `is_stable` as in `AbandonedWork.recover`. Builds and ends of runs without a job get one.
        """
        self._ensure()
        [look] = self._database.at_once(_LOOK, {"silent_s": silent_s})
        if not look.is_stalled or not is_stable():
            return 0
        query = text("SELECT farm_retry_messages(:silent_s)")
        return self._send(lambda connection: int(connection.scalar(query, {"silent_s": silent_s}) or 0))

    def defer_notices(self, notices: Sequence[QueuedNotice], grace_s: float) -> list[str]:
        """Queue notices, for agents from `grace_s` on, and return the keys of notices that were not queued before."""
        return self._database.write(lambda connection: defer_notices(connection, notices, grace_s))

    def end_notice(self, key: str) -> None:
        """End a notice that no agent has taken."""
        self._send(lambda connection: connection.execute(_END_NOTICE, {"key": key}))

    def drop_untried(self) -> list[str]:
        """End notices that no agent has tried for a day, as none has their receiver; return their events."""
        return self._send(lambda connection: list(connection.scalars(_DROP)))

    def remove_ended(self, hours: float) -> int:
        """Remove messages that ended more than `hours` ago; return their number."""
        query = text("SELECT farm_remove_ended_messages(:hours)")
        return self._send(lambda connection: int(connection.scalar(query, {"hours": hours}) or 0))

    def _send(self, action: Callable[[Connection], _T]) -> _T:
        self._ensure()
        return self._database.write(action)

    def _ensure(self) -> None:
        if not self._is_there:
            self._database.write(ensure_messages)
            self._is_there = True
