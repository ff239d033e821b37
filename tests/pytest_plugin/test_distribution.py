"""Distribution modes of xdist that `farm pytest` refuses, on the command line and elsewhere."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from farm.errors import UsageError
from farm.pytest_plugin.distribution import distribution_problem
from farm.pytest_plugin.launch import check_arguments

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("mode", ["loadgroup", "loadscope", "loadfile"])
@pytest.mark.parametrize("form", [["--dist", "{}"], ["--dist={}"]])
def test_a_broken_mode_on_the_command_line_is_refused_before_a_device_is_taken(mode: str, form: list[str]) -> None:
    words = [word.format(mode) for word in form]
    with pytest.raises(UsageError, match=rf"--dist {mode} loses tests or never ends.*leave --dist out"):
        check_arguments([*words, "t.py"])


@pytest.mark.parametrize(
    "words", [["--dist", "load"], ["--dist=each"], ["-d"], ["--dist", "worksteal"], ["-k", "loadgroup"]]
)
def test_other_modes_are_the_users(words: list[str]) -> None:
    check_arguments([*words, "t.py"])


def test_a_fixed_xdist_may_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distribution_problem("loadgroup")
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "3.9.0")
    assert distribution_problem("loadgroup") == ""


@pytest.mark.parametrize("place", ["addopts", "environment"])
def test_the_plugin_refuses_what_an_ini_file_or_the_environment_says(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): ...\n")
    if place == "addopts":
        (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --dist=loadscope\n")
    else:
        monkeypatch.setenv("PYTEST_ADDOPTS", "--dist loadscope")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # A plan is all that the plugin needs to know that `farm pytest` started it.
    script = (
        "import sys, pytest, farm.pytest_plugin.plugin as plugin\n"
        "plugin.read_plan = lambda: object()\n"
        "sys.exit(pytest.main(['-p', 'xdist', '-n', '1', 'test_nothing.py'], plugins=[plugin]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "--dist loadscope loses tests or never ends" in done.stderr
