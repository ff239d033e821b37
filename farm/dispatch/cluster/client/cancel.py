"""Cancelling a run on a shared farm: its agents stop at once, and its results so far are kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from farm.base.errors import UsageError
from farm.dispatch.cluster.hints import Hints

if TYPE_CHECKING:
    from farm.store.cluster.records import Order
    from farm.store.store import Store

_LOOK_SECONDS = 1.0


def cancel(store: Store, run_id: str, user: str, *, force: bool = False) -> Order:
    """Cancel a run for `user` and return its order as it was before; a run of another user needs `force`.

    Raises UsageError for a run that is over, belongs to another user, or was never submitted.
    """
    order = store.cluster.order(run_id)
    if order is None:
        raise UsageError(f"run {run_id} was not handed in to the shared farm: Ctrl-C ends it where it was started")
    if order.state != "open":
        how = "cancelled" if order.cancelled_by else "over"
        raise UsageError(f"run {run_id} is {how} already: 'farm report {run_id}' shows what it found")
    if order.user != user and not force:
        raise UsageError(f"run {run_id} is {order.user}'s: ask them, or give --force")
    store.cluster.cancel(run_id, user, may_others=force)
    return order


def await_end(store: Store, run_id: str, seconds: float) -> bool:
    """Wait until agents have released all devices of a run and ended it; return False after `seconds`."""
    end_s = time.monotonic() + seconds
    with Hints(store) as hints:
        while True:
            order = store.cluster.order(run_id)
            if order is None or order.state == "ended":
                return True
            left = end_s - time.monotonic()
            if left <= 0:
                return False
            hints.wait(min(left, _LOOK_SECONDS))
