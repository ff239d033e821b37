"""Files of a shared farm in each kind of place that there is: a folder, a real OpenSSH server, a server of S3."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from log_lines import LogLines
from s3_server import KEYS, S3Server
from ssh_server import SshServer

from farm.base.config.settings import load_config
from farm.base.errors import ArtifactLostError, ArtifactsError, LocalError
from farm.base.processes import Supervisor
from farm.store.objects.cached import cached_objects, prune_objects
from farm.store.objects.objects import GRACE_S, Objects, open_objects
from farm.store.objects.places import path_of

STORE = "postgresql://farm@127.0.0.1:1/farm"
SOME = b"what a device printed\n" * 1000


class World(NamedTuple):
    """Place for files, and the possible faults at its owner's side."""

    address: str
    root: Path | None
    """Folder of a place that has one, else None."""
    stop: Callable[[], object]
    start: Callable[[], object]


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with Supervisor() as supervisor:
        yield SshServer(supervisor, tmp_path_factory.mktemp("ssh")).start()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with Supervisor() as supervisor:
        yield S3Server(supervisor, tmp_path_factory.mktemp("s3")).start()


@pytest.fixture(params=["file", *(pytest.param(name, marks=pytest.mark.whole) for name in ("sftp", "s3"))])
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3")
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        bucket = "farm-" + hashlib.sha256(str(tmp_path).encode()).hexdigest()[:20]
        make_bucket(server, bucket)
        return World(server.address(bucket), None, server.stop, lambda: (server.start(), make_bucket(server, bucket)))
    root = tmp_path / "place"
    root.mkdir()
    if request.param == "file":
        away = tmp_path / "away"
        return World(f"file://{root}", root, lambda: root.rename(away), lambda: away.rename(root))
    sshd: SshServer = request.getfixturevalue("ssh")
    return World(sftp_address(sshd, root), root, sshd.stop, sshd.start)


def make_bucket(server: S3Server, bucket: str) -> None:
    import s3fs

    s3fs.S3FileSystem(
        key="nobody",
        secret="nothing",
        endpoint_url=server.url,
        skip_instance_cache=True,
    ).mkdir(bucket)


def sftp_address(server: SshServer, root: Path, known_hosts: Path | None = None) -> str:
    login, hosts = server.address, known_hosts or server.known_hosts
    return (
        f"sftp://{login.user}@{login.host}:{login.port}{root}"
        f"?key_file={login.key_file}&known_hosts={hosts}&ssh_config=none"
    )


def opened(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, who: str = "ada", **options: object
) -> Objects:
    """Return the files of the farm as the machine of `who` sees them."""
    monkeypatch.setenv("FARM_STORE", STORE)
    monkeypatch.setenv("FARM_ARTIFACTS", address)
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / who))
    return open_objects(load_config(), **{"patience_s": 0.0, **options})  # type: ignore[arg-type]


