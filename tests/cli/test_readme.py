"""The README is short, links of the first pages lead to files, and the changelog has the version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from farm import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_has_at_most_700_words() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 700


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text(encoding="utf-8"))
    assert linked
    assert [name for name in linked if not (ROOT / name).exists()] == []


def test_the_changelog_has_the_version_of_the_package() -> None:
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
