"""Source trees of commits: their content, files that they leave alone, and the times when they are made again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from executorch_checkout import commit, make_repository, run_git
from log_lines import LogLines
from waiting import Started

from farm.base.config.settings import Config, load_config
from farm.base.config.toolchains import ToolchainConfig
from farm.base.errors import InfraError, NativeBuildError, UsageError
from farm.base.git import git
from farm.builds.toolchains.worktrees import Checkout, is_native, prune_worktrees, worktree, worktrees
from farm.cli.main import cli

FILES = {
    "exir/__init__.py": "LEVEL = 1\n",
    "backends/qualcomm/aot.cpp": "int level = 1;\n",
    "docs/index.md": "Hello\n",
    ".gitignore": "*.so\n/build-x86/\n",
}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "src" / "executorch"
    make_repository(folder, FILES)
    (folder / "backends/qualcomm/python").mkdir()
    (folder / "backends/qualcomm/python/manager.so").write_text("built of level 1")
    (folder / "build-x86").mkdir()
    (folder / "build-x86" / "library.so").write_text("as well")
    return folder


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    # No other worktrees.
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "farm.toml").write_text("")
    return load_config(tmp_path / "farm.toml")


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tree_of(config: Config, checkout: Path, ref: str = "HEAD") -> Path:
    return worktree(config, checkout, ref).toolchain.checkout


MODULE, LIBRARY, NATIVE = "exir/__init__.py", "backends/qualcomm/python/manager.so", "backends/qualcomm/aot.cpp"


def test_a_worktree_has_the_files_of_its_commit_and_the_libraries_of_the_checkout(
    checkout: Path, config: Config
) -> None:
    commit(checkout, "Level 2", {MODULE: "LEVEL = 2\n", "backends/qualcomm/python/helper.py": "pass\n"})
    (checkout / MODULE).write_text("LEVEL = 3\n")
    before = everything(checkout)
    for ref, text in (("HEAD~1", "LEVEL = 1\n"), ("main", "LEVEL = 2\n")):
        one = worktree(config, checkout, ref)
        tree = one.toolchain.checkout
        assert (tree.name, (tree / MODULE).read_text()) == ("executorch", text)
        # Also in a folder in which the commit has files.
        assert (tree / LIBRARY).read_text() == "built of level 1"
        assert (tree / "build-x86/library.so").is_file()
        assert (tree / "backends/qualcomm/python/helper.py").exists() == (ref == "main")
        assert run_git(tree, "status", "--porcelain") == ""
        assert run_git(tree, "rev-parse", "HEAD").strip() == one.commit.sha
        assert not one.warnings
    assert (one.commit.subject, one.commit.author) == ("Level 2", "Ada <ada@example.org>")
    # Not even git's own notes about it are others.
    assert everything(checkout) == before


@pytest.mark.parametrize("damage", ["edited", "killed"])
def test_an_edited_worktree_is_made_anew_and_so_is_a_half_made_one(checkout: Path, config: Config, damage: str) -> None:
    tree = tree_of(config, checkout)
    if damage == "edited":
        (tree / MODULE).write_text("LEVEL = 9\n")
    else:
        (tree.parent / "worktree.json").unlink()
        (tree / MODULE).unlink()
    assert tree_of(config, checkout) == tree
    assert (tree / MODULE).read_text() == "LEVEL = 1\n"


def test_nothing_that_a_repository_asks_to_run_runs(checkout: Path, config: Config, tmp_path: Path) -> None:
    ran, command = tmp_path / "ran", tmp_path / "filter"
    for script in (command, *(checkout / ".git/hooks" / name for name in ("post-checkout", "pre-commit"))):
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!/bin/sh\necho $0 >> {ran}\ncat\n")
        script.chmod(0o755)
    commit(checkout, "Attributes", {".gitattributes": "*.md filter=odd\n"})
    ran.unlink(missing_ok=True)
    options = {"filter.odd.smudge": str(command), "filter.odd.required": "true", "core.fsmonitor": str(command)}
    for name, value in options.items():
        run_git(checkout, "config", name, value)
    assert (tree_of(config, checkout) / "docs/index.md").read_text() == "Hello\n"
    assert not ran.exists()


BUILD = """
from pathlib import Path
print("compiling")
text = Path("backends/qualcomm/aot.cpp").read_text()
assert "3" not in text, "level 3 does not build"
place = Path("backends/qualcomm/python")
place.mkdir()
(place / "manager.so").write_text("built of " + text)
Path({count!r}).open("a").write("built ")
"""


def test_other_native_sources_are_warned_of_or_built_once(checkout: Path, config: Config, tmp_path: Path) -> None:
    commit(checkout, "Native", {NATIVE: "int level = 2;\n"})
    commit(checkout, "Docs", {"docs/index.md": "Hello again\n"})
    commit(checkout, "Native again", {NATIVE: "int level = 3;\n"})
    run_git(checkout, "checkout", "-q", "main~3")
    [warning] = worktree(config, checkout, "main~1").warnings
    assert "has other native sources" in warning
    assert "--build-command" in warning

    count = tmp_path / "count"
    build = (sys.executable, "-c", BUILD.format(count=str(count)))
    table = ToolchainConfig(name="mine", named=True, checkout=checkout, build=build)
    config = msgspec.structs.replace(config, toolchains={"mine": table})
    notes = LogLines()
    for ref in ("main~1", "main~2"):
        one = worktree(config, checkout, ref)
        assert (one.warnings, one.toolchain.name, one.toolchain.named) == ((), f"mine@{one.commit.short}", False)
        assert (one.toolchain.checkout / LIBRARY).read_text() == "built of int level = 2;\n"
    assert (count.read_text(), len(notes)) == ("built ", 1)
    with pytest.raises(NativeBuildError, match="does not build: .* see (.*)") as failure:
        worktree(config, checkout, "main")
    log = Path(str(failure.value).rpartition("see ")[2]).read_text()
    assert "compiling" in log
    assert "level 3 does not build" in log
    # Files of the checkout do not get in the way: main~3 needs no build.
    assert (tree_of(config, checkout, "main~3") / LIBRARY).read_text() == "built of level 1"
    # Edited native sources belong to no commit.
    config = msgspec.structs.replace(config, toolchains={})
    assert not worktree(config, checkout, "HEAD").warnings
    (checkout / NATIVE).write_text("int level = 7;\n")
    assert worktree(config, checkout, "HEAD").warnings


def test_submodules_are_the_checkouts_and_in_a_build_the_commits(
    checkout: Path, config: Config, tmp_path: Path
) -> None:
    inner, header = tmp_path / "inner", "third-party/inner/version.h"
    make_repository(inner, {"version.h": "1"})
    add = ("submodule", "--quiet", "add", str(inner), "third-party/inner")
    run_git(checkout, "-c", "protocol.file.allow=always", *add)
    commit(checkout, "With a submodule")
    commit(inner, "Two", {"version.h": "2"})
    run_git(checkout / "third-party/inner", "pull", "-q")
    commit(checkout, "A newer submodule")
    assert (tree_of(config, checkout) / header).read_text() == "2"
    assert any("third-party/inner" in warning for warning in worktree(config, checkout, "HEAD~1").warnings)

    script = (
        f"from pathlib import Path; Path('out.so').write_text(Path('{header}').read_text());"
        f"Path('{header}').write_text('written by the build')"
    )
    table = ToolchainConfig(checkout=checkout, build=(sys.executable, "-c", script))
    old = worktree(msgspec.structs.replace(config, toolchain=table), checkout, "HEAD~1")
    assert (old.toolchain.checkout / "out.so").read_text() == "1"
    assert not old.warnings
    assert (checkout / header).read_text() == "2"


def test_what_cannot_be_is_refused(checkout: Path, config: Config, tmp_path: Path) -> None:
    for ref, problem in (("nightly", "has no commit 'nightly'"), ("--output=/tmp/x", "is no commit")):
        with pytest.raises(UsageError, match=problem):
            worktree(config, checkout, ref)
    for folder, problem in (
        (checkout / "exir", "name its top folder"), (tmp_path / "nowhere", "no such folder"),
        (tmp_path, "not a git repository"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=problem):
            Checkout(folder)


def test_a_range_goes_along_first_parents(checkout: Path) -> None:
    first = run_git(checkout, "rev-parse", "HEAD").strip()
    run_git(checkout, "checkout", "-q", "-b", "side")
    commit(checkout, "On the side", {"exir/side.py": "pass\n"})
    run_git(checkout, "checkout", "-q", "main")
    commit(checkout, "On main", {"exir/main.py": "pass\n"})
    run_git(checkout, "merge", "-q", "--no-ff", "-m", "Merge side", "side")
    repository = Checkout(checkout)
    found = repository.between(repository.commit(first), repository.commit("main"))
    assert [one.subject for one in found] == ["On main", "Merge side"]
    assert [len(one.parents) for one in found] == [1, 2]
    with pytest.raises(UsageError, match="is no ancestor of"):
        repository.between(repository.commit("main"), repository.commit(first))
    with pytest.raises(UsageError, match="both ends"):
        repository.between(repository.commit("main"), repository.commit("main"))


MADE = """
import sys
from pathlib import Path
from farm.base.config.settings import load_config
from farm.builds.toolchains.worktrees import worktree
worktree(load_config(Path(sys.argv[1])), Path(sys.argv[2]), "HEAD")
print("made", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(checkout: Path, config: Config) -> Iterator[subprocess.Popen[str]]:
    """Another process, which works with the tree of HEAD."""
    command = [sys.executable, "-c", MADE, str(config.file), str(checkout)]
    with Started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "made\n"
        yield one
        one.communicate("")


def test_pruning_leaves_what_is_used(other: subprocess.Popen[str], config: Config) -> None:
    def cache(*words: str) -> str:
        return CliRunner().invoke(cli, ["setup", "cache", *words]).output

    [entry] = worktrees(config.cache_dir)
    assert prune_worktrees(config.cache_dir, older_than_s=0.0) == []
    other.communicate("")
    assert "1 source tree of commits" in cache()
    assert "and 1 source tree of commits" in cache("prune", "--all")
    assert Path(entry.path).is_dir()
    removed = cache("prune", "--older", "0s", "--yes")
    assert "removed 0 bundles, 0 B, and 1 source tree of commits" in removed
    assert not Path(entry.path).exists()
    assert worktrees(config.cache_dir) == []


def test_an_edited_worktree_stays_while_another_process_uses_it(
    other: subprocess.Popen[str], checkout: Path, config: Config
) -> None:
    [entry] = worktrees(config.cache_dir)
    file = Path(entry.path) / "executorch/exir/__init__.py"
    file.write_text("LEVEL = 9\n")
    with pytest.raises(UsageError, match=r"was edited \(M exir/__init__.py\), and another process .* wait until"):
        worktree(config, checkout, "HEAD")
    assert file.read_text() == "LEVEL = 9\n"
    other.communicate("")
    worktree(config, checkout, "HEAD")
    assert file.read_text() == "LEVEL = 1\n"


def test_a_worktree_stays_where_git_is_too_slow_to_say_what_it_is(
    checkout: Path, config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = worktree(config, checkout, "HEAD").toolchain.checkout
    inode = tree.stat().st_ino
    real = shutil.which("git")
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\ncase "$*" in *status*) exec sleep 5;; esac\nexec {real} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")

    def impatient(*arguments: Any, **options: Any) -> str:
        return git(*arguments, **({"timeout_s": 0.3} if "status" in arguments else {}), **options)

    monkeypatch.setattr("farm.builds.toolchains.worktrees.git", impatient)
    with pytest.raises(InfraError, match="git status did not finish"):
        worktree(config, checkout, "HEAD")
    assert tree.stat().st_ino == inode


def test_a_worktree_that_is_asked_for_is_not_pruned_before_it_is_used(
    checkout: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worktree of this process would be in use.
    command = [sys.executable, "-c", MADE, str(config.file), str(checkout)]
    subprocess.run(command, input="", capture_output=True, text=True, check=True)
    [entry] = worktrees(config.cache_dir)
    os.utime(Path(entry.path) / "worktree.json", (1, 1))
    prune = (
        "import sys; from pathlib import Path; from farm.builds.toolchains.worktrees import prune_worktrees;"
        "print(len(prune_worktrees(Path(sys.argv[1]), older_than_s=60.0)))"
    )
    counts = list[str]()

    def meanwhile(*arguments: Any, **options: Any) -> str:
        if "status" in arguments:
            command = [sys.executable, "-c", prune, str(config.cache_dir)]
            counts.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        return git(*arguments, **options)

    monkeypatch.setattr("farm.builds.toolchains.worktrees.git", meanwhile)
    assert (worktree(config, checkout, "HEAD").toolchain.checkout / "exir/__init__.py").is_file()
    assert counts == ["0"]


def test_native_sources_are_what_farm_compiles_and_runs_with() -> None:
    native = (
        "backends/qualcomm/runtime/QnnManager.cpp", "schema/program.fbs", "CMakeLists.txt",
        "kernels/portable/functions.yaml",
    )  # fmt: skip
    others = (
        "backends/qualcomm/builders/op_add.py", "backends/vulkan/runtime/Vk.cpp", "backends/qualcomm/tests/check.cpp",
        "docs/source/conf.yaml",
    )  # fmt: skip
    assert [path for path in (*native, *others) if is_native(path)] == list(native)
