"""Answers of a database over time: a holder of a lease counts as dead after one lease duration of them."""

from __future__ import annotations

from farm.base.clock import now_s


class Answers:
    """Time for which a database has answered, without a gap in which heartbeats are missed. Of one thread, read by all.

    A database that stood still, as with the machine that it is on, has heard no heartbeat, and its clock went on.
    """

    def __init__(self) -> None:
        self._answered_s = self._unbroken_s = now_s()

    def begin(self) -> None:
        """Count from now."""
        self._answered_s = self._unbroken_s = now_s()

    def note(self, ttl_s: float) -> None:
        """Note an answer."""
        if (now := now_s()) - self._answered_s > _gap_s(ttl_s):
            self._unbroken_s = now
        self._answered_s = now

    def is_settled(self, ttl_s: float) -> bool:
        """Return whether the database has answered for `ttl_s`, the lifetime of a lease, up to now."""
        # In this order: an answer that is noted meanwhile records a gap before it closes it.
        answered_s, now = self._answered_s, now_s()
        return now - answered_s <= _gap_s(ttl_s) and now - self._unbroken_s >= ttl_s


def _gap_s(ttl_s: float) -> float:
    # A lease that was renewed just before its next heartbeat expires after 0.7 of its lifetime; less is a gap, then.
    return ttl_s / 2
