from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builder_runs import run_builders
from made import write_bundle

from farm.base.errors import BundleError, InfraError, UsageError
from farm.builds.bundles.bundle import MANIFEST, MODEL, load_bundle
from farm.builds.bundles.cache import BundleCache, leftovers
from farm.builds.toolchains.toolchain import Compiler

KEY = "ab" * 32


def fill(folder: Path, key: str = KEY, content: bytes = b"a model") -> None:
    write_bundle(folder, {MODEL: content}, key=key)


def add(cache: BundleCache, key: str = KEY, content: bytes = b"a model") -> None:
    cache.build(key, lambda folder: fill(folder, key, content))


def partial(root: Path) -> list[str]:
    return [path.name for path in root.glob("bundles/*/*") if path.name.endswith(".partial")]


def test_a_published_bundle_is_found_and_verified_and_not_built_again(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path)
    assert cache.lookup(KEY) is None
    for content in (b"first", b"second"):
        add(cache, content=content)
    bundle = cache.lookup(KEY)
    bundle.verify()
    assert (bundle.manifest.partitions, bundle.model.read_bytes()) == (1, b"first")
    assert partial(tmp_path) == []


def _garble(path: Path) -> None:
    path.write_bytes(b"b" + path.read_bytes()[1:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / MODEL).unlink(),
        lambda folder: (folder / MODEL).write_bytes(b"a mo"),
        lambda folder: _garble(folder / MODEL),
        lambda folder: (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes()[:50]),
        lambda folder: fill(folder, "cd" * 32),
    ],
    ids=["no model", "half a model", "a changed byte", "half a manifest", "another key"],
)
def test_a_damaged_bundle_counts_as_absent_until_it_is_built_again_or_pruned(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    cache = BundleCache(tmp_path)
    for mend in (lambda: add(cache), cache.prune):
        add(cache)
        damage(cache.folder(KEY))
        assert cache.lookup(KEY) is None
        assert [entry.key for entry in cache.entries()] == [KEY]
        mend()
    assert not cache.folder(KEY).exists()


def test_a_changed_byte_is_named_with_the_way_to_remove_it(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path)
    add(cache)
    _garble(cache.folder(KEY) / MODEL)
    with pytest.raises(BundleError, match=r"model\.pte: hash is .* expected .*farm setup cache prune --all"):
        load_bundle(cache.folder(KEY)).verify()


@pytest.mark.parametrize(
    "key", ["", ".", "..", "ab", "../precious", "/", KEY.upper(), f"{KEY}/..", f"{KEY}\n", "\u0660" * 64]
)
def test_what_is_no_key_leads_nowhere(tmp_path: Path, key: str) -> None:
    (tmp_path / "precious").mkdir()
    cache = BundleCache(tmp_path / "cache")
    add(cache)
    for one in (key, f"{tmp_path}/precious" + key):
        assert cache.lookup(one) is None
        with pytest.raises(UsageError, match="is no key of a bundle"):
            cache.build(one, lambda folder: fill(folder))
    assert (tmp_path / "precious").is_dir()
    assert cache.lookup(KEY) is not None


@pytest.mark.parametrize("part", ["ab", KEY])
def test_what_a_link_leads_to_is_neither_used_nor_removed(tmp_path: Path, part: str) -> None:
    cache, elsewhere = BundleCache(tmp_path / "cache"), BundleCache(tmp_path / "elsewhere")
    add(elsewhere)
    (elsewhere.folder(KEY) / MODEL).write_bytes(b"damaged")
    (elsewhere.folder(KEY).parent / f"{KEY}.x.partial").mkdir()
    link = cache.folder(KEY).parent if part == "ab" else cache.folder(KEY)
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere.folder(KEY).parent if part == "ab" else elsewhere.folder(KEY))
    assert cache.lookup(KEY) is None
    assert cache.entries() == []
    assert cache.prune() == []
    with pytest.raises(BundleError, match="is reached by a link out of the cache"):
        add(cache)
    assert {path.name for path in elsewhere.folder(KEY).iterdir()} == {MODEL, MANIFEST}
    assert len(partial(elsewhere.root)) == 1


