"""Docstrings, comments and documentation have plain sentences: tools/plain_texts.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("plain_texts", ROOT / "tools" / "plain_texts.py")
assert _spec is not None
assert _spec.loader is not None
plain_texts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain_texts)


@pytest.mark.parametrize("part", plain_texts.PARTS)
def test_a_part_of_the_project_has_few_sentences_without_a_named_subject(part: str) -> None:
    found = list(plain_texts.texts(ROOT / part))
    broken = plain_texts.hits(found)
    assert found
    assert 100 * len(broken) / len(found) <= plain_texts.MOST_PER_100, broken[:20]


def test_a_sentence_without_a_named_subject_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""What is kept."""\n\n# It ends here.\nX = 1  # Seconds.\n')
    (tmp_path / "two.md").write_text("# Title\n\n```\nIt is code.\n```\n\nThat of which nobody knows.\nWhat now?\n")
    broken = plain_texts.hits(list(plain_texts.texts(tmp_path)))
    assert [text.words for text in broken] == ["What is kept.", "It ends here.", "That of which nobody knows."]
