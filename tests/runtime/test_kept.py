"""Runtimes in the cache: a damaged one is no source of files, and is kept anew when a device has it again."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from farm.builds.runtime.kept import find_kept, keep
from farm.builds.runtime.runtime import Runtime

VERSIONS = {"qnn": "2.50", "runner": "1"}


def runtime(folder: Path, digest: str, **versions: str) -> Runtime:
    folder.mkdir(exist_ok=True)
    files = {name: folder / name for name in ("farm_runner", "libQnnHtp.so")}
    for name, path in files.items():
        path.write_bytes(f"content of {name}".encode())
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return Runtime(files, digest * 64, "farm_runner", VERSIONS | versions, "android", False, hashes)


@pytest.mark.parametrize("damage", ["record", "changed", "lost"])
def test_a_damaged_runtime_is_kept_anew(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    mine, other = runtime(tmp_path / "files", "a"), runtime(tmp_path / "files", "b", qnn="2.51")
    keep(cache, mine)
    found = find_kept(cache, mine.versions)
    assert found is not None
    file = found.files["libQnnHtp.so"]
    if damage == "record":
        (file.parent.parent / "runtime.json").write_text("{")
    elif damage == "lost":
        file.unlink()
    else:
        file.write_bytes(b"something else")
    assert find_kept(cache, mine.versions) is None
    # Equal files are links to one file, unless it is damaged.
    for one in (other, mine):
        keep(cache, one)
        found = find_kept(cache, one.versions)
        assert found is not None
        assert {name: path.read_bytes() for name, path in found.files.items()} == {
            name: path.read_bytes() for name, path in one.files.items()
        }
