"""Checkouts of ExecuTorch, made of the installed package: git has the sources, and libraries lie beside them."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from programs import run_program

# Folders that a compile for HTP or the CPU imports, and their neighbours.
_FOLDERS = (
    "backends/qualcomm", "backends/transforms", "backends/xnnpack", "codegen", "data", "devtools", "exir", "extension",
    "kernels", "lib", "runtime", "schema",
)  # fmt: skip
_LEFT_OUT = ("__pycache__", "test", "tests", "include", "share", "examples", "llm", "training", "*.pyi")
_IDENTITY = {
    "GIT_AUTHOR_NAME": "Ada", "GIT_AUTHOR_EMAIL": "ada@example.org",
    "GIT_COMMITTER_NAME": "Ada", "GIT_COMMITTER_EMAIL": "ada@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1",
}  # fmt: skip


def installed() -> Path:
    """Return the folder of the installed package."""
    spec = importlib.util.find_spec("executorch")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def run_git(folder: Path, *arguments: str) -> str:
    """Return the output of git."""
    done = run_program(["git", *arguments], cwd=folder, env=os.environ | _IDENTITY)
    return done.stdout


def make_repository(folder: Path, files: Mapping[str, str]) -> str:
    """Make a repository with one commit and return its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    run_git(folder, "init", "-q", "-b", "main")
    return commit(folder, "The beginning", files)


def make_checkout(folder: Path) -> str:
    """Make a checkout that compiles, with one commit, and return that commit; libraries and flatc are links."""
    source = installed()
    libraries = []

    def place(path: str, target: str) -> None:
        if path.endswith(".so") or Path(path).name == "flatc":
            libraries.append(target)
            os.symlink(path, target)
        else:
            shutil.copyfile(path, target)

    for name in _FOLDERS:
        if (source / name).is_dir():
            ignore = shutil.ignore_patterns(*_LEFT_OUT)
            shutil.copytree(source / name, folder / name, ignore=ignore, copy_function=place)
    for path in source.glob("*.*"):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    run_git(folder, "init", "-q", "-b", "main")
    return commit(folder, "The beginning", {".gitignore": "*.so\n/data/bin/flatc\n__pycache__/\n"})


def commit(folder: Path, subject: str, files: Mapping[str, str] | None = None) -> str:
    """Write files (relative path -> content), commit everything and return the hash of the commit."""
    for path, text in (files or {}).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    run_git(folder, "add", "-A")
    run_git(folder, "commit", "-q", "--allow-empty", "-m", subject)
    return run_git(folder, "rev-parse", "HEAD").strip()
