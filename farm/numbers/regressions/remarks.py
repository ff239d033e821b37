"""Remarks of users on alerts and failing jobs."""

from __future__ import annotations

import datetime
import math
import time

from farm.base.errors import UnknownNameError, UsageError
from farm.report.model.status import change_of, word_of
from farm.store.records import Remark, RemarkState
from farm.store.store import Store


def assign(
    store: Store,
    subject: str,
    user: str,
    *,
    state: str | None = None,
    owner: str = "",
    note: str = "",
    until: datetime.datetime | None = None,
) -> tuple[str, str]:
    """Record the remark of a user on an alert (`12`, `#12`) or a job, if any is given; return its key and title.

    Raises UnknownNameError, and UsageError for a pattern of several jobs, a past time and an unfit state.
    """
    key, title = subject_of(store, subject)
    if state is not None and state not in list(RemarkState):
        raise UsageError(f"state: {state[:40]!r}: expected {', '.join(RemarkState)}")
    if state in ("accepted", "fixed") and key.startswith("job:"):
        raise UsageError(f"a job is red until it passes: --state {state} is for alerts; acknowledge it, or fix it")
    if state is not None or owner or note or until is not None:
        remark = Remark(state or _state_now(store, key), user, owner, note, until_ms=_end_of(until))
        store.alerts.remark(key, remark)
    return key, title


def subject_of(store: Store, subject: str) -> tuple[str, str]:
    """Return the key of an alert or a job in the store, and its title."""
    number = subject.removeprefix("#")
    if number.isascii() and number.isdigit():
        # No database has an alert with so many digits.
        if len(number) > 18:
            raise UnknownNameError("alert", number[:18] + "…", [])
        alert = store.alerts.get(int(number))
        return f"alert:{alert.id}", f"#{alert.id} {alert.job_id}: {alert.metric} {word_of(alert)}, {change_of(alert)}"
    names = store.history.job_names(subject)
    if len(names) > 1:
        raise UsageError(f"{subject} means {len(names)} jobs, such as {names[0]} and {names[1]}: name one")
    return f"job:{names[0]}", names[0]


def _state_now(store: Store, key: str) -> str:
    """Return the state of a remark without a state: an accepted or fixed subject stays so."""
    remarks = store.alerts.remarks([key]).get(key)
    over = not remarks or (remarks[-1].until_ms or math.inf) <= time.time() * 1000
    return "acknowledged" if not remarks or over or remarks[-1].state == "open" else remarks[-1].state


def _end_of(until: datetime.datetime | None) -> int | None:
    if until is None:
        return None
    end = until.replace(tzinfo=datetime.UTC) + datetime.timedelta(days=1)
    if end < datetime.datetime.now(tz=datetime.UTC):
        raise UsageError(f"--until {until:%Y-%m-%d} is over")
    return round(end.timestamp() * 1000)
