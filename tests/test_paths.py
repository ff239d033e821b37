"""Texts of users that name a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.base.errors import UsageError
from farm.base.paths import beside, is_path


def test_a_text_with_a_slash_or_with_a_dot_or_a_tilde_in_front_is_a_path() -> None:
    assert all(is_path(text) for text in (".", "..", "./et", ".venv", "~", "~ada/et", "/opt/et", "et/src", "../et"))
    assert not any(is_path(text) for text in ("", "main", "main.old", "1.5.0", "v2.49.40", "default", "et~"))


def test_a_path_is_relative_to_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert [beside(tmp_path, text) for text in ("et", "~/et", "/opt/et")] == [
        tmp_path / "et", tmp_path / "home/et", Path("/opt/et")
    ]  # fmt: skip
    with pytest.raises(UsageError, match="~no-such-user/et: there is no such home"):
        beside(tmp_path, "~no-such-user/et")
