"""Code in the current folder of a command, which may be another user's, is not executed by farm's own processes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import farm
from farm.base.config.settings import load_config

PACKAGE = Path(farm.__file__).parent
_KEEPS_FOLDER = {
    # pytest and its users expect that `python -m pytest` imports from the current folder.
    "dispatch/pytest_plugin/launch.py",
}
_SAFE = {"-P", "-I"}

# A module of the current folder with the name of a package of farm.
HOSTILE = "import pathlib; pathlib.Path(__file__).with_name('executed').touch()\n"
START = """
import pathlib, sys
from farm.base.processes import Supervisor
from farm.dispatch.device_forks import device_forks
with Supervisor() as supervisor:
    device_forks(supervisor).fork(pathlib.Path(sys.argv[1]))
"""


def test_a_run_in_a_folder_of_another_user_does_not_execute_its_modules(tmp_path: Path) -> None:
    for name in ("farm", "msgspec"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    words = [sys.executable, "-P", "-c", START, str(tmp_path / "log")]
    done = subprocess.run(words, cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False)
    assert not (tmp_path / "executed").exists()
    assert done.returncode == 0, done.stderr


def test_the_command_of_a_debug_board_does_not_execute_modules_of_the_current_folder(tmp_path: Path) -> None:
    config = tmp_path / "farm.toml"
    config.write_text('[[device]]\nserial = "R5CT1"\npower = "tac:NOT-HERE-1"\n')
    (tmp_path / "farm.py").write_text(HOSTILE)
    (device,) = load_config(config).devices
    done = subprocess.run(device.power, cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False)
    assert not (tmp_path / "executed").exists()
    assert "NOT-HERE-1" in done.stderr


def test_every_python_process_of_farm_leaves_the_current_folder_out_of_its_search_path() -> None:
    assert sorted({name for name, _ in _unsafe()} - _KEEPS_FOLDER) == []


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}


def _unsafe() -> list[tuple[str, int]]:
    """Return file and line of each `python -m` that searches the current folder."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        # `process_environment` sets PYTHONSAFEPATH.
        calls = (one for one in ast.walk(tree) if isinstance(one, ast.Call))
        safe = {id(one) for call in calls if _is_safe(call) for one in ast.walk(call)}
        for one in ast.walk(tree):
            if isinstance(one, ast.List | ast.Tuple) and id(one) not in safe:
                words = [part.value if isinstance(part, ast.Constant) else None for part in one.elts]
                if "-m" in words[1:] and _SAFE.isdisjoint(words[: words.index("-m")]):
                    found.append((str(path.relative_to(PACKAGE)), one.lineno))
    return found


def _is_safe(call: ast.Call) -> bool:
    return any(word.arg == "env" and "process_environment(" in ast.unparse(word.value) for word in call.keywords)