def test_sftp_and_s3_in_short(ssh: SshServer, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    make_bucket(s3, "farm-in-short")
    (tmp_path / "place").mkdir()
    for address in (sftp_address(ssh, tmp_path / "place"), s3.address("farm-in-short")):
        hers, his = (opened(monkeypatch, tmp_path, address, f"{who}-{address[:2]}") for who in ("ada", "bob"))
        name = hers.put(SOME)
        assert (his.size(name), his.get(name).read_bytes(), his.has("0" * 64)) == (len(SOME), SOME, False)
        with pytest.raises(ArtifactLostError, match="not there"):
            his.read("1" * 64)


def test_what_one_host_puts_another_has_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hers, his = (opened(monkeypatch, tmp_path, world.address, who) for who in ("ada", "bob"))
    path = tmp_path / "libFarm.so"
    path.write_bytes(SOME)
    name = hers.put(path)
    assert name == hashlib.sha256(SOME).hexdigest() == hers.put(SOME)
    assert (his.has(name), his.size(name), his.has("0" * 64)) == (True, len(SOME), False)
    here = his.get(name)
    assert here.read_bytes() == SOME == his.read(name)
    assert os.access(here, os.X_OK)
    world.stop()
    try:
        # The file is in the cache: no request is made.
        assert his.get(name) == here == his.cached(name)
    finally:
        world.start()


def test_what_is_large_or_empty_arrives_as_well(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = opened(monkeypatch, tmp_path, world.address)
    large = os.urandom(1 << 20) * 35
    names = [objects.put(large), objects.put(b"")]
    assert [objects.get(name).stat().st_size for name in names] == [35 << 20, 0]
    assert {(one.name, one.nbytes) for one in objects.all()} == set(zip(names, (35 << 20, 0), strict=True))


def test_what_is_damaged_there_is_not_used(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = opened(monkeypatch, tmp_path, world.address)
    name = objects.put(SOME)
    if world.root is None:
        objects._place._files.pipe_file(objects._place._path(name), b"#!/bin/sh\nrm -rf ~\n")  # type: ignore[attr-defined]
    else:
        path = world.root / path_of(name)
        path.chmod(0o600)
        path.write_bytes(b"#!/bin/sh\nrm -rf ~\n")
    with pytest.raises(ArtifactLostError, match=f"{name} is damaged"):
        objects.get(name)
    assert objects.cached(name) is None
    assert not list((tmp_path / "ada").rglob("*content*"))
    with pytest.raises(ArtifactLostError, match="not there"):
        objects.read("1" * 64)
    with pytest.raises(ArtifactLostError, match="is not the SHA-256"):
        objects.get("../../etc/passwd")


def test_a_place_that_is_away_is_waited_for_and_then_said_to_be_away(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = opened(monkeypatch, tmp_path, world.address)
    name = objects.put(SOME)
    world.stop()
    started = False
    try:
        with pytest.raises(ArtifactsError, match="no device and no code is at fault") as caught:
            objects.get(name)
        assert type(caught.value) is ArtifactsError
        assert "\n" not in str(caught.value)
        notes = LogLines()
        patient = opened(monkeypatch, tmp_path, world.address, "bob", patience_s=60.0)
        back = threading.Timer(2.0, world.start)
        back.start()
        started = True
        if world.root is not None:
            assert patient.get(name).read_bytes() == SOME
        assert patient.put(b"more") == hashlib.sha256(b"more").hexdigest()
        back.join()
        assert notes[0].startswith("waiting for ")
        assert notes[1:] == [f"{notes[0].split(': ')[0].removeprefix('waiting for ')} is there again"]
    finally:
        if not started:
            world.start()


def test_nobody_waits_for_a_place_when_all_is_to_stop(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = threading.Event()
    objects = opened(monkeypatch, tmp_path, world.address, patience_s=300.0, stop=stop)
    world.stop()
    try:
        timer = threading.Timer(0.3, stop.set)
        timer.start()
        began = time.monotonic()
        with pytest.raises(ArtifactsError):
            objects.put(b"anything")
        assert time.monotonic() - began < 30.0
        timer.join()
    finally:
        world.start()


def test_what_was_fetched_leaves_the_cache_when_nobody_used_it_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "place").mkdir()
    objects = opened(monkeypatch, tmp_path, f"file://{tmp_path}/place")
    old, used = (objects.get(objects.put(content)) for content in (b"old", b"used"))
    for path in (old, used):
        os.utime(path, (0, 0))
    objects.get(used.parent.name)
    left = old.parent.with_name(f"{old.parent.name}.abc.partial")
    left.mkdir()
    cache = tmp_path / "ada"
    assert [one.folder for one in prune_objects(cache, older_than_s=60.0, dry_run=True)] == [old.parent]
    assert old.is_file()
    assert [one.nbytes for one in prune_objects(cache, older_than_s=60.0, dry_run=False)] == [3]
    assert (old.exists(), used.exists(), left.exists()) == (False, True, False)
    assert [one.folder for one in cached_objects(cache)] == [used.parent]
    assert objects.get(old.parent.name).read_bytes() == b"old"


def test_many_threads_put_and_get_at_once(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = opened(monkeypatch, tmp_path, world.address)
    failed: list[BaseException] = []

    def put(content: bytes) -> str:
        # The stand-in for S3 answers 500 at times if two clients write the same object; clients retry, as agents do.
        for _ in range(5):
            with contextlib.suppress(ArtifactsError):
                return objects.put(content)
        return objects.put(content)

    def work(number: int) -> None:
        try:
            for turn in range(3):
                content = f"{number % 4} {turn}".encode() * 5000
                assert objects.get(put(content)).read_bytes() == content
        except BaseException as error:  # noqa: BLE001 - the test says which
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(list(objects.all())) == 12


def test_only_what_is_a_day_old_goes_and_what_is_put_again_stays(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = opened(monkeypatch, tmp_path, world.address)
    young = objects.put(b"young")
    assert not objects.discard(young)
    assert objects.has(young)
    if world.root is not None:
        old, again = objects.put(b"old"), objects.put(b"again")
        long_ago = time.time() - GRACE_S - 60
        for name in (old, again):
            os.utime(world.root / path_of(name), (long_ago, long_ago))
        # Another process, whose memory does not have the object.
        opened(monkeypatch, tmp_path, world.address, "bob").put(b"again")
        assert (objects.discard(old), objects.discard(again)) == (True, False)
        assert (objects.has(old), objects.has(again)) == (False, True)
        assert objects.put(b"old") == old
        assert objects.has(old)
        left = world.root / "incoming" / "x.part"
        left.write_bytes(b"half")
        os.utime(left, (long_ago, long_ago))
        assert objects.sweep() == 1
    assert objects.discard(young, grace_s=-1.0)
    assert not objects.has(young)


def test_a_host_key_that_nobody_has_noted_is_refused(
    ssh: SshServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = tmp_path / "known_hosts"
    unknown.touch()
    objects = opened(monkeypatch, tmp_path, sftp_address(ssh, tmp_path, unknown), patience_s=60.0)
    began = time.monotonic()
    with pytest.raises(ArtifactsError, match="ssh-keyscan"):
        objects.put(SOME)
    assert unknown.read_text() == ""
    other = (ssh.folder / "other_key.pub").read_text()
    unknown.write_text(f"[127.0.0.1]:{ssh.port} {other}")
    with pytest.raises(ArtifactsError, match="somebody may be in between"):
        objects.put(SOME)
    # Waiting would not help.
    assert time.monotonic() - began < 30.0


def test_a_folder_that_is_not_mounted_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = opened(monkeypatch, tmp_path, f"file://{tmp_path}/mnt/farm")
    with pytest.raises(ArtifactsError, match="is it mounted"):
        objects.put(SOME)
    assert not (tmp_path / "mnt").exists()


def test_whoever_may_write_the_place_may_write_what_another_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "place"
    root.mkdir()
    root.chmod(0o2775)
    before = os.umask(0o077)
    try:
        name = opened(monkeypatch, tmp_path, f"file://{root}").put(SOME)
    finally:
        os.umask(before)
    path = root / path_of(name)
    assert {oct(one.stat().st_mode & 0o7777) for one in (path.parent, root / "incoming")} == {"0o2775"}
    assert path.stat().st_mode & 0o777 == 0o444


def test_no_keys_of_s3_say_what_to_set_and_are_never_shown(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    objects = opened(monkeypatch, tmp_path, s3.address("nobucket"), patience_s=60.0)
    with pytest.raises(ArtifactsError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        objects.put(SOME)


def test_trouble_of_this_machine_is_not_that_of_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "place"
    root.mkdir()
    objects = opened(monkeypatch, tmp_path, f"file://{root}")
    with pytest.raises(LocalError, match="nothing.so"):
        objects.put(tmp_path / "nothing.so")
    name = objects.put(SOME)
    with pytest.raises(LocalError):
        objects.fetch(name, tmp_path / "no" / "folder")
