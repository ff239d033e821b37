"""Names that no terminal should obey: from manifests, stores and arguments, through every way that farm prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from farm_home import FarmHome
from made_runs import record_run
from sqlalchemy import text

from farm.store.store import Store

# A terminal's title, a colour, C1's way to clear the screen, a right-to-left override, an isolate, a zero width space.
EVIL = "a\x1b]0;owned\x07b\x1b[31mc\x9b2Jd\u202ee\u2066f\u200bg\x7fh"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u202a-\u202e\u2066-\u2069]")


def written(home: FarmHome, **changes: str) -> Path:
    """Write a suite whose texts are hostile, and return its folder."""
    facts = {"name": "mine", "description": EVIL, "module": "torch.nn:ReLU", "case": "relu", **changes}
    output = {key: json.dumps(value) for key, value in facts.items()}
    folder = home.cwd / "mine"
    folder.mkdir()
    (folder / "suite.toml").write_text(
        f"[suite]\nname = {output['name']}\ndescription = {output['description']}\n\n"
        f"[case.{output['case']}]\nmodule = {output['module']}\ninputs = [{{shape = [1, 3]}}]\n",
        encoding="utf-8",
    )
    return folder


@pytest.mark.parametrize("arguments", [(), ("--json",)])
def test_suites_are_listed_without_what_a_terminal_obeys(home: FarmHome, arguments: tuple[str, ...]) -> None:
    done = home.farm("suites", str(written(home)), *arguments, code=0)
    assert "relu" in done.stdout
    assert not OBEYED.search(done.stdout)
    if arguments:
        assert [suite["description"] for suite in json.loads(done.stdout)["suites"]] == [EVIL]


@pytest.mark.parametrize("what", ["case", "module", "name"])
def test_errors_of_a_manifest_are_one_line_that_a_terminal_does_not_obey(home: FarmHome, what: str) -> None:
    folder = written(home, **{what: EVIL})
    for arguments in (("suites", str(folder)), ("run", "--soc", "SM8650", "--suite", str(folder))):
        done = home.farm(*arguments, code=2)
        assert not OBEYED.search(done.stderr + done.stdout)
        assert done.stderr.count("\n") == 1


def test_typed_words_come_back_visible(home: FarmHome) -> None:
    for arguments in (["suites", EVIL], ["run", "--soc", EVIL], [EVIL], ["suites", f"--{EVIL}"], ["data", "sql", EVIL]):
        done = home.farm(*arguments)
        assert done.returncode, done.stderr
        assert not OBEYED.search(done.stderr + done.stdout), arguments


def test_rows_of_a_store_are_printed_visible(home: FarmHome, store: Store) -> None:
    with store:
        run_id = record_run(store)
        # Stands for a user who writes the rows of a shared store by hand.
        update = text("UPDATE run SET user_name = :evil, host = 'a,b' || char(10) || 'c'")
        store._database.write(lambda connection: connection.execute(update, {"evil": EVIL}))
    query = f"SELECT user_name AS '{EVIL}', host FROM run"  # noqa: S608
    table, csv, answer = (
        home.farm("data", "sql", "-", form, stdin=query, code=0).stdout for form in ("--limit=5", "--csv", "--json")
    )
    assert json.loads(answer)["rows"] == [[EVIL, "a,b\nc"]]
    assert csv.endswith(',"a,b\nc"\n')
    assert "␛[31m" in csv
    for arguments in ("status", "status --json", "runs prune --keep 1", f"report {run_id} --json"):
        done = home.farm(*arguments.split())
        table += done.stdout + done.stderr
    assert not OBEYED.search(table + csv + answer)
