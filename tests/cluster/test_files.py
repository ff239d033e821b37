"""Files of a shared farm: each kind of place, and archives of bundles and suites."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from log_lines import LogLines
from made import put_bytes
from s3_server import KEYS, S3Server
from shared_rows import made_bundle, made_config, made_job, made_key
from ssh_server import SshServer

from farm.base.errors import ArtifactLostError, ArtifactsError, LocalError, UsageError
from farm.base.processes import Supervisor
from farm.builds.bundles import key as key_module
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import bundle_key
from farm.dispatch.cluster.files import unpack_source, upload_sources
from farm.store.objects.archive import fetch_bundle, unpack, upload_bundle, write_archive
from farm.store.objects.objects import GRACE_S, Objects, cached_objects, open_objects, prune_objects
from farm.store.objects.places import path_of
from farm.suites.suite import Case, InputSpec, Job, Target

# Files of a shared farm in each kind of place that there is: a folder, a real OpenSSH server, a server of S3.


SOME = b"what a device printed\n" * 1000
Open = Callable[..., Objects]


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with Supervisor() as supervisor:
        yield SshServer(supervisor, tmp_path_factory.mktemp("ssh")).start()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with Supervisor() as supervisor:
        yield S3Server(supervisor, tmp_path_factory.mktemp("s3")).start()


def make_bucket(server: S3Server, bucket: str) -> None:
    import s3fs

    s3fs.S3FileSystem(key="nobody", secret="nothing", endpoint_url=server.url, skip_instance_cache=True).mkdir(bucket)


def sftp_address(server: SshServer, root: Path, known_hosts: Path | None = None) -> str:
    login, hosts = server.address, known_hosts or server.known_hosts
    return (
        f"sftp://{login.user}@{login.host}:{login.port}{root}"
        f"?key_file={login.key_file}&known_hosts={hosts}&ssh_config=none"
    )


@pytest.fixture
def opened(place: Path) -> Open:
    """Function that returns the files at an address, or in `place`, as the machine of `who` sees them."""

    def opened(who: str = "ada", address: str = "", *, patience_s: float = 0.0) -> Objects:
        return open_objects(made_config(place.parent, who, address), patience_s=patience_s)

    return opened


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for files."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def test_sftp_and_s3_are_places(
    ssh: SshServer, s3: S3Server, place: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    make_bucket(s3, "farm-places")
    large = os.urandom(1 << 20) * 35
    for server, address in ((ssh, sftp_address(ssh, place)), (s3, s3.address("farm-places"))):
        hers, his = (opened(f"{who}-{address[:2]}", address) for who in ("ada", "bob"))
        names = [put_bytes(hers, content) for content in (SOME, large, b"")]
        assert [his.get(name).read_bytes() for name in names] == [SOME, large, b""]
        assert {one.name for one in hers.all()} == set(names)
        with pytest.raises(ArtifactLostError, match="not there"):
            his.get("1" * 64)
        assert (hers.discard(names[1]), hers.discard(names[1], grace_s=-1.0), his.has(names[1])) == (False, True, False)
        server.stop()
        with pytest.raises(ArtifactsError, match="no device and no code is at fault"):
            hers.get(names[0])
        server.start()


def test_what_one_host_puts_another_has_once(place: Path, tmp_path: Path, opened: Open) -> None:
    hers, his = (opened(who) for who in ("ada", "bob"))
    path = tmp_path / "libFarm.so"
    path.write_bytes(SOME)
    name = hers.put(path)
    assert name == hashlib.sha256(SOME).hexdigest() == put_bytes(hers, SOME)
    assert (his.has(name), his.has("0" * 64)) == (True, False)
    here = his.get(name)
    assert here.read_bytes() == SOME
    assert os.access(here, os.X_OK)
    here.chmod(0o755)
    here.write_bytes(SOME[::-1])
    assert his.get(name).read_bytes() == SOME, "a damaged file of the cache is fetched anew"
    place.rename(place.with_name("away"))
    # The file is in the cache: no request is made.
    assert his.get(name) == here


def test_what_is_damaged_there_is_not_used(place: Path, tmp_path: Path, opened: Open) -> None:
    objects, evil = opened(), b"#!/bin/sh\nrm -rf ~\n"
    name = put_bytes(objects, SOME)
    (place / path_of(name)).chmod(0o600)
    (place / path_of(name)).write_bytes(evil)
    with pytest.raises(ArtifactLostError, match=f"{name} is damaged"):
        objects.get(name)
    assert not list((tmp_path / "ada/cache").rglob("*content*"))
    assert put_bytes(objects, SOME) == name
    assert objects.get(name).read_bytes() == SOME
    with pytest.raises(ArtifactLostError, match="is not the SHA-256"):
        objects.get("../../etc/passwd")


def test_a_place_that_is_away_is_waited_for(place: Path, opened: Open) -> None:
    notes, objects, patient = LogLines(), opened(), opened("bob", patience_s=60.0)
    name = put_bytes(objects, SOME)
    away = place.rename(place.with_name("away"))
    try:
        with pytest.raises(ArtifactsError, match="no device and no code is at fault") as caught:
            objects.get(name)
        assert type(caught.value) is ArtifactsError
        assert "\n" not in str(caught.value)
        notes.clear()
    finally:
        back = threading.Timer(2.0, away.rename, [place])
        back.start()
    assert patient.get(name).read_bytes() == SOME
    assert put_bytes(patient, b"more") == hashlib.sha256(b"more").hexdigest()
    back.join()
    assert notes[0].startswith("waiting for ")
    assert notes[1:] == [f"{notes[0].split(': ')[0].removeprefix('waiting for ')} is there again"]


def test_unused_files_leave_the_cache(tmp_path: Path, opened: Open) -> None:
    objects = opened()
    old, used = (objects.get(put_bytes(objects, content)) for content in (b"old", b"used"))
    for path in (old, used):
        os.utime(path, (0, 0))
    objects.get(used.parent.name)
    left = old.parent.with_name(f"{old.parent.name}.abc.partial")
    left.mkdir()
    cache = tmp_path / "ada/cache"
    assert [one.folder for one in prune_objects(cache, older_than_s=60.0, dry_run=True)] == [old.parent]
    assert old.is_file()
    assert [one.nbytes for one in prune_objects(cache, older_than_s=60.0, dry_run=False)] == [3]
    assert (old.exists(), used.exists(), left.exists()) == (False, True, False)
    assert [one.folder for one in cached_objects(cache)] == [used.parent]
    assert objects.get(old.parent.name).read_bytes() == b"old"


def test_many_threads_put_and_get_at_once(opened: Open) -> None:
    objects = opened()

    def work(number: int) -> None:
        for turn in range(3):
            content = f"{number % 4} {turn}".encode() * 5000
            assert objects.get(put_bytes(objects, content)).read_bytes() == content

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(list(objects.all())) == 12


def test_only_what_is_a_day_old_goes_and_what_is_put_again_stays(place: Path, opened: Open) -> None:
    objects = opened()
    young = put_bytes(objects, b"young")
    assert not objects.discard(young)
    assert objects.has(young)
    old, again = put_bytes(objects, b"old"), put_bytes(objects, b"again")
    long_ago = time.time() - GRACE_S - 60
    for name in (old, again):
        os.utime(place / path_of(name), (long_ago, long_ago))
    # Another process, whose memory does not have the object.
    put_bytes(opened("bob"), b"again")
    assert (objects.discard(old), objects.discard(again)) == (True, False)
    assert (objects.has(old), objects.has(again)) == (False, True)
    assert put_bytes(objects, b"old") == old
    assert objects.has(old)
    left = place / "incoming" / "x.part"
    left.write_bytes(b"half")
    os.utime(left, (long_ago, long_ago))
    assert objects.sweep() == 1
    assert objects.discard(young, grace_s=-1.0)
    assert not objects.has(young)


def test_what_waiting_would_not_help_is_said_at_once(
    ssh: SshServer, s3: S3Server, place: Path, tmp_path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    unknown, other = tmp_path / "unknown", tmp_path / "other"
    unknown.touch()
    other.write_text(f"[127.0.0.1]:{ssh.port} {(ssh.folder / 'other_key.pub').read_text()}")
    began = time.monotonic()
    for address, says in (
        (sftp_address(ssh, place, unknown), "ssh-keyscan"),
        (sftp_address(ssh, place, other), "another machine may intercept the connection"),
        (s3.address("nobucket"), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (f"file://{tmp_path}/mnt/farm", "mount it"),
    ):
        with pytest.raises(ArtifactsError, match=says):
            put_bytes(opened("ada", address, patience_s=20.0 if "mnt" not in address else 0.0), SOME)
    assert time.monotonic() - began < 20.0
    assert unknown.read_text() == ""
    assert not (tmp_path / "mnt").exists()
    # Trouble of this machine is no trouble of the place.
    objects = opened()
    with pytest.raises(LocalError, match=r"nothing\.so"):
        objects.put(tmp_path / "nothing.so")
    with pytest.raises(LocalError):
        objects.fetch(put_bytes(objects, SOME), tmp_path / "no" / "folder")


def test_whoever_may_write_the_place_may_write_what_another_began(place: Path, opened: Open) -> None:
    place.chmod(0o2775)
    before = os.umask(0o077)
    try:
        name = put_bytes(opened(), SOME)
    finally:
        os.umask(before)
    path = place / path_of(name)
    assert {oct(one.stat().st_mode & 0o7777) for one in (path.parent, place / "incoming")} == {"0o2775"}
    assert path.stat().st_mode & 0o777 == 0o444


# Bundles and code of suites as archives: the same bytes for the same content, and hostile ones write nothing.


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
    from farm.base.paths import data_folder

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
