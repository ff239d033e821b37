"""Bundles and code of suites as archives: the same bytes for the same content, and hostile ones write nothing."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from made_shards import made_bundle, made_config, made_job, made_key

from farm.base.errors import ArtifactLostError, UsageError
from farm.builds.bundles import key as key_module
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.dispatch.cluster.files.exchange import unpack_source, upload_sources
from farm.store.objects.archive import unpack, write_archive
from farm.store.objects.bundle_archive import fetch_bundle, upload_bundle
from farm.store.objects.objects import Objects, open_objects
from farm.suites.suite import Case, InputSpec, Job, Target

VERSIONS = {"executorch": "1.5.1", "torch": "2.13.0", "torchao": "0.18.0", "qnn": "2.51"}
HostObjects = Callable[[str], Objects]


@pytest.fixture
def host(tmp_path: Path) -> HostObjects:
    """Function that returns the farm's files as a host of that name sees them."""
    (tmp_path / "place").mkdir()
    return lambda name: open_objects(made_config(tmp_path, name), patience_s=0.0)


def test_the_same_content_is_the_same_archive_whoever_made_it_and_when(tmp_path: Path) -> None:
    archives = []
    for number in range(2):
        folder = tmp_path / str(number)
        (folder / "deep").mkdir(parents=True)
        for name in ("b", "a", "deep/ä very long name " + "x" * 200)[:: 1 if number else -1]:
            (folder / name).write_text(name)
            os.utime(folder / name, (number, number))
            (folder / name).chmod(0o700 if number else 0o600)
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        write_archive(files, tmp_path / f"{number}.tar")
        archives.append((tmp_path / f"{number}.tar").read_bytes())
    assert archives[0] == archives[1]
    out = tmp_path / "out"
    out.mkdir()
    names = unpack(tmp_path / "0.tar", out)
    assert len(names) == 3
    assert all((out / name).read_text() == name for name in names)


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 4, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def archive_of(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for one in members:
            archive.addfile(one, io.BytesIO(b"evil" * 4))
    return path


HUGE = str(1 << 50)
SPARSE = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": HUGE}
HOSTILE = {
    "above": [member("a/../../evil")],
    "absolute": [member("/var/farm-evil")],
    "a link out": [member("out", tarfile.SYMTYPE, 0, linkname="/etc"), member("out/passwd")],
    "a hard link": [member("model.pte", tarfile.LNKTYPE, 0, linkname="/etc/passwd")],
    "a device": [member("null", tarfile.CHRTYPE, 0)],
    "a pipe": [member("pipe", tarfile.FIFOTYPE, 0)],
    "a folder": [member("folder", tarfile.DIRTYPE, 0)],
    "twice": [member("a"), member("a")],
    "odd": [member("a//b")],
    "nothing": [member("./")],
    "its size is a lie": [member("a", pax_headers={"size": HUGE})],
    "sparse": [member("a", pax_headers={"GNU.sparse.map": "0,4", "GNU.sparse.size": HUGE})],
    "sparse, newer": [member("a", pax_headers=SPARSE)],
    "its name is elsewhere": [member("a", pax_headers={"path": "../evil"})],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_writes_nothing_outside_and_no_more_than_it_is(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "inner"
    folder.mkdir(parents=True)
    path = archive_of(tmp_path / "evil.tar", *HOSTILE[name])
    with pytest.raises(ArtifactLostError, match="is not used"):
        unpack(path, folder)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cache", "evil.tar"]
    assert [one.name for one in (tmp_path / "cache").iterdir()] == ["inner"]
    assert not Path("/var/farm-evil").exists()
    assert not any(one.is_symlink() for one in folder.rglob("*"))
    assert sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()) <= 16


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_many_or_huge_extended_headers_take_no_time_and_no_memory(kind: bytes, tmp_path: Path) -> None:
    path, folder, size = tmp_path / "evil.tar", tmp_path / "out", 1 << 28
    folder.mkdir()
    record = b"7 a=b\n\0"
    with path.open("wb") as file:
        for number in range(3000):
            file.write(member("header", kind, len(record)).tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0"))
            if kind == tarfile.XGLTYPE:
                file.write(member(f"x{number}", tarfile.REGTYPE, 0).tobuf(tarfile.USTAR_FORMAT))
        file.write(b"\0" * 1024)
    with pytest.raises(ArtifactLostError, match="more than 4 extended headers"):
        unpack(path, folder)
    path.write_bytes(member("header", kind, size).tobuf(tarfile.USTAR_FORMAT))
    # Sparse: a few KiB on the disk.
    os.truncate(path, 512 + size + 1024)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactLostError, match=f"an extended header has {size} bytes"):
            unpack(path, folder)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert list(folder.iterdir()) == []


def test_an_archive_that_was_cut_off_is_refused_at_every_length(tmp_path: Path) -> None:
    whole = archive_of(tmp_path / "whole.tar", member("a", size=16), member("b", size=16)).read_bytes()
    for length in (*range(0, 2600, 97), 512 * 3 + 8):
        path, folder = tmp_path / "part.tar", tmp_path / str(length)
        path.write_bytes(whole[:length])
        folder.mkdir()
        try:
            names = unpack(path, folder)
        except ArtifactLostError:
            continue
        assert all((folder / name).stat().st_size == 16 for name in names)


def test_a_bundle_travels_once(host: HostObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hers, his, job = host("ada"), host("bob"), made_job("relu")
    bundle = made_bundle(BundleCache(tmp_path / "ada/cache"), job)
    archive = upload_bundle(hers, bundle)
    assert upload_bundle(hers, bundle) == archive
    cache = BundleCache(tmp_path / "bob/cache")
    there = fetch_bundle(his, cache, made_key(job), archive.sha256)
    assert there.folder == cache.folder(made_key(job)) != bundle.folder
    assert there.manifest == bundle.manifest
    assert (there.folder / "build.log").read_text() == "compiled\n"
    assert not (there.folder / ".archive").exists()
    monkeypatch.setattr(his._place, "read", lambda _: pytest.fail("it is here already"))
    fetch_bundle(his, cache, made_key(job), archive.sha256)


def test_an_archive_of_another_bundle_is_not_used(host: HostObjects, tmp_path: Path) -> None:
    def put(files: dict[str, Path]) -> str:
        write_archive(files, tmp_path / "made.tar")
        return hers.put(tmp_path / "made.tar")

    hers, his, job = host("ada"), host("bob"), made_job("relu")
    bundle, cache = made_bundle(BundleCache(tmp_path / "ada/cache"), job), BundleCache(tmp_path / "bob/cache")
    files = {name: bundle.folder / name for name in ("manifest.json", *bundle.manifest.files)}
    archives = {
        "holds": upload_bundle(hers, made_bundle(BundleCache(tmp_path / "ada/cache"), made_job("gelu"))).sha256,
        "no part of it": put({**files, "sitecustomize.py": bundle.folder / "build.log"}),
        "does not hold it": put({"manifest.json": files["manifest.json"]}),
        "not a bundle": put({"model.pte": files["model.pte"]}),
    }
    for says, archive in archives.items():
        with pytest.raises(ArtifactLostError, match=says):
            fetch_bundle(his, cache, made_key(job), archive)
        assert cache.lookup(made_key(job)) is None
    assert not [
        path for path in (tmp_path / "bob/cache/bundles").rglob("*") if path.is_file() and path.suffix != ".lock"
    ]


def made_suite(root: Path) -> Job:
    """Return a job of a suite with a file of inputs, and a module of the suite beside it."""
    (root / "mine" / "parts").mkdir(parents=True)
    (root / "other").mkdir()
    (root / "mine" / "suite.toml").write_text("[suite]\n")
    (root / "mine" / "ops.py").write_text("from .parts import layer\nimport numpy\nclass Relu: ...\n")
    (root / "mine" / "parts" / "__init__.py").write_text("")
    (root / "mine" / "parts" / "layer.py").write_text("x = 1\n")
    (root / "mine" / "weights.pt").write_bytes(b"weights" * 1000)
    (root / "other" / "ops.py").write_text("class Gelu: ...\n")
    case = Case("mine", "relu", ".ops:Relu", (InputSpec((1, 4)),), checkpoint="weights.pt", folder=str(root / "mine"))
    return Job(case, Target("SM8650", "htp", "8a8w"))


def test_a_suite_has_the_same_keys_elsewhere(
    host: HostObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_module, "_read_sources", {})
    job = made_suite(tmp_path / "home")
    beside = Job(msgspec.structs.replace(job.case, name="gelu", module="..other.ops:Gelu", checkpoint=""), job.target)
    sources = upload_sources(host("ada"), [job, beside])
    assert len(set(sources.values())) == 2
    keys = [bundle_key(one, VERSIONS) for one in (job, beside)]
    shutil.rmtree(tmp_path / "home")
    monkeypatch.setattr(key_module, "_read_sources", {})
    his = host("bob")
    there = [unpack_source(his, tmp_path / "bob/cache", sources[one.id], one) for one in (job, beside)]
    assert [bundle_key(one, VERSIONS) for one in there] == keys
    assert (Path(there[0].case.folder) / "weights.pt").read_bytes() == b"weights" * 1000
    assert there[0].id == job.id
    with pytest.raises(ArtifactLostError, match="SHA-256"):
        unpack_source(his, tmp_path / "bob/cache", "../../../evil", job)
    assert not (tmp_path / "evil").exists()


def test_shipped_code_and_files_of_elsewhere_do_not_travel(host: HostObjects, tmp_path: Path) -> None:
    from farm.base.resources import data_folder

    job = made_suite(tmp_path / "home")
    ours = Job(
        msgspec.structs.replace(
            job.case, folder=str(data_folder("test_suites") / "quantized_ops"), module="torch.nn:ReLU", checkpoint=""
        ),
        job.target,
    )
    assert upload_sources(host("ada"), [ours]) == {ours.id: ""}
    (tmp_path / "secret.pt").write_bytes(b"secret")
    for name in ("../../secret.pt", str(tmp_path / "secret.pt")):
        out = Job(msgspec.structs.replace(job.case, checkpoint=name), job.target)
        with pytest.raises(UsageError, match="--build-on here"):
            upload_sources(host("ada"), [out])
