"""`-q`: the last line of a command's text, all of its JSON, and errors."""

from __future__ import annotations

import json

import pytest
from farm_home import FarmHome


@pytest.mark.parametrize("words", [("-q", "devices", "socs"), ("devices", "socs", "--quiet")])
def test_a_quiet_command_prints_the_last_line(home: FarmHome, words: tuple[str, ...]) -> None:
    whole = home.farm("devices", "socs", code=0).stdout.splitlines()
    done = home.farm(*words, code=0)
    assert (done.stdout.splitlines(), done.stderr) == (whole[-1:], "")


def test_a_quiet_command_prints_json_and_errors(home: FarmHome) -> None:
    assert json.loads(home.farm("devices", "socs", "-q", "--json", code=0).stdout)["socs"]
    assert "there is no store yet" in home.farm("status", "-q", code=9).stderr
