from __future__ import annotations

from farm.results.analysis.facts import CONTENTS, changed_facts, fact_line
from farm.results.analysis.history import Point, split

FACTS = {"executorch": "1.5.1", "qnn": "2.51", **dict.fromkeys(CONTENTS, "a" * 16)}


def history(*facts: dict[str, str]) -> tuple[int, list[str]]:
    """Segments and events of a series with these facts."""
    points = [Point(f"r{n}", n, 1.0, one, "virtual", "v") for n, one in enumerate(facts)]
    found = split(points)
    return len(found.segments), [event.text for event in found.events]


def test_what_an_older_farm_did_not_record_is_no_difference() -> None:
    old = {"executorch": "1.5.1", "qnn": "2.51"}
    assert changed_facts(old, FACTS) == {}
    assert history(old, FACTS, old) == (1, [])


def test_an_edit_is_told_in_words_and_parts_no_series() -> None:
    edited = {**FACTS, "executorch_content": "b" * 16}
    assert [fact_line(name, *values) for name, values in changed_facts(FACTS, edited).items()] == [
        "sources of executorch: changed"
    ]
    assert history(FACTS, edited, FACTS) == (1, ["sources of executorch changed"] * 2)


def test_a_new_version_says_all_of_it() -> None:
    new = {**FACTS, "executorch": "1.6.0", "executorch_content": "b" * 16}
    assert list(changed_facts(FACTS, new)) == ["executorch"]
    assert history(FACTS, new) == (1, ["executorch 1.5.1 -> 1.6.0"])


def test_other_libraries_under_the_same_version_of_qnn_are_an_event() -> None:
    other = {**FACTS, "qnn_content": "b" * 16}
    assert history(FACTS, other, FACTS) == (1, ["libraries of QNN changed"] * 2)
