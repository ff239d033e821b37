"""Devices that their holders have to hand over to other users: decided for a SoC, marked in the leases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, text

from farm.policy.sharing import hand_over
from farm.policy.situation import Priority, Share
from farm.store.leases.situations import KnownSoc, read_situation

# The decision costs as much as a full distribution, and many claims request it on a busy farm: limit its rate, less for
# new waiters.
_LOOK_MS, _LOOK_FOR_NEWS_MS = 1_000, 100
_NEW_MS = 3_000

_LOOK = text("""
    INSERT INTO soc_look (soc, looked_ms) VALUES (:soc, :now_ms)
    ON CONFLICT (soc) DO UPDATE SET looked_ms = excluded.looked_ms WHERE soc_look.looked_ms <= :now_ms - :look_ms
    RETURNING soc
""")
_NOTIFY = text("SELECT pg_notify('farm', :hint)")
_MARK = text("""
    UPDATE lease SET wanted_by = mark.user_name
    FROM unnest(CAST(:devices AS text[]), CAST(:users AS text[])) AS mark (device, user_name)
    WHERE lease.device = mark.device AND (token <> '' OR mark.user_name = '')
""")


def look_for_wanted(connection: Connection, known: KnownSoc, shares: Mapping[str, Share]) -> None:
    """Mark the devices to hand over, if a decision leaves runs or processes waiting; at most once a second for a SoC.

    With a new waiter, at most ten times a second. `known` is the situation of the decision: the free devices.
    """
    situation = known.situation
    given = Counter(share.run_id or share.request for share in shares.values())
    left = [
        (order.priority, order.user, order.since_ms)
        for order in situation.orders
        if order.ready + len(order.retries) > given[order.run_id]
    ] + [(one.priority, one.user, one.since_ms) for one in situation.requests if one.count > given[one.id]]
    if not may_be_wanted({(priority, user) for priority, user, _ in left}, known.held):
        return
    is_news = max(since_ms for *_, since_ms in left) > situation.now_ms - _NEW_MS
    look_ms = _LOOK_FOR_NEWS_MS if is_news else _LOOK_MS
    asked = {"soc": situation.soc, "now_ms": situation.now_ms, "look_ms": look_ms}
    if connection.scalar(_LOOK, asked) is not None:
        known = read_situation(connection, situation.soc, situation.now_ms, situation.requests)
        mark_wanted(connection, known)


def may_be_wanted(left: Iterable[tuple[Priority, str]], held: Mapping[tuple[Priority, str], int]) -> bool:
    """Return whether a waiter may have a better right than some holder; pure.

    `left` are the waiters and `held` the holders, by priority and user; `held` with their number of devices.
    """
    has: Counter[str] = Counter()
    for (_, user), count in held.items():
        has[user] += count
    return any(
        lower < priority or (lower == priority and has[holder] >= has[user] + 2)
        for priority, user in left
        for lower, holder in held
    )


def mark_wanted(connection: Connection, known: KnownSoc) -> int:
    """Mark the devices of a SoC that holders have to hand over, and return the number of newly marked ones."""
    wanted = hand_over(known.situation)
    changed = {
        device: wanted.get(device, "")
        for device in sorted(wanted.keys() | known.wanted.keys())
        if known.wanted.get(device, "") != wanted.get(device, "")
    }
    if changed:
        connection.execute(_MARK, {"devices": list(changed), "users": list(changed.values())})
    news = sum(bool(user) and device not in known.wanted for device, user in changed.items())
    if news:
        connection.execute(_NOTIFY, {"hint": f"wanted {known.situation.soc}"})
    return news