def test_pruning_follows_no_link_to_where_builders_would_be(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path / "cache")
    add(cache)
    project = tmp_path / "project"
    (project / "poetry").mkdir(parents=True)
    (project / "poetry.lock").touch()
    (cache.root / "builders").symlink_to(project)
    cache.prune()
    assert {path.name for path in project.iterdir()} == {"poetry", "poetry.lock"}


def test_two_builds_of_the_same_never_collide(tmp_path: Path) -> None:
    built = []

    def build(number: int) -> None:
        def make(folder: Path) -> None:
            time.sleep(0.05)
            fill(folder)
            built.append(number)

        BundleCache(tmp_path).build(KEY, make)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(build, range(4)))
    assert len(built) == 1


def test_an_error_of_the_module_is_its_own_and_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / MODEL).touch()
        (folder / "weights.bin").read_bytes()

    cache = BundleCache(tmp_path)
    with pytest.raises(FileNotFoundError, match="weights.bin"):
        cache.build(KEY, fail)
    assert partial(tmp_path) == []
    assert cache.lookup(KEY) is None


def test_a_full_disk_is_the_farms_trouble_and_says_what_to_do(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    with pytest.raises(
        InfraError, match="No space left on device; free some space with 'farm setup cache prune --older 30d --yes'"
    ):
        BundleCache(tmp_path).build(KEY, fail)


BUILDS = """
import signal, sys
from pathlib import Path
from farm.base.files import own_folder
from farm.builds.bundles.cache import BundleCache
root, name, key = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
def fill(folder):
    (folder / "model.pte").write_bytes(b"half")
    print("building", flush=True)
    signal.pause()
with own_folder(root / "builders", name) as folder:
    (folder / "dump").write_bytes(b"1234567890")
    BundleCache(root).build(key, fill)
"""


def test_what_a_killed_build_left_is_counted_and_swept_and_what_is_being_built_is_not(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path)
    stubs = [
        subprocess.Popen([sys.executable, "-c", BUILDS, str(tmp_path), name, key], stdout=subprocess.PIPE)
        for name, key in (("killed", KEY), ("living", "cd" * 32))
    ]
    try:
        for stub in stubs:
            assert stub.stdout.readline() == b"building\n"
        assert leftovers(tmp_path) == []
        stubs[0].kill()
        stubs[0].wait()
        assert sorted((one.files, one.nbytes) for one in leftovers(tmp_path)) == [(1, 4), (1, 10)]
        assert (cache.lookup(KEY), cache.entries()) == (None, [])
        run_builders((), Compiler(sys.executable, {}), tmp_path, tmp_path)
        assert leftovers(tmp_path) == []
        assert len([*tmp_path.glob("bundles/cd/*.partial"), *tmp_path.glob("builders/living")]) == 2
        add(cache)  # the lock went with the process
        assert cache.lookup(KEY) is not None
    finally:
        for stub in stubs:
            stub.kill()
            stub.communicate()


def test_pruning_by_age_by_size_and_dry(tmp_path: Path) -> None:
    cache = BundleCache(tmp_path)
    keys = [f"{n:02d}" * 32 for n in range(3)]
    for age_s, key in enumerate(keys):
        add(cache, key, content=b"x" * 1000)
        os.utime(cache.folder(key) / MANIFEST, (time.time() - 100 * age_s,) * 2)
    assert [entry.key for entry in cache.entries()] == keys
    assert [entry.key for entry in cache.prune(older_than_s=150, dry_run=True)] == [keys[2]]
    assert len(cache.entries()) == 3
    assert [entry.key for entry in cache.prune(older_than_s=150)] == [keys[2]]
    size = cache.entries()[0].nbytes
    assert [entry.key for entry in cache.prune(keep_bytes=size)] == [keys[1]]
    assert [entry.key for entry in cache.prune()] == [keys[0]]
    assert cache.entries() == []
