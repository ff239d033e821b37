"""Messages that wake agents: Procrastinate's tables in the store, which only PostgreSQL has, and their jobs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

import msgspec
from sqlalchemy import Connection, text

from farm.base.errors import MissingToolError, StoreError
from farm.store.leases.rows import always_stable
from farm.store.rights import HAS_JOBS, apply_again, become_owner, run_script
from farm.store.statements import Group

# Procrastinate's tables in a store: creation and upgrade, by farm's own migrations.


# Version of functions.sql and farm/store/rights, to increase with every change of these files.
_OWN = "10"
_VERSIONS = "SELECT version FROM farm_messages ORDER BY version DESC LIMIT 1"


def require_messages(connection: Connection) -> None:
    """Create or upgrade the tables of messages for the installed Procrastinate; one query if they are current.

    Raises StoreError for tables of a newer version.
    """
    needed = needed_version()
    found = installed_version(connection)
    if found == needed:
        return
    # Two agents may start at once: the lock lets the second find the tables of the first.
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtext('farm_messages'))"))
    found = installed_version(connection)
    if found == needed:
        return
    theirs, own = (found or "/").split("/")
    if (theirs, int(own or 0)) > (needed.split("/")[0], int(_OWN)):
        raise StoreError(
            f"the store's messages are of a newer farm (Procrastinate {found}, this one has {needed}): update farm"
        )
    become_owner(connection)
    for script in _scripts(theirs):
        run_script(connection, script)
    schema = connection.scalar(text("SELECT quote_ident(current_schema())"))
    functions = resources.files("farm.store.messages").joinpath("functions.sql").read_text(encoding="utf-8")
    run_script(connection, functions.format(schema=schema))
    run_script(connection, "CREATE TABLE IF NOT EXISTS farm_messages (version text PRIMARY KEY)")
    connection.execute(text("DELETE FROM farm_messages"))
    connection.execute(text("INSERT INTO farm_messages VALUES (:version)"), {"version": needed})
    apply_again(connection)


def upgrade_messages(connection: Connection) -> None:
    """Upgrade the tables of messages and the rights of groups after another revision, if a store has them.

    Raises as `require_messages`.
    """
    if connection.scalar(HAS_JOBS):
        require_messages(connection)
        apply_again(connection)


def ensure_messages(connection: Connection) -> None:
    """Create missing tables; raises as `require_messages`."""
    if not connection.scalar(HAS_JOBS):
        require_messages(connection)


def installed_version(connection: Connection) -> str | None:
    """Return the `needed_version` of the last creation or change of the tables; None without tables."""
    # Not to_regclass: within a transaction it does not see tables that others create after its first call.
    is_there = text("SELECT 1 FROM pg_class WHERE relname = 'farm_messages' AND pg_table_is_visible(oid)")
    if connection.scalar(is_there) is None:
        return None
    version: str | None = connection.scalar(text(_VERSIONS))
    return version


def needed_version() -> str:
    """Return the newest migration of the installed Procrastinate, and the version of farm's additions.

    Raises MissingToolError without Procrastinate.
    """
    return f"{_migrations()[-1].name[:11]}/{_OWN}"


def _migrations() -> list[Path]:
    # Find the files without an import of Procrastinate, which takes longer than all of this.
    spec = importlib.util.find_spec("procrastinate")
    if spec is None or not spec.submodule_search_locations:
        raise MissingToolError(
            "a shared farm needs the Python package 'procrastinate': pip install 'snapdragon-farm[cluster]'"
        )
    folder = Path(spec.submodule_search_locations[0]) / "sql"
    return sorted(folder.glob("migrations/[0-9]*.sql"))


def _scripts(installed: str) -> Iterable[str]:
    """Yield the scripts that upgrade tables of the version `installed`; empty `installed` for no tables."""
    migrations = _migrations()
    if not installed:
        yield (migrations[0].parents[1] / "schema.sql").read_text(encoding="utf-8")
        return
    for migration in migrations:
        if migration.name[:11] > installed:
            yield migration.read_text(encoding="utf-8")


# Jobs of Procrastinate for agents: deferring, putting back and removing them.
#
# A notice is a job in the queue of its receiver. Rows have the receiver's name and no secret.


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


class Messages(Group):
    """Messages of a store on PostgreSQL. Every method is one transaction; raises StoreError."""

    _is_there = False

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
