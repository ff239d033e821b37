"""Runs that are kept, and the reasons."""

from __future__ import annotations

from farm.base.config.retention import KeepReason, Rules, RunFacts, age_ms, decide

DAY = 86_400_000
NOW = 1_000 * DAY


def run(name: str, days: float, priority: str = "person") -> RunFacts:
    return RunFacts(name, int(NOW - days * DAY), priority)


def test_a_run_stays_for_any_one_reason() -> None:
    runs = [run("a", 1), run("b", 10), run("c", 20), run("d", 30), run("e", 40)]
    rules = Rules(keep_ms=5 * DAY, keep_runs=2)
    assert decide(runs, rules, NOW, {"d": KeepReason.RESULTS, "a": KeepReason.ALERT}) == {
        "a": KeepReason.AGE, "b": KeepReason.NEWEST, "c": None, "d": KeepReason.RESULTS, "e": None,
    }  # fmt: skip


def test_nightly_runs_have_an_age_of_their_own() -> None:
    runs = [run("person", 20), run("night", 20, "nightly"), run("old night", 50, "nightly")]
    age = KeepReason.AGE
    assert decide(runs, Rules(10 * DAY, 40 * DAY), NOW, {}) == {"person": None, "night": age, "old night": None}
    assert decide(runs, Rules(30 * DAY), NOW, {}) == {"person": age, "night": age, "old night": None}
    assert list(decide(runs, Rules(keep_runs=1), NOW, {}).values()) == [KeepReason.NEWEST, None, None]


def test_a_run_goes_at_the_very_age_and_one_of_the_future_stays() -> None:
    assert decide([run("ahead", -3), run("at", 10), run("before", 9.9)], Rules(10 * DAY), NOW, {}) == {
        "ahead": KeepReason.AGE, "at": None, "before": KeepReason.AGE,
    }  # fmt: skip


def test_ages() -> None:
    for text, days in (("90d", 90), (" 12w ", 84), ("36h", 1.5), ("0d", 0)):
        assert age_ms(text) == days * DAY
    assert {age_ms(text) for text in ("", "90", "-1d", "90 moons", "9999999d")} == {None}
