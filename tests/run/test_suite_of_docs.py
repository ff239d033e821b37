"""The suite of docs/start/my_operator.md, copied out of it, is planned and run; a case without a limit is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from farm_home import FarmHome

_PAGE = Path(__file__).parents[2] / "docs/start/my_operator.md"
_RUN = ("run", "--soc", "SM8650", "--suite", "./my_suite")
_JOBS = ["residual[SM8650-htp-8a8w]", "residual[SM8650-htp-16a8w]", "stem[SM8650-htp-8a8w]"]


@pytest.fixture
def suite(home: FarmHome) -> Path:
    """The folder that a reader would make: each block of the example begins with the name of its file."""
    example = _PAGE.read_text().split("## A suite of your own\n")[1].split("\n## ")[0]
    folder = home.cwd / "my_suite"
    folder.mkdir()
    for name, content in re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", example, re.DOTALL):
        (folder / name).write_text(content)
    assert {path.name for path in folder.iterdir()} == {"layers.py", "suite.toml"}
    return folder


def test_the_example_is_planned_and_without_its_limits_it_is_not(home: FarmHome, suite: Path) -> None:
    listed = home.farm(*_RUN, "--collect-only")
    assert (listed.returncode, listed.stdout.split()) == (0, [f"my_suite/{job}" for job in _JOBS]), listed.stderr

    manifest = suite / "suite.toml"
    without = re.sub(r"\[suite\.tolerance\.16a8w\].*?\n\n", "", manifest.read_text(), flags=re.DOTALL)
    assert without != manifest.read_text()
    manifest.write_text(without)
    refused = home.farm(*_RUN, "--virtual", "1", code=2)
    key = "case.residual.tolerance.16a8w"
    assert refused.stderr == (
        f"farm: {manifest}: {key}: no limit decides its outputs at 16a8w: for a first run write [{key}] with "
        "fp32 = { sqnr_db = 10.0, mismatch = 0.0 }, then 'farm suites tune my_suite/residual' suggests better ones; "
        "or leave 16a8w out\n"
    )
    assert not home.state.exists()
    # An omitted precision needs no limits, and the suggested lines complete the suite.
    assert home.farm(*_RUN, "--collect-only", "--precision", "8a8w").returncode == 0
    added = f"\n[{key}]\nfp32 = {{ sqnr_db = 10.0, mismatch = 0.0 }}\n"
    manifest.write_text(without + added)
    assert home.farm(*_RUN, "--collect-only").returncode == 0


@pytest.mark.whole
def test_the_example_passes(home: FarmHome, suite: Path) -> None:
    assert suite.is_dir()
    jobs = {job["id"]: job["attempts"][-1]["verdict"] for job in home.json(*_RUN, "--virtual", "1")["jobs"]}
    assert jobs == dict.fromkeys((f"my_suite/{job}" for job in _JOBS), "passed")


def test_every_table_of_the_docs_is_whole() -> None:
    """A line of a table behind an empty line, and without a head of its own, is shown as text."""
    stray = []
    for page in sorted(_PAGE.parents[1].rglob("*.md")):
        lines = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), page.read_text(), flags=re.DOTALL)
        before = ""
        rows = lines.split("\n")
        for number, line in enumerate(rows):
            starts = line.startswith("|") and not before.startswith("|")
            if starts and not re.fullmatch(r"\|[-| :]+\|", rows[number + 1].strip()):
                stray.append(f"{page.name}:{number + 1}")
            before = line
    assert stray == []
