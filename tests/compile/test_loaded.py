"""A file of the toolchain that is saved after the keys were computed: real builders, real imports."""

from __future__ import annotations

import importlib
import mmap
import os
import shutil
import sys
import time
from pathlib import Path

import msgspec
import pytest
from waiting import await_later_file_time

from farm.base.errors import InfraError
from farm.base.hashes import hash_tree
from farm.base.processes import Supervisor
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key, forget_sources, source_as_of_ns
from farm.builds.compile.loaded import LoadedFiles
from farm.builds.compile.pool import BuilderPool, BuilderSettings, MemoryLimits
from farm.builds.compile.protocol import BuildReply, BuildRequest
from farm.builds.toolchains.toolchain import Toolchain
from farm.suites.suite import Case, InputSpec, Job, Target

OPS = """
import torch
class Uses(torch.nn.Module):
    def forward(self, x):
        from edited_pass import LEVEL
        return x + LEVEL
class Refuses(torch.nn.Module):
    def __init__(self):
        super().__init__()
        import edited_pass
        raise ValueError("as the edit has it")
class Without(torch.nn.Module):
    def forward(self, x):
        return x + 1
"""
NAMES = ("Without", "Saved", "Uses", "Refuses")


def build(tools: Toolchain, folder: Path) -> tuple[BundleCache, dict[str, BuildReply]]:
    """Compile all with one builder, which imports `folder`/site; the toolchain was looked at before that was saved."""
    suite, site = folder / "suite", folder / "site"
    suite.mkdir()
    site.mkdir()
    compiler = msgspec.structs.replace(
        tools.compiler, as_of_ns=time.time_ns(), env={**tools.compiler.env, "PYTHONPATH": str(site)}
    )
    await_later_file_time(folder)
    (site / "edited_pass.py").write_text("LEVEL = 9.0\n")
    # Keys of suites are computed as late, so that they match the content at that time.
    (suite / "ops.py").write_text(OPS)
    saved = folder / "saved"
    saved.mkdir()
    (saved / "ops.py").write_text(f"{OPS}# another key\n")
    cache, replies = BundleCache(folder / "cache"), list[BuildReply]()
    requests = {}
    for name in NAMES:
        module, of = (".ops:Without", saved) if name == "Saved" else (f".ops:{name}", suite)
        case = Case("s", name, module=module, inputs=(InputSpec((1, 8)),), folder=str(of))
        job = Job(case, Target("SM8650", "xnnpack", "fp32"))
        key = bundle_key(job, tools.versions)
        requests[key] = BuildRequest(job, key, tools.versions, str(folder / f"{name}.log"))
    await_later_file_time(folder)
    (saved / "ops.py").write_text(OPS)
    with Supervisor() as supervisor:
        pool = BuilderPool(
            requests.values(), compiler,
            BuilderSettings(MemoryLimits(8192, 4096), 300.0, cache.root, supervisor, folder),
            width=1, on_done=replies.append,
        )  # fmt: skip
        pool.start()
        pool.join()
    return cache, {requests[reply.key].job.case.name: reply for reply in replies}


@pytest.mark.parametrize("act", ["saved", "removed"])
def test_a_file_of_a_suite_that_is_saved_or_removed_after_its_key_is_in_no_bundle(tmp_path: Path, act: str) -> None:
    (tmp_path / "ops.py").write_text(OPS)
    (tmp_path / "other.py").write_text("LEVEL = 1\n")
    case = Case("s", "c", module=".ops:Without", inputs=(InputSpec((1, 8)),), folder=str(tmp_path))
    job = Job(case, Target("SM8650", "xnnpack", "fp32"))
    bundle_key(job, {})
    as_of_ns = source_as_of_ns(job)
    loaded = LoadedFiles(as_of_ns, tmp_path / "cache")
    loaded._seen.add(str(tmp_path / "other.py"))
    # A file written just before the key was computed is part of the key.
    loaded.require_suite_old(job.case, as_of_ns)
    await_later_file_time(tmp_path)
    (tmp_path / "other.py").unlink() if act == "removed" else (tmp_path / "other.py").write_text("LEVEL = 2\n")
    with pytest.raises(InfraError, match="other.py was changed after the run had begun"):
        loaded.require_suite_old(job.case, as_of_ns)


@pytest.mark.whole
def test_what_is_saved_while_an_untraced_toolchain_compiles_is_in_no_bundle(tools: Toolchain, tmp_path: Path) -> None:
    cache, replies = build(tools, tmp_path)
    without = replies.pop("Without")
    assert without.ok, without.reason
    assert cache.lookup(without.key) is not None
    for name, reply in replies.items():
        assert (reply.ok, reply.infra) == (False, True)
        file = "saved/ops.py" if name == "Saved" else "edited_pass.py"
        assert f"{file} was changed after the run had begun" in reply.reason
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


