"""The rooms of `farm/` as docs/architecture.md draws them: which imports which, and that none grows too large.

The direction of imports stands in pyproject.toml, for import-linter: `.venv/bin/lint-imports` says what breaks it.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

import farm

_FARM = Path(farm.__file__).parent
_MOST_FILES = 18
_MOST_LINES = 400
# A revision of the store is one file for good.
_GROWS = "versions"


def _modules() -> list[Path]:
    return [path for path in _FARM.rglob("*.py") if path.name != "__init__.py"]


def test_imports_point_one_way_and_in_no_circle() -> None:
    config = _FARM.parent / "pyproject.toml"
    assert lint_imports(config_filename=str(config), no_cache=True) == EXIT_STATUS_SUCCESS, "lint-imports says which"


def test_no_room_has_too_many_files() -> None:
    files = Counter(str(path.parent.relative_to(_FARM)) for path in _modules() if path.parent.name != _GROWS)
    assert {room: count for room, count in files.items() if count > _MOST_FILES} == {}


def test_no_module_is_too_long() -> None:
    lines = {str(path.relative_to(_FARM)): len(path.read_bytes().splitlines()) for path in _modules()}
    assert {path: count for path, count in lines.items() if count > _MOST_LINES} == {}


def test_a_class_name_stands_for_one_thing() -> None:
    places: dict[str, list[str]] = {}
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(_FARM)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
