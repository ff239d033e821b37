"""A file of the toolchain that is saved after the keys were computed: real builders, real imports."""

from __future__ import annotations

import importlib
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import made
import msgspec
import pytest
from builder_runs import request_of, run_builders
from foreign_bytecode import write_foreign_bytecode
from waiting import await_later_file_time

from farm.base.errors import InfraError
from farm.base.hashes import hash_tree
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key, forget_sources, source_as_of_ns
from farm.builds.compile.loaded import LoadedFiles
from farm.builds.compile.protocol import BuildReply
from farm.builds.toolchains.toolchain import Toolchain
from farm.suites.suite import Job

ADDS = """
import torch
class Adds(torch.nn.Module):
    def forward(self, x):
        return x + 1
"""
OPS = f"""{ADDS}
class Uses(torch.nn.Module):
    def forward(self, x):
        from edited_pass import LEVEL
        return x + LEVEL
class Refuses(torch.nn.Module):
    def __init__(self):
        super().__init__()
        import edited_pass
        raise ValueError("as the edit has it")
"""


NO_SUITE = made.job(folder="").case


def job_of(name: str, folder: Path, backend: str = "xnnpack", precision: str = "fp32") -> Job:
    return made.job(name, backend=backend, precision=precision, module=f".ops:{name}", folder=str(folder))


@pytest.mark.parametrize("act", ["saved", "removed"])
def test_a_file_of_a_suite_that_is_saved_or_removed_after_its_key_is_in_no_bundle(tmp_path: Path, act: str) -> None:
    (tmp_path / "ops.py").write_text(ADDS)
    (tmp_path / "other.py").write_text("LEVEL = 1\n")
    job = job_of("Adds", tmp_path)
    bundle_key(job, {})
    as_of_ns = source_as_of_ns(job)
    loaded = LoadedFiles(as_of_ns, tmp_path / "cache")
    loaded._seen.add(str(tmp_path / "other.py"))
    # A file written just before the key was computed is part of the key.
    loaded.require_old(job.case, as_of_ns)
    await_later_file_time(tmp_path)
    (tmp_path / "other.py").unlink() if act == "removed" else (tmp_path / "other.py").write_text("LEVEL = 2\n")
    with pytest.raises(InfraError, match="other.py was changed after the start of the run"):
        loaded.require_old(job.case, as_of_ns)


