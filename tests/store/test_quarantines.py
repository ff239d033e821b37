"""Quarantines to notify users about: each once in all processes, and no past ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from farm.devices.health import HealthEvent
from farm.store.store import Store, open_store


def health(
    store: Store, event: str, state: str, reason: str = "", *, device: str = "phone-1", time_ms: int = 0
) -> None:
    store.devices.record_health(
        HealthEvent(device, event, state, reason, {"run": "20260301-020000-0a1b2c"}, (), time_ms)
    )


def test_each_quarantine_is_claimed_once(store: Store) -> None:
    health(store, "infra", "suspect", "its cable")
    # A quarantine that is older than a day is no news.
    health(store, "gave_up", "quarantined", "long ago", device="phone-2", time_ms=1)
    assert store.quarantines.claim() == []
    health(store, "gave_up", "quarantined", "it could not be\x1b[31m brought back\nat all")
    health(store, "recovery", "quarantined", "reconnect: no")
    [one] = store.quarantines.claim()
    assert (one.device, one.reason, one.run) == (
        "phone-1", "it could not be brought back at all", "20260301-020000-0a1b2c",
    )  # fmt: skip
    assert store.quarantines.claim() == []
    for to in ("webhook 1", "webhook 2"):
        store.quarantines.add_outcome(one.claim, f"sent: {to}")
    newest = store.devices.health_events("phone-1", 1)[0]
    outcome = "sent: webhook 1; sent: webhook 2"
    assert (newest.event, newest.state, newest.reason) == ("notice", "quarantined", outcome)
    health(store, "released", "suspect", "released")
    health(store, "gave_up", "quarantined", "again")
    assert [again.reason for again in store.quarantines.claim()] == ["again"]


def test_of_many_who_look_at_once_one_claims(store: Store, address: str) -> None:
    health(store, "gave_up", "quarantined", "gone")

    def claim(_: int) -> int:
        with open_store(address) as other:
            return len(other.quarantines.claim())

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(claim, range(4))) == 1


def test_only_a_person_ends_a_quarantine(store: Store) -> None:
    health(store, "gave_up", "quarantined", "gone")
    # Events of a worker that does not know of the quarantine, for example after its job passed elsewhere.
    for event, state in (("outvoted", "suspect"), ("check_passed", "healthy")):
        health(store, event, state, "something else")
    [known] = store.devices.all()
    assert (known.health, known.health_reason) == ("quarantined", "gone")
    health(store, "released", "suspect", "released")
    assert store.devices.all()[0].health == "suspect"