def is_loaded(site: Path) -> None:
    importlib.import_module("seen_module")
    importlib.import_module("ctypes").CDLL(str(site / "libQnnSeen.so"))


def test_a_link_or_other_permissions_are_no_edit(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The memory of hashes keeps files that had not just changed.
    monkeypatch.setattr("farm.base.hashes._YOUNG_S", 0.0)
    await_later_file_time(tmp_path)
    hash_tree(tmp_path / "cache", site)
    loaded = LoadedFiles(time.time_ns(), tmp_path / "cache")
    await_later_file_time(tmp_path)
    (tmp_path / "link").hardlink_to(site / "seen_module.py")
    (site / "libQnnSeen.so").chmod(0o755)
    is_loaded(site)
    loaded.require_old("")


def test_memory_that_processes_share_is_no_file_of_a_toolchain(site: Path, tmp_path: Path) -> None:
    loaded = LoadedFiles(time.time_ns(), tmp_path / "cache")
    await_later_file_time(tmp_path)
    (site / "sem.shared").write_bytes(bytes(32))
    with (site / "sem.shared").open("r+b") as file, mmap.mmap(file.fileno(), 32):
        loaded.require_old("")


def test_a_toolchain_below_the_users_folder_of_temporary_files_is_checked(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The template loads a toolchain with the user's TMPDIR, which may hold environments as well.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    await_later_file_time(tmp_path)
    loaded = LoadedFiles(time.time_ns(), tmp_path / "cache")
    await_later_file_time(tmp_path)
    (site / "seen_module.py").write_text("LEVEL = 2\n")
    is_loaded(site)
    with pytest.raises(InfraError, match=r"seen_module.py was changed after the run had begun"):
        loaded.require_old("")


@pytest.mark.parametrize("name", ["seen_module.py", "libQnnSeen.so"])
def test_a_copy_with_an_old_time_is_an_edit(site: Path, tmp_path: Path, name: str) -> None:
    hash_tree(tmp_path / "cache", site)
    await_later_file_time(tmp_path)
    loaded = LoadedFiles(time.time_ns(), tmp_path / "cache")
    await_later_file_time(tmp_path)
    kept = tmp_path / name
    shutil.copy2(site / name, kept)
    with kept.open("ab") as file:
        file.write(b"\n")
    os.utime(kept, (1, 1))
    kept.replace(site / name)
    is_loaded(site)
    with pytest.raises(InfraError, match=f"{name} was changed after the run had begun"):
        loaded.require_old("")
    # The module stays loaded, so that no later job matches its key.
    with pytest.raises(InfraError, match=name):
        loaded.require_old("")


@pytest.mark.whole
def test_an_edit_between_two_precisions_is_in_no_bundle_and_in_the_bundles_of_the_next_run(
    tools: Toolchain, tmp_path: Path
) -> None:
    suite, cache = tmp_path / "suite", BundleCache(tmp_path / "cache")
    suite.mkdir()
    ops, text = suite / "ops.py", "import torch\nclass Adds(torch.nn.Module):\n    def forward(self, x):\n"
    ops.write_text(f"{text}        return x + 1\n")
    case = Case("s", "adds", module=".ops:Adds", inputs=(InputSpec((1, 8)),), folder=str(suite))

    def build(edited: str) -> list[BuildReply]:
        await_later_file_time(tmp_path)
        forget_sources()
        jobs = [Job(case, Target("SM8650", "htp", precision)) for precision in ("8a8w", "16a8w")]
        requests = [
            BuildRequest(job, bundle_key(job, tools.versions), tools.versions, str(tmp_path / "log")) for job in jobs
        ]
        replies: list[BuildReply] = []

        def edit(reply: BuildReply) -> None:
            replies.append(reply)
            if ops.read_text() != edited:
                ops.write_text(edited)

        with Supervisor() as supervisor:
            pool = BuilderPool(
                requests, tools.compiler,
                BuilderSettings(MemoryLimits(8192, 4096), 300.0, cache.root, supervisor, tmp_path),
                width=1, on_done=edit,
            )  # fmt: skip
            pool.start()
            pool.join()
        return replies

    edited = f"{text}        return x * 3 + 1\n"
    first, second = build(edited)
    assert (first.ok, second.ok, second.infra) == (True, False, True)
    assert "ops.py was changed after the run had begun" in second.reason
    replies = build(edited)
    assert [(reply.ok, reply.reason) for reply in replies] == [(True, ""), (True, "")]
    bundles = [cache.lookup(reply.key) for reply in (first, replies[0])]
    operators = [dict(bundle.manifest.operators) for bundle in bundles if bundle is not None]
    assert operators[0] != operators[1]
