"""The store: recording, and readers grouped by subject.

A group is imported at its first use: a command needs few of them and starts sooner.
"""

from __future__ import annotations

from functools import cached_property
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

    @cached_property
    def runs(self) -> RunReader:
        """Runs, their jobs and attempts."""
        from farm.store.queries.runs import RunReader

        return RunReader(self._database)

    @cached_property
    def status(self) -> StatusReader:
        """Newest results."""
        from farm.store.queries.status import StatusReader

        return StatusReader(self._database)

    @cached_property
    def grid(self) -> GridReader:
        """Results of jobs in nightly runs."""
        from farm.store.queries.grid import GridReader

        return GridReader(self._database)

    @cached_property
    def jobs(self) -> JobReader:
        """Jobs of runs in short, and the runs of a job."""
        from farm.store.queries.jobs import JobReader

        return JobReader(self._database)

    @cached_property
    def history(self) -> HistoryReader:
        """Numbers and verdicts of jobs, run by run."""
        from farm.store.queries.history import HistoryReader

        return HistoryReader(self._database)

    @cached_property
    def profiles(self) -> ProfileReader:
        """Profiles of jobs."""
        from farm.store.queries.profiles import ProfileReader

        return ProfileReader(self._database)

    @cached_property
    def selection(self) -> SelectionReader:
        """Earlier results of the jobs of a new run."""
        from farm.store.queries.selection import SelectionReader

        return SelectionReader(self._database, self._clock)

    @cached_property
    def metrics(self) -> MetricsReader:
        """Counts of attempts for a monitoring system."""
        from farm.store.queries.metrics import MetricsReader

        return MetricsReader(self._database)

    @cached_property
    def browse(self) -> Browse:
        """Lists in pages, for the web page and `farm runs list`."""
        from farm.store.queries.browse import Browse

        return Browse(self._database, self._clock)

    @cached_property
    def accounts(self) -> Accounts:
        """Accounts of `farm serve`, and their actions."""
        from farm.store.accounts import Accounts

        return Accounts(self._database)

    @cached_property
    def alerts(self) -> Alerts:
        """Alerts with their states and remarks."""
        from farm.store.queries.alerts import Alerts

        return Alerts(self._database)

    @cached_property
    def devices(self) -> Registry:
        """Facts about devices that outlive a run."""
        from farm.store.leases.registry import Registry

        return Registry(self._database, self._clock)

    @cached_property
    def quarantines(self) -> Quarantines:
        """Quarantines to notify users about."""
        from farm.store.leases.quarantines import Quarantines

        return Quarantines(self._database, self._clock)

    @cached_property
    def leases(self) -> Leases:
        """Leases of devices, and processes that wait for one."""
        from farm.store.leases.leasing import Leases

        return Leases(self._database, self._clock)

    @cached_property
    def quotas(self) -> Quotas:
        """Quotas of users and labels."""
        from farm.store.leases.situations import Quotas

        return Quotas(self._database, self._clock)

    @cached_property
    def messages(self) -> Messages:
        """Notifications that wake the agents of a shared farm; only on PostgreSQL."""
        from farm.store.messages.messages import Messages

        return Messages(self._database)

    @cached_property
    def files(self) -> NamedFiles:
        """Files of a shared farm that a row names."""
        from farm.store.objects.named import NamedFiles

        return NamedFiles(self._database, self._clock)

    @cached_property
    def cluster(self) -> Cluster:
        """Shared farm: submitted runs, agents and their work. Raises UsageError for a store other than PostgreSQL."""
        from farm.store.cluster.cluster import Cluster

        return Cluster(self._database, self._clock)

    @cached_property
    def roles(self) -> Roles:
        """Roles with their rights, on PostgreSQL."""
        from farm.store.cluster.roles import Roles

        return Roles(self._database)

    @cached_property
    def pruning(self) -> Pruning:
        """Pruning of old runs."""
        from farm.store.pruning import Pruning

        return Pruning(self._database, self._clock)

    @cached_property
    def transfer(self) -> Transfer:
        """Export and import of runs as lines."""
        from farm.store.transfer.runs import Transfer

        return Transfer(self._database)
