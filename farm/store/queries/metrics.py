"""Counts of attempts for a monitoring system: `store.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.store.statements import statement

if TYPE_CHECKING:
    from farm.store.database import Database


class AttemptCount(msgspec.Struct, frozen=True):
    """Attempts of recent runs with equal labels."""

    soc: str
    """SoC of the jobs."""
    kind: str | None
    """Kind of the device, `virtual` or `hardware`; None without a device."""
    serial: str | None
    device_soc: str | None
    """SoC of the device."""
    verdict: str
    cause: str
    decides: bool
    """True for the deciding attempts of their jobs."""
    attempts: int
    seconds: float
    """Wall time of the attempts."""


class Wear(msgspec.Struct, frozen=True):
    """Attempts on a device since it is known."""

    serial: str
    kind: str
    soc: str
    attempts: int


class MetricsReader:
    """Counts of attempts. Every method is one statement."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def attempts(self, since_ms: int) -> list[AttemptCount]:
        """Return the attempts of runs that started at `since_ms` or later (epoch, milliseconds), by label."""
        with self._database.reading() as connection:
            rows = connection.execute(statement("metrics.attempts"), {"since_ms": since_ms})
            return [
                AttemptCount(row.soc, row.kind, row.serial, row.device_soc, row.verdict, row.cause or "",
                             bool(row.decides), row.attempts, row.seconds)
                for row in rows
            ]  # fmt: skip

    def wear(self) -> list[Wear]:
        """Return the number of attempts of each device."""
        with self._database.reading() as connection:
            return [Wear(*row) for row in connection.execute(statement("metrics.wear"))]
