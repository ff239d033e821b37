"""Notices of a shared farm in Procrastinate's queues, one queue per receiver: rows name it, and hold no secret."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import Connection, text

from farm.store.messages.install import ensure_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTIFY = "farm.notify"
"""Name of Procrastinate's task."""
_UNTRIED_HOURS = 24.0
_DEFER = text("""
    SELECT key, procrastinate_defer_jobs_v1(ARRAY[ROW(queue, :task, 0, key, key, args,
        now() + make_interval(secs => :grace_s))::procrastinate_job_to_defer_v1])
    FROM jsonb_to_recordset(CAST(:notices AS jsonb)) AS notice (queue text, key text, args jsonb)
    WHERE NOT EXISTS (SELECT 1 FROM procrastinate_jobs WHERE queueing_lock = key AND status IN ('todo', 'doing'))
""")
END_NOTICE = text("""
    SELECT procrastinate_finish_job_v1(id, 'succeeded', true) FROM procrastinate_jobs
    WHERE queueing_lock = :key AND status = 'todo' AND task_name = 'farm.notify'
""")
_DROP = text("""
    SELECT args ->> 'about' AS about, procrastinate_finish_job_v1(id, 'failed', true) FROM procrastinate_jobs AS job
    WHERE task_name = :task AND status = 'todo' AND NOT EXISTS (
        SELECT 1 FROM procrastinate_events AS event
        WHERE event.job_id = job.id AND event.at > now() - make_interval(secs => :seconds))
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
    asked = {"notices": msgspec.json.encode(notices).decode(), "task": NOTIFY, "grace_s": grace_s}
    return [row.key for row in connection.execute(_DEFER, asked)]


def drop_untried(connection: Connection) -> list[str]:
    """End notices that no agent has tried for a day, as none has their receiver; return their events."""
    asked = {"task": NOTIFY, "seconds": _UNTRIED_HOURS * 3600}
    return [str(row.about) for row in connection.execute(_DROP, asked)]
