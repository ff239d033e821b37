"""Messages of databases with the next step for the user."""

from __future__ import annotations

import psycopg

from farm.store.problems import interruption_before


def test_ctrl_c_while_a_connection_is_in_use_stays_ctrl_c() -> None:
    """SQLAlchemy sets back a connection whose question was broken off, and psycopg refuses that with another error."""
    raised = psycopg.ProgrammingError("can't change 'autocommit' now: connection in transaction status ACTIVE")
    raised.__context__ = KeyboardInterrupt()
    assert isinstance(interruption_before(raised), KeyboardInterrupt)
    assert interruption_before(ValueError("no such")) is None
