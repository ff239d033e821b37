"""Actions answer programs with --json: the changed object, and the removed one."""

from __future__ import annotations

import pytest
from farm_home import FarmHome
from made_runs import PHONE, record_run

from farm.base.user import user_name
from farm.devices.health import HealthEvent
from farm.store.leases.registry import Seen
from farm.store.store import open_store


@pytest.fixture
def lab(home: FarmHome) -> FarmHome:
    """Home with a device that is quarantined and reserved for the user."""
    home.state.mkdir()
    with open_store(home.state / "farm.db") as store:
        store.devices.see([Seen(PHONE, "device", None)])
        store.devices.record_health(HealthEvent(PHONE.id, "gave_up", "quarantined", "it was gone"))
        store.leases.reserve(PHONE.id, user_name(), 3600)
    return home


def test_a_changed_device_is_the_answer(lab: FarmHome) -> None:
    changes: list[tuple[tuple[str, ...], dict[str, object]]] = [
        (("label", "phone-1", "camera", "5g"), {"labels": ["camera", "5g"]}),
        (("disable", "phone-1", "--note", "its screen"), {"in_service": False, "service_note": "its screen"}),
        (("enable", "phone-1"), {"in_service": True}),
        (("unquarantine", "phone-1"), {"health": "suspect"}),
        (("name", "phone-1", "desk"), {"name": "desk"}),
    ]
    for words, changed in changes:
        answer = lab.json("devices", *words)
        assert {name: answer["device"][name] for name in changed} == changed
    assert lab.json("devices", "show", "desk")["device"] == answer["device"]


def test_a_released_device_and_a_removed_one_are_the_answers(lab: FarmHome) -> None:
    assert lab.json("devices", "release")["released"] == [{"device": PHONE.id, "done": "phone-1 is given back"}]
    assert "--yes does it" in lab.farm("devices", "remove", "phone-1", code=2).stderr
    assert lab.json("devices", "list")["devices"]
    assert lab.json("devices", "remove", "phone-1", "--yes")["device"]["id"] == PHONE.id
    assert lab.json("devices", "list")["devices"] == []


def test_accounts_and_quotas_are_removed_with_yes_alone(lab: FarmHome) -> None:
    for make, remove, left in (
        (("lab", "accounts", "--add", "ada"), ("lab", "accounts", "--remove", "ada"), "accounts"),
        (("lab", "quota", "user:ada", "2"), ("lab", "quota", "user:ada", "--remove"), "quotas"),
    ):
        lab.farm(*make, code=0)
        assert "--yes does it" in lab.farm(*remove, code=2).stderr
        assert lab.json(*make[:2])[left]
        lab.json(*remove, "--yes")
        assert not lab.json(*make[:2])[left]


def test_an_export_names_its_runs_and_needs_a_file(lab: FarmHome) -> None:
    with open_store(lab.state / "farm.db") as store:
        run = record_run(store)
    assert "--json needs --output" in lab.farm("data", "export", "--all", "--json", code=2).stderr
    answer = lab.json("data", "export", "--all", "--output", "runs.jsonl")
    assert (answer["output"], answer["runs"]) == ("runs.jsonl", [run])
