"""farm's code under the interpreter of a toolchain."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from made_environments import make_environment

from farm.base.errors import MissingToolError
from farm.builds.toolchains.handover import handover
from farm.builds.toolchains.interpreters import inspect, process_environment

_LOADED = """
import sys
import farm.builds.compile.builder, farm.builds.compile.debug.debugger
print(*sorted({name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names) - {"__main__"}))
print(farm.__file__)
import coverage.tracer
try:
    import sqlalchemy
except ImportError:
    print("no sqlalchemy")
"""


def test_a_builder_starts_under_an_interpreter_that_has_nothing_of_farm(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    folder = handover(tmp_path / "cache", python, inspect(python))
    env = process_environment({"PYTHONPATH": str(folder)})
    done = subprocess.run([python, "-c", _LOADED], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["farm msgspec", f"{folder}/farm/__init__.py", "no sqlalchemy"], done.stderr
    assert handover(tmp_path / "cache", python, inspect(python)) == folder


def test_what_is_gone_behind_a_link_is_handed_over_anew(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    folder = handover(tmp_path / "cache", python, inspect(python))
    (folder / "msgspec").unlink()
    assert (handover(tmp_path / "cache", python, inspect(python)) / "msgspec" / "__init__.py").is_file()


def test_an_interpreter_of_another_abi_needs_its_own_msgspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = make_environment(tmp_path / "env")
    facts = msgspec.structs.replace(inspect(python), abi="cpython-399-x86_64-linux-gnu")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"needs msgspec==.* \(cpython-399.*is the package index reachable"):
        handover(tmp_path / "cache", python, facts)
    assert not [path for path in (tmp_path / "cache").rglob("packages-*") if path.is_dir()]
