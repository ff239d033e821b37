"""The generated reference has every command, key, variable and exit code of the code, each with a meaning."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from farm.base.config.settings import QNN_PATHS, VARIABLES
from farm.base.errors import ExitCode, InfraError

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import reference


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    found: dict[str, str] = reference.pages()
    return found


def _rows(page: str) -> list[list[str]]:
    """Return the cells of each row of the page's tables, without their heads."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    return [row for at, row in enumerate(rows) if row[0] != "---" and rows[at + 1 : at + 2] != [["---"] * len(row)]]


def test_every_command_has_its_help(pages: dict[str, str]) -> None:
    headings = set(re.findall(r"^#+ (farm.*)$", pages["commands.md"], re.MULTILINE))
    commands: dict[str, Any] = {path: command for path, command, _ in reference.commands()}
    assert headings == set(commands)
    assert {"farm", "farm run"} <= headings
    options = {name for command in commands.values() for one in command.params for name in one.opts}
    assert {name for name in options if name.startswith("--") and name not in pages["commands.md"]} == set()


def test_every_key_of_farm_toml_has_a_type_and_a_meaning(pages: dict[str, str]) -> None:
    rows = _rows(pages["farm_toml.md"])
    assert len(rows) > 60
    assert [row for row in rows if not row[1] or not row[3]] == []
    assert ["`timeout_s`", "number", "`1800.0`"] in [row[:3] for row in rows]
    tables = set(re.findall(r"^## `(\[.*\])`$", pages["farm_toml.md"], re.MULTILINE))
    assert {"[build]", "[qnn]", "[[host]]", "[[device]]", "[soc.NAME]", "[toolchain.NAME]"} <= tables


def test_every_variable_has_a_meaning(pages: dict[str, str]) -> None:
    rows = _rows(pages["environment.md"])
    assert {f"`{name}`" for name in (*VARIABLES, *filter(None, QNN_PATHS.values()))} <= {row[0] for row in rows}
    assert all(row[1] for row in rows)


def test_exit_codes_are_those_of_runs_and_errors(pages: dict[str, str]) -> None:
    codes = {int(row[0].strip("*")): row[1] for row in _rows(pages["exit_codes.md"])}
    assert codes == {int(one): one.meaning for one in ExitCode}
    assert "`NoDeviceError`" in pages["exit_codes.md"].partition(f"code {InfraError.exit_code:d}\n")[2]


def test_the_page_of_json_has_answers_of_the_golden_files(pages: dict[str, str]) -> None:
    assert "`farm report`" in pages["json.md"].partition("## ")[0]
    assert '"jobs": [' in pages["json.md"].partition("## farm report\n")[2].partition("## ")[0]
    assert '```text\n{ "schema": 1' in pages["json.md"]
