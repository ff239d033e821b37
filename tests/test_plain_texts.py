"""Docstrings, comments and documentation have plain sentences: tools/plain_texts.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import plain_texts  # noqa: E402 - tools/ is no package


@pytest.mark.parametrize("part", [*plain_texts.PARTS, "messages"])
def test_few_sentences_are_without_a_named_subject(part: str) -> None:
    found = list(plain_texts.messages(ROOT / "farm") if part == "messages" else plain_texts.texts(ROOT / part))
    broken = plain_texts.hits(found)
    assert found
    assert 100 * len(broken) / len(found) <= plain_texts.MOST_PER_100, broken[:20]


def test_a_sentence_without_a_named_subject_is_found(tmp_path: Path) -> None:
    source = '"""What is kept."""\n\n# It ends here.\nX = 1  # Seconds.\n'
    source += 'raise ValueError(f"{X} is not what was pushed there")\n'
    (tmp_path / "one.py").write_text(source)
    (tmp_path / "two.md").write_text("# Title\n\n```\nIt is code.\n```\n\nThat of which nobody knows.\nWhat now?\n")
    (tmp_path / "a.cpp").write_text('int a;  // It counts.\n/* Whoever reads. */\nauto b = "http://It.is";\n')
    (tmp_path / "b.css").write_text("tr > * { margin: 0; } /* What the eye sees. */\n")
    (tmp_path / "data.txt").write_text("# It is data.\n")
    broken = plain_texts.hits(list(plain_texts.texts(tmp_path)))
    assert {text.words for text in broken} == {
        *("What is kept.", "It ends here.", "That of which nobody knows.", "It counts.", "Whoever reads."),
        "What the eye sees.",
    }
    [message] = plain_texts.hits(list(plain_texts.messages(tmp_path)))
    assert message.words == "X is not what was pushed there"
