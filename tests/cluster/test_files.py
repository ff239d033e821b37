"""Files of a shared farm in each kind of place that there is: a folder, a real OpenSSH server, a server of S3."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from log_lines import LogLines
from made_shards import made_config
from s3_server import KEYS, S3Server
from ssh_server import SshServer

from farm.base.errors import ArtifactLostError, ArtifactsError, LocalError
from farm.base.processes import Supervisor
from farm.store.objects.cached import cached_objects, prune_objects
from farm.store.objects.objects import GRACE_S, Objects, open_objects
from farm.store.objects.places import path_of

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

    def opened(who: str = "ada", address: str = "", *, patience_s: float = 0.0, stop: Any = None) -> Objects:
        return open_objects(made_config(place.parent, who, address), patience_s=patience_s, stop=stop)

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
        names = [hers.put(content) for content in (SOME, large, b"")]
        assert [his.size(name) for name in names] == [len(SOME), len(large), 0]
        assert [his.get(name).read_bytes() for name in names] == [SOME, large, b""]
        assert {one.name for one in hers.all()} == set(names)
        with pytest.raises(ArtifactLostError, match="not there"):
            his.read("1" * 64)
        assert (hers.discard(names[1]), hers.discard(names[1], grace_s=-1.0), his.has(names[1])) == (False, True, False)
        server.stop()
        with pytest.raises(ArtifactsError, match="no device and no code is at fault"):
            hers.read(names[0])
        server.start()


def test_what_one_host_puts_another_has_once(place: Path, tmp_path: Path, opened: Open) -> None:
    hers, his = (opened(who) for who in ("ada", "bob"))
    path = tmp_path / "libFarm.so"
    path.write_bytes(SOME)
    name = hers.put(path)
    assert name == hashlib.sha256(SOME).hexdigest() == hers.put(SOME)
    assert (his.has(name), his.size(name), his.has("0" * 64)) == (True, len(SOME), False)
    here = his.get(name)
    assert here.read_bytes() == SOME == his.read(name)
    assert os.access(here, os.X_OK)
    here.chmod(0o755)
    here.write_bytes(SOME[::-1])
    assert his.get(name).read_bytes() == SOME, "a damaged file of the cache is fetched anew"
    place.rename(place.with_name("away"))
    # The file is in the cache: no request is made.
    assert his.get(name) == here == his.cached(name)


def test_what_is_damaged_there_is_not_used(place: Path, tmp_path: Path, opened: Open) -> None:
    objects, evil = opened(), b"#!/bin/sh\nrm -rf ~\n"
    name = objects.put(SOME)
    (place / path_of(name)).chmod(0o600)
    (place / path_of(name)).write_bytes(evil)
    with pytest.raises(ArtifactLostError, match=f"{name} is damaged"):
        objects.get(name)
    assert objects.cached(name) is None
    assert not list((tmp_path / "ada/cache").rglob("*content*"))
    assert objects.put(SOME) == name
    assert objects.get(name).read_bytes() == SOME
    with pytest.raises(ArtifactLostError, match="is not the SHA-256"):
        objects.get("../../etc/passwd")


def test_a_place_that_is_away_is_waited_for(place: Path, opened: Open) -> None:
    stop, notes = threading.Event(), LogLines()
    objects = opened()
    ending, patient = opened(patience_s=300.0, stop=stop), opened("bob", patience_s=60.0)
    name = objects.put(SOME)
    away = place.rename(place.with_name("away"))
    try:
        with pytest.raises(ArtifactsError, match="no device and no code is at fault") as caught:
            objects.get(name)
        assert type(caught.value) is ArtifactsError
        assert "\n" not in str(caught.value)
        # A process that is to end does not wait.
        threading.Timer(0.3, stop.set).start()
        began = time.monotonic()
        with pytest.raises(ArtifactsError):
            ending.put(b"anything")
        assert time.monotonic() - began < 30.0
        notes.clear()
    finally:
        back = threading.Timer(2.0, away.rename, [place])
        back.start()
    assert patient.get(name).read_bytes() == SOME
    assert patient.put(b"more") == hashlib.sha256(b"more").hexdigest()
    back.join()
    assert notes[0].startswith("waiting for ")
    assert notes[1:] == [f"{notes[0].split(': ')[0].removeprefix('waiting for ')} is there again"]


def test_unused_files_leave_the_cache(tmp_path: Path, opened: Open) -> None:
    objects = opened()
    old, used = (objects.get(objects.put(content)) for content in (b"old", b"used"))
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
            assert objects.get(objects.put(content)).read_bytes() == content

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(list(objects.all())) == 12


def test_only_what_is_a_day_old_goes_and_what_is_put_again_stays(place: Path, opened: Open) -> None:
    objects = opened()
    young = objects.put(b"young")
    assert not objects.discard(young)
    assert objects.has(young)
    old, again = objects.put(b"old"), objects.put(b"again")
    long_ago = time.time() - GRACE_S - 60
    for name in (old, again):
        os.utime(place / path_of(name), (long_ago, long_ago))
    # Another process, whose memory does not have the object.
    opened("bob").put(b"again")
    assert (objects.discard(old), objects.discard(again)) == (True, False)
    assert (objects.has(old), objects.has(again)) == (False, True)
    assert objects.put(b"old") == old
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
            opened("ada", address, patience_s=20.0 if "mnt" not in address else 0.0).put(SOME)
    assert time.monotonic() - began < 20.0
    assert unknown.read_text() == ""
    assert not (tmp_path / "mnt").exists()
    # Trouble of this machine is no trouble of the place.
    objects = opened()
    with pytest.raises(LocalError, match=r"nothing\.so"):
        objects.put(tmp_path / "nothing.so")
    with pytest.raises(LocalError):
        objects.fetch(objects.put(SOME), tmp_path / "no" / "folder")


def test_whoever_may_write_the_place_may_write_what_another_began(place: Path, opened: Open) -> None:
    place.chmod(0o2775)
    before = os.umask(0o077)
    try:
        name = opened().put(SOME)
    finally:
        os.umask(before)
    path = place / path_of(name)
    assert {oct(one.stat().st_mode & 0o7777) for one in (path.parent, place / "incoming")} == {"0o2775"}
    assert path.stat().st_mode & 0o777 == 0o444
