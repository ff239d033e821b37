"""The store: what runs, jobs and attempts were, each recorded in one transaction.

What asks is imported where it is called: a command asks little of it, and starts the sooner.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from farm.store import rows, values
from farm.store.clock import clock_ms
from farm.store.database import Database
from farm.store.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from farm.analysis.flakiness import Record
    from farm.store.clock import Clock
    from farm.store.leases.leasing import Leases
    from farm.store.leases.registry import Registry
    from farm.store.pruning import Pruning
    from farm.store.queries.alerts import Alerts
    from farm.store.queries.browse import Browse
    from farm.store.queries.points import JobPast
    from farm.store.records import (
        ArtifactRecord,
        Background,
        HistoryPoint,
        JobResult,
        LastVerdict,
        ListedJob,
        Past,
        ProfileRecord,
        RunStatus,
        UnfinishedRun,
    )
    from farm.store.transfer.runs import Transfer
    from farm.store.view import RunView, Stale


def open_store(url_or_path: str | Path, *, readonly: bool = False, existing: bool = False) -> Store:
    """Return the store at a path, `sqlite:///` or `postgresql://` URL; made or brought up to date where needed.

    `existing`: no file is made, as there is nothing in a new one for who asks.
    Raises StoreError when it cannot be: not writable, no store there to read, no database, a newer schema, a full
    disk; UsageError for what is no address; MissingToolError without the driver.
    """
    return Store(Database(url_or_path, readonly=readonly, existing=existing))


class Store(Recording):
    """One process's way to the store; may be used by several threads, not across a fork.

    Every method is one transaction and raises StoreError when the database refuses.
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

    @cached_property
    def leases(self) -> Leases:
        """Who has which device, and who waits for one."""
        from farm.store.leases.leasing import Leases

        return Leases(self._database, self._clock)

    @cached_property
    def registry(self) -> Registry:
        """What is known of devices between runs."""
        from farm.store.leases.registry import Registry

        return Registry(self._database, self._clock)

    @cached_property
    def alerts(self) -> Alerts:
        """Numbers that stand out, and what became of them."""
        from farm.store.queries.alerts import Alerts

        return Alerts(self._database)

    @cached_property
    def pruning(self) -> Pruning:
        """Which runs are old, and how they leave."""
        from farm.store.pruning import Pruning

        return Pruning(self._database, self._clock)

    @cached_property
    def browse(self) -> Browse:
        """What somebody who looks around asks."""
        from farm.store.queries.browse import Browse

        return Browse(self._database, self._clock)

    @cached_property
    def transfer(self) -> Transfer:
        """Runs as lines, for another store."""
        from farm.store.transfer.runs import Transfer

        return Transfer(self._database)

    def latest_run_id(self) -> str | None:
        """Return the id of the run that began last, None when there is none."""
        from farm.store.queries import runs as queries

        with self._database.reading() as connection:
            return queries.latest_run_id(connection)

    def resolve_run(self, ref: str) -> str:
        """Return the run id that `latest`, `latest~1` (the one before), an id or its unique beginning means.

        Raises UnknownNameError with the nearest id, UsageError where several ids begin so or none is that far back.
        """
        from farm.store.queries import runs as queries

        with self._database.reading() as connection:
            return queries.resolve_run(connection, ref)

    def run_view(self, run_id: str) -> RunView:
        """Return all that is known of a run, and what its failed cases did elsewhere. Raises UnknownNameError."""
        from farm.store.queries import coverage
        from farm.store.queries import runs as queries

        with self._database.reading() as connection:
            return coverage.with_elsewhere(connection, queries.run_view(connection, run_id))

    def run_to_show(self) -> str | None:
        """Return the newest nightly run of the last eight days, or else the newest run; None where there is none.

        Runs of `farm debug` are left out.
        """
        from farm.store.queries import status

        with self._database.reading() as connection:
            return status.run_to_show(connection, rows.now_ms())

    def run_status(self, run_id: str) -> RunStatus:
        """Return how the jobs of a run ended, and how each did before it, without numbers. Raises UnknownNameError."""
        from farm.store.queries import status

        with self._database.reading() as connection:
            return status.run_status(connection, run_id)

    def unfinished_runs(self) -> list[UnfinishedRun]:
        """Return the runs of the last day that have no end, newest first."""
        from farm.store.queries import status

        with self._database.reading() as connection:
            return status.unfinished(connection, rows.now_ms())

    def job_results(self, job_ids: Collection[str], run_ids: Collection[str] | None = None) -> list[JobResult]:
        """Return the newest result of each job that has one, of `run_ids` alone where given.

        Runs of `farm debug` are left out.
        """
        from farm.store.queries import coverage

        with self._database.reading() as connection:
            return coverage.job_results(connection, job_ids, run_ids)

    def job_names(self, job_pattern: str, soc: str | None = None) -> list[str]:
        """Return the ids of the jobs that a pattern means; pattern and errors as for `history`."""
        from farm.store.queries import history

        with self._database.reading() as connection:
            found = history.matching_jobs(connection, values.clean(job_pattern), soc and values.clean(soc))
        return list(found.values())

    def planned_jobs(self, run_ids: Iterable[str], soc: str, backend: str) -> list[ListedJob]:
        """Return the jobs for a SoC and backend that runs were to do, in their order."""
        from farm.store.queries import coverage

        with self._database.reading() as connection:
            return coverage.planned_jobs(connection, run_ids, soc, backend)

    def history(
        self, job_pattern: str, metric: str | None = None, soc: str | None = None, limit: int = 20
    ) -> list[HistoryPoint]:
        """Return what jobs measured, grouped by job, device kind and metric, oldest first in each group.

        `job_pattern` is a job's id, `suite/case`, a suite, or any of these with `*` and `?`. None as `metric` is
        every metric. `limit` counts the newest attempts of a job on a device kind. Raises UnknownNameError, with
        the nearest name, for a job, metric or SoC that the store has never seen. Runs of `farm debug` are left out.
        """
        from farm.store.queries import history

        with self._database.reading() as connection:
            return history.history(connection, job_pattern, metric, soc, limit)

    def job_pasts(self, run_id: str) -> list[JobPast]:
        """Return what the jobs that a run judged measured, then and in the runs before it, for each kind of device.

        Runs of `farm debug` are left out. Raises UnknownNameError.
        """
        from farm.store.queries import points
        from farm.store.queries import runs as queries

        with self._database.reading() as connection:
            jobs = points.jobs_of_run(connection, queries.resolve_run(connection, run_id))
            return list(points.job_pasts(connection, jobs, run_id))

    def pasts_of(self, job_pattern: str, soc: str | None = None, most: int = 60) -> list[JobPast]:
        """Return what the newest `most` runs of jobs measured; which jobs as for `history`."""
        from farm.store.queries import history, points

        with self._database.reading() as connection:
            jobs = history.matching_jobs(connection, values.clean(job_pattern), soc and values.clean(soc))
            return list(points.job_pasts(connection, jobs, None, most=most))

    def reliability(
        self, job_ids: Collection[str], kind: str, until: str = "", *, failed_of_late: bool = False
    ) -> dict[str, Record]:
        """Return how jobs did in their last 40 runs on devices of a kind, up to run `until`: pass rate, flakiness.

        Jobs without a verdict about their code are left out; with `failed_of_late` those, too, that did not fail in
        these runs. Runs of `farm debug` are left out.
        """
        from farm.store.queries import flakiness

        with self._database.reading() as connection:
            return flakiness.reliability(connection, job_ids, kind, until, failed_of_late=failed_of_late)

    def fingerprints(self, hashes: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the facts of fingerprints, name to value, by their hash."""
        from farm.store.queries import history

        with self._database.reading() as connection:
            return history.fingerprints(connection, hashes)

    def profiles(self, job_pattern: str, run_id: str | None = None) -> list[ProfileRecord]:
        """Return the newest profile of each job that `job_pattern` means (as for `history`), of `run_id` where given.

        Raises UnknownNameError for a job that the store has never seen, UsageError where none has a profile.
        """
        from farm.store.queries import profiles

        with self._database.reading() as connection:
            return profiles.profiles(connection, job_pattern, run_id)

    def past(self, job_ids: Sequence[str], kind: str) -> dict[str, Past]:
        """Return what recent runs on devices of a kind, `virtual` or `hardware`, tell of jobs that have a verdict.

        Runs of `farm debug` are left out.
        """
        from farm.store.queries import selection

        with self._database.reading() as connection:
            return selection.past(connection, job_ids, kind)

    def failed_last(self, job_ids: Sequence[str], kind: str, user: str) -> set[str]:
        """Return those of the jobs that did not pass when `user` last ran them on devices of this kind.

        That is failures that are no known issues, and jobs that the farm could not judge.
        """
        from farm.store.queries import selection

        with self._database.reading() as connection:
            return selection.failed_last(connection, job_ids, kind, user)

    def verdicts(self, run_id: str) -> dict[str, LastVerdict]:
        """Return how the jobs of a run ended, by their ids, without those that have no verdict about their code."""
        from farm.store.queries import selection

        with self._database.reading() as connection:
            return selection.verdicts(connection, run_id)

    def agree_on_seconds(self, seconds: Mapping[str, float], kind: str) -> dict[str, float]:
        """Return what whoever asked first for the same jobs and kind has said that they take; nobody yet: `seconds`.

        So all shards divide by the same numbers, although the first of them change what the store knows. It holds until
        nobody has asked for twelve hours.
        """
        from farm.store.queries import selection

        names = sorted(seconds)
        key = values.selection_hash([kind, *names])
        agreed = self._database.write(
            lambda connection: selection.agree(
                connection, key, [seconds[name] for name in names], self._clock(connection)
            )
        )
        return dict(zip(names, agreed, strict=True))

    def mark_stale(self, run_id: str, stale: Mapping[str, Stale | None]) -> None:
        """Record why planned jobs of a run are left out, by their ids; None for one that is not, after all."""
        from farm.store.queries import selection

        self._database.write(lambda connection: selection.mark_stale(connection, run_id, stale))

    def ask(self, query: str, limit: int, seconds: float = 60.0) -> tuple[list[str], list[tuple[Any, ...]]]:
        """Return the names of the columns and at most `limit` rows of one SELECT in the database's own SQL.

        Raises UsageError for a query that does more, fails or takes longer than `seconds`, and where the store is not
        open to read only.
        """
        return self._database.ask(query, limit, seconds)

    def artifacts(self, run_id: str, job_id: str | None = None) -> list[ArtifactRecord]:
        """Return the artifacts of a run, or of one of its jobs, oldest first."""
        from farm.store.queries import runs as queries

        with self._database.reading() as connection:
            return queries.artifacts(connection, run_id, job_id)

    def background(self, run_id: str, runs: int = 30) -> Background:
        """Return what the jobs of a run measured in their newest `runs` up to it, on its kind of device, and its files.

        Runs of `farm debug` are left out. Nothing is there for a run that is not.
        """
        from farm.store.queries import trends

        with self._database.reading() as connection:
            return trends.background(connection, run_id, runs)
