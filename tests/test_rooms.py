"""The packages of `farm/` import each other in one direction and in no circle.

The directions stand in pyproject.toml, for import-linter: `.venv/bin/lint-imports` names each import that breaks one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import farm


def test_imports_point_one_way_and_in_no_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    # import-linter disables every logger that there is.
    monkeypatch.setattr("logging.config.dictConfig", lambda _: None)
    config = Path(farm.__file__).parent.parent / "pyproject.toml"
    assert lint_imports(config_filename=str(config), no_cache=True) == EXIT_STATUS_SUCCESS, "run .venv/bin/lint-imports"
