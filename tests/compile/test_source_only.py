"""Bytecode in compiler processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from foreign_bytecode import write_foreign_bytecode

PROGRAM = """
import sys
from farm.builds.compile.loaded import import_from_source
folder, *developed = sys.argv[1:]
import_from_source(developed)
sys.path.insert(0, folder)
import code_of_user
print(code_of_user.VALUE)
"""


def imported(folder: Path, *developed: Path) -> str:
    """Import the module of a folder in a process, and return its value."""
    words = [sys.executable, "-c", PROGRAM, str(folder), *map(str, developed)]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "site-packages").mkdir()
    return tmp_path


@pytest.mark.parametrize("mode", ["UNCHECKED_HASH", "TIMESTAMP"])
def test_bytecode_beside_the_source_of_a_user_is_not_run(folder: Path, mode: str) -> None:
    source = folder / "code_of_user.py"
    source.write_text("VALUE = 'source'\n")
    write_foreign_bytecode(source, "VALUE = 'foreign'\n", mode)
    assert imported(folder) == "source"


def test_bytecode_of_an_installed_package_is_run_unless_the_package_is_developed(folder: Path) -> None:
    source = folder / "site-packages" / "code_of_user.py"
    source.write_text("VALUE = 'source'\n")
    write_foreign_bytecode(source, "VALUE = 'foreign'\n")
    assert imported(source.parent) == "foreign"
    assert imported(source.parent, source.parent) == "source"


def test_bytecode_without_a_source_is_no_module(folder: Path) -> None:
    source = folder / "code_of_user.py"
    source.write_text("")
    write_foreign_bytecode(source, "VALUE = 'foreign'\n")
    [compiled] = (folder / "__pycache__").iterdir()
    compiled.rename(source.with_suffix(".pyc"))
    source.unlink()
    assert imported(folder) == ""
