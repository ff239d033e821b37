"""Messages of databases with the next step for the user."""

from __future__ import annotations

from typing import Self

import psycopg
import pytest
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from farm.store.problems import interruption_before


class _Interrupted:
    """A connection whose question is broken off by Ctrl-C, as psycopg's is."""

    closed = False

    def __init__(self) -> None:
        self._autocommit, self._is_active = False, False

    @property
    def autocommit(self) -> bool:
        return self._autocommit

    @autocommit.setter
    def autocommit(self, value: bool) -> None:
        if self._is_active:
            raise psycopg.ProgrammingError("can't change 'autocommit' now: connection in transaction status ACTIVE")
        self._autocommit = value

    def cursor(self) -> Self:
        return self

    def execute(self, query: object) -> None:
        del query
        self._is_active = True
        raise KeyboardInterrupt

    def close(self) -> None:
        pass


def test_ctrl_c_while_the_database_is_asked_whether_it_is_there_stays_ctrl_c() -> None:
    with pytest.raises((KeyboardInterrupt, psycopg.ProgrammingError)) as raised:
        PGDialect_psycopg().do_ping(_Interrupted())
    assert isinstance(interruption_before(raised.value), KeyboardInterrupt)
    assert interruption_before(ValueError("no such")) is None
