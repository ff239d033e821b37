"""The store: recording, and readers grouped by subject.

A group is imported at its first use: a command needs few of them and starts sooner.
"""

from __future__ import annotations

from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from farm.store.clock import Clock, clock_ms
from farm.store.database import Database
from farm.store.recording import Recording

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from farm.store.accounts import Accounts
    from farm.store.cluster.cluster import Cluster
    from farm.store.cluster.roles import Roles
    from farm.store.leases.leasing import Leases
    from farm.store.leases.quarantines import Quarantines
    from farm.store.leases.registry import Registry
    from farm.store.leases.situations import Quotas
    from farm.store.messages.messages import Messages
    from farm.store.objects.named import NamedFiles
    from farm.store.pruning import Pruning
    from farm.store.queries.alerts import Alerts
    from farm.store.queries.browse import Browse
    from farm.store.queries.grid import GridReader
    from farm.store.queries.history import HistoryReader
    from farm.store.queries.jobs import JobReader
    from farm.store.queries.metrics import MetricsReader
    from farm.store.queries.profiles import ProfileReader
    from farm.store.queries.runs import RunReader
    from farm.store.queries.selection import SelectionReader
    from farm.store.queries.status import StatusReader
    from farm.store.transfer.runs import Transfer


def _group(module: str, name: str, *, clock: bool = False) -> Any:
    """Return the attribute for a class of readers."""

    def made(self: Store) -> Any:
        group = getattr(import_module(f"farm.store.{module}"), name)
        return group(self._database, self._clock) if clock else group(self._database)

    return cached_property(made)


def open_store(
    url_or_path: str | Path, *, readonly: bool = False, existing: bool = False, connections: int | None = None
) -> Store:
    """Return the store at a path, `sqlite:///` or `postgresql://` URL; made or migrated if needed.

    With `existing`, a missing file is an error. `connections` limits the open connections to PostgreSQL, beside one
    for heartbeats.
    Raises StoreError for a place without write access, a missing store to read, a missing database, a newer schema or
    a full disk; UsageError for an invalid address; MissingToolError without the driver.
    """
    return Store(Database(url_or_path, readonly=readonly, existing=existing, connections=connections))


class Store(Recording):
    """Store of a process; usable from several threads, not across a fork.

    Every method, also of its groups, is one transaction and raises StoreError if the database refuses.
    """

    def __init__(self, database: Database, clock: Clock = clock_ms) -> None:
        super().__init__(database, clock)

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self._database.close()

    @property
    def user(self) -> str:
        """User of this process by the name that others see: the signed-in role on PostgreSQL, else $LOGNAME.

        Raises StoreError.
        """
        return self._database.user

    @property
    def is_shared(self) -> bool:
        """True for PostgreSQL, which has submitted runs and agents; False for a file."""
        return not self._database.is_sqlite

    def of_user(self, name: str) -> Store:
        """Return the same store for the reads of another user: `latest` and local runs. It shares the connections."""
        return Store(self._database.of_user(name))

    def connection_arguments(self) -> dict[str, Any]:
        """Return the arguments of psycopg's `connect` for the same PostgreSQL, with the password of the address."""
        return self._database.connection_arguments()

    def without_secrets(self, text: str) -> str:
        """Return an error text of that connection without the passwords of the address."""
        return self._database.without_secrets(text)

    def ask(self, query: str, limit: int, seconds: float = 60.0) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return the names of the columns and at most `limit` rows of one SELECT in the database's own SQL.

        Raises UsageError for a query that does more, fails or takes longer than `seconds`, and for a store that is
        open for writing.
        """
        from farm.store.queries.ask import ask

        return ask(self._database, query, limit, seconds)

    runs: RunReader = _group("queries.runs", "RunReader")
    """Runs, their jobs and attempts."""
    status: StatusReader = _group("queries.status", "StatusReader")
    """Newest results."""
    grid: GridReader = _group("queries.grid", "GridReader")
    """Results of jobs in nightly runs."""
    jobs: JobReader = _group("queries.jobs", "JobReader")
    """Jobs of runs in short, and the runs of a job."""
    history: HistoryReader = _group("queries.history", "HistoryReader")
    """Numbers and verdicts of jobs, run by run."""
    profiles: ProfileReader = _group("queries.profiles", "ProfileReader")
    """Profiles of jobs."""
    selection: SelectionReader = _group("queries.selection", "SelectionReader", clock=True)
    """Earlier results of the jobs of a new run."""
    metrics: MetricsReader = _group("queries.metrics", "MetricsReader")
    """Counts of attempts for a monitoring system."""
    browse: Browse = _group("queries.browse", "Browse", clock=True)
    """Lists in pages, for the web page and `farm runs list`."""
    accounts: Accounts = _group("accounts", "Accounts")
    """Accounts of `farm serve`, and their actions."""
    alerts: Alerts = _group("queries.alerts", "Alerts")
    """Alerts with their states and remarks."""
    devices: Registry = _group("leases.registry", "Registry", clock=True)
    """Facts about devices that outlive a run."""
    quarantines: Quarantines = _group("leases.quarantines", "Quarantines", clock=True)
    """Quarantines to notify users about."""
    leases: Leases = _group("leases.leasing", "Leases", clock=True)
    """Leases of devices, and processes that wait for one."""
    quotas: Quotas = _group("leases.situations", "Quotas", clock=True)
    """Quotas of users and labels."""
    messages: Messages = _group("messages.messages", "Messages")
    """Notifications that wake the agents of a shared farm; only on PostgreSQL."""
    files: NamedFiles = _group("objects.named", "NamedFiles", clock=True)
    """Files of a shared farm that a row names."""
    cluster: Cluster = _group("cluster.cluster", "Cluster", clock=True)
    """Shared farm: submitted runs, agents and their work. Raises UsageError for a store other than PostgreSQL."""
    roles: Roles = _group("cluster.roles", "Roles")
    """Roles with their rights, on PostgreSQL."""
    pruning: Pruning = _group("pruning", "Pruning", clock=True)
    """Pruning of old runs."""
    transfer: Transfer = _group("transfer.runs", "Transfer")
    """Export and import of runs as lines."""
