"""Each command in the documentation exists and has the options that stand there."""

from __future__ import annotations

import re
from pathlib import Path

from command_words import fault

ROOT = Path(__file__).resolve().parents[2]


def commands(page: str) -> list[str]:
    """Return the farm commands in the code blocks and the code of the text of a page."""
    page = re.sub(r"^(\./farmw|\.venv/bin/farm) (?!test\b)", "farm ", page, flags=re.MULTILINE)
    blocks = "".join(re.findall(r"```[a-z]*\n(.*?)```", page, re.DOTALL)).replace("\\\n", " ")
    lines = [part for line in blocks.splitlines() for part in re.split(r"; ", re.sub(r"^\$ ", "", line.strip()))]
    lines += re.findall(r"`(farm [^`]+)`", page)
    # Two blanks begin a remark, as do "#", and "|" and ">" other programs.
    return [re.split(r"\s{2,}|\s[#|>]", line)[0].replace("...", "") for line in lines if line.startswith("farm ")]


def test_every_command_of_the_documentation_is_one_with_such_options() -> None:
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    found = [(page.name, line) for page in pages for line in commands(page.read_text())]
    assert len(found) > 300
    assert len([line for name, line in found if name == "README.md"]) > 5
    wrong = [(name, line, word) for name, line in found if (word := fault(line.split()))]
    assert wrong == []