@pytest.mark.whole
def test_what_is_saved_while_an_untraced_toolchain_compiles_is_in_no_bundle(tools: Toolchain, tmp_path: Path) -> None:
    suite, saved, site = tmp_path / "suite", tmp_path / "saved", tmp_path / "site"
    for folder in (suite, saved, site):
        folder.mkdir()
    # The toolchain was looked at before a file of it was saved; the keys of the suites are computed later.
    env = {**tools.compiler.env, "PYTHONPATH": str(site)}
    compiler = msgspec.structs.replace(tools.compiler, as_of_ns=time.time_ns(), env=env)
    await_later_file_time(tmp_path)
    (site / "edited_pass.py").write_text("LEVEL = 9.0\n")
    (suite / "ops.py").write_text(OPS)
    (saved / "ops.py").write_text(f"{OPS}# another key\n")
    jobs = [
        job_of(name, folder) for name, folder in (("Adds", suite), ("Adds", saved), ("Uses", suite), ("Refuses", suite))
    ]
    requests = [request_of(job, tools.versions, tmp_path) for job in jobs]
    await_later_file_time(tmp_path)
    (saved / "ops.py").write_text(OPS)
    cache = BundleCache(tmp_path / "cache")
    without, *replies = run_builders(requests, compiler, cache.root, tmp_path)
    assert without.ok, without.reason
    assert cache.lookup(without.key) is not None
    for reply, file in zip(replies, ("saved/ops.py", "edited_pass.py", "edited_pass.py"), strict=True):
        assert (reply.ok, reply.infra) == (False, True)
        assert f"{file} was changed after the start of the run" in reply.reason
        assert cache.lookup(reply.key) is None


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module and a library, looked at before."""
    # The library of an earlier test is still mapped in this process: it has to be older than the files of this test.
    await_later_file_time(tmp_path)
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "seen_module.py").write_text("LEVEL = 1\n")
    library = Path(str(sys.modules["msgspec._core"].__file__))
    (folder / "libQnnSeen.so").write_bytes(library.read_bytes())
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "seen_module", raising=False)
    importlib.invalidate_caches()
    return folder


def looked_at(folder: Path) -> LoadedFiles:
    """Return the files of a toolchain that is looked at now; later changes have later times."""
    await_later_file_time(folder)
    loaded = LoadedFiles(time.time_ns(), folder / "cache")
    await_later_file_time(folder)
    return loaded


def is_loaded(site: Path) -> None:
    importlib.import_module("seen_module")
    importlib.import_module("ctypes").CDLL(str(site / "libQnnSeen.so"))


def test_a_link_or_other_permissions_are_no_edit(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The memory of hashes keeps files that had not just changed.
    monkeypatch.setattr("farm.base.hashes._YOUNG_S", 0.0)
    await_later_file_time(tmp_path)
    hash_tree(tmp_path / "cache", site)
    loaded = looked_at(tmp_path)
    (tmp_path / "link").hardlink_to(site / "seen_module.py")
    (site / "libQnnSeen.so").chmod(0o755)
    is_loaded(site)
    loaded.require_old(NO_SUITE, 0)


def test_memory_that_processes_share_is_no_file_of_a_toolchain(site: Path, tmp_path: Path) -> None:
    loaded = looked_at(tmp_path)
    (site / "sem.shared").write_bytes(bytes(32))
    with (site / "sem.shared").open("r+b") as file, mmap.mmap(file.fileno(), 32):
        loaded.require_old(NO_SUITE, 0)


def test_a_toolchain_below_the_users_folder_of_temporary_files_is_checked(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The template loads a toolchain with the user's TMPDIR, which may hold environments as well.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    loaded = looked_at(tmp_path)
    (site / "seen_module.py").write_text("LEVEL = 2\n")
    is_loaded(site)
    with pytest.raises(InfraError, match=r"seen_module.py was changed after the start of the run"):
        loaded.require_old(NO_SUITE, 0)


@pytest.mark.parametrize("name", ["seen_module.py", "libQnnSeen.so"])
def test_a_copy_with_an_old_time_is_an_edit(site: Path, tmp_path: Path, name: str) -> None:
    hash_tree(tmp_path / "cache", site)
    loaded = looked_at(tmp_path)
    kept = tmp_path / name
    shutil.copy2(site / name, kept)
    with kept.open("ab") as file:
        file.write(b"\n")
    os.utime(kept, (1, 1))
    kept.replace(site / name)
    is_loaded(site)
    with pytest.raises(InfraError, match=f"{name} was changed after the start of the run"):
        loaded.require_old(NO_SUITE, 0)
    # The module stays loaded, so that no later job matches its key.
    with pytest.raises(InfraError, match=name):
        loaded.require_old(NO_SUITE, 0)


@pytest.mark.whole
def test_an_edit_between_two_precisions_is_in_no_bundle_and_in_the_bundles_of_the_next_run(
    tools: Toolchain, tmp_path: Path
) -> None:
    ops, cache = tmp_path / "ops.py", BundleCache(tmp_path / "cache")
    ops.write_text(ADDS)
    edited = ADDS.replace("x + 1", "x * 3 + 1")

    def build() -> list[BuildReply]:
        await_later_file_time(tmp_path)
        forget_sources()
        jobs = [job_of("Adds", tmp_path, "htp", precision) for precision in ("8a8w", "16a8w")]
        requests = [request_of(job, tools.versions, tmp_path) for job in jobs]

        def edit(_: BuildReply) -> None:
            if ops.read_text() != edited:
                ops.write_text(edited)

        return run_builders(requests, tools.compiler, cache.root, tmp_path, on_done=edit)

    first, second = build()
    assert (first.ok, second.ok, second.infra) == (True, False, True)
    assert "ops.py was changed after the start of the run" in second.reason
    replies = build()
    assert [(reply.ok, reply.reason) for reply in replies] == [(True, ""), (True, "")]
    bundles = [cache.lookup(reply.key) for reply in (first, replies[0])]
    operators = [dict(bundle.manifest.operators) for bundle in bundles if bundle is not None]
    assert operators[0] != operators[1]


# Bytecode in compiler processes.


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


def write_user_code(folder: Path, mode: str = "UNCHECKED_HASH") -> Path:
    """Write a module with foreign bytecode beside it, and return the module."""
    folder.mkdir(exist_ok=True)
    source = folder / "code_of_user.py"
    source.write_text("VALUE = 'source'\n")
    write_foreign_bytecode(source, "VALUE = 'foreign'\n", mode)
    return source


@pytest.mark.parametrize("mode", ["UNCHECKED_HASH", "TIMESTAMP"])
def test_bytecode_beside_the_source_of_a_user_is_not_run(tmp_path: Path, mode: str) -> None:
    write_user_code(tmp_path, mode)
    assert imported(tmp_path) == "source"


def test_bytecode_of_an_installed_package_is_run_unless_the_package_is_developed(tmp_path: Path) -> None:
    site = write_user_code(tmp_path / "site-packages").parent
    assert imported(site) == "foreign"
    assert imported(site, site) == "source"


def test_bytecode_without_a_source_is_no_module(tmp_path: Path) -> None:
    source = write_user_code(tmp_path)
    [compiled] = (tmp_path / "__pycache__").iterdir()
    compiled.rename(source.with_suffix(".pyc"))
    source.unlink()
    assert imported(tmp_path) == ""
