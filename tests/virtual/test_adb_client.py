"""Virtual device through the ordinary adb command; tests of `any_device` run over Android's own daemon as well."""

from __future__ import annotations

import filecmp
import hashlib
import os
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from waiting import Started, all_the_time, until

if TYPE_CHECKING:
    from conftest import Attached


def test_getprop(device: Attached) -> None:
    assert device.adb("shell", "getprop", "ro.soc.model").stdout == b"SM8650\n"
    assert device.adb("shell", "/system/bin/getprop ro.farm.virtual").stdout == b"1\n"
    assert device.adb("shell", "getprop ro.none fallback").stdout == b"fallback\n"
    assert device.adb("shell", "getprop 'ro.*'").stdout == b"\n"
    everything = device.adb("shell", "getprop").stdout.decode()
    assert f"[ro.serialno]: [{device.serial}]\n" in everything
    assert "[ro.build.version.sdk]: [35]\n" in everything


def test_a_folder_goes_there_and_back(any_device: Attached, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep/er").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\necho ran $1\n")
    (source / "run.sh").chmod(0o755)
    (source / "deep/er/data").write_bytes(os.urandom(300_000))
    (source / "deep/none").write_bytes(b"")
    for name in ("a b", "quote's", "$(id)", "new\nline", "Grüße"):
        (source / "deep" / name).write_text(name)
    any_device.adb("push", source, "/data/local/tmp/folder")
    assert any_device.adb("shell", "/data/local/tmp/folder/run.sh 'x  y'").stdout == b"ran x y\n"
    mode = (any_device.root / "data/local/tmp/folder/deep/none").stat().st_mode
    assert not stat.S_IMODE(mode) & 0o111
    any_device.adb("pull", "/data/local/tmp/folder", tmp_path / "back")
    compared = filecmp.dircmp(source, tmp_path / "back")
    assert not compared.left_only
    assert not compared.right_only
    names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    assert filecmp.cmpfiles(source, tmp_path / "back", names, shallow=False)[0] == names


def test_exit_codes_and_streams(any_device: Attached) -> None:
    done = any_device.adb("shell", "echo out; echo err >&2; exit 42", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (42, b"out\n", b"err\n")
    assert any_device.adb("shell", "kill -9 $$", check=False).returncode == 137
    old = any_device.adb("shell", "-x", "echo out; echo err >&2; exit 42", check=False)
    assert (old.returncode, old.stdout) == (0, b"out\nerr\n")
    assert any_device.adb("shell", "wc -c", stdin=b"x" * 300_000).stdout == b"300000\n"


def test_binary_out_and_in(any_device: Attached) -> None:
    path = any_device.root / "data/local/tmp/binary"
    # adb hangs up with a packet still under way, and does so at another moment every time.
    for _ in range(4):
        path.unlink(missing_ok=True)
        data = os.urandom(3_000_000)
        any_device.adb("exec-in", "cat > /data/local/tmp/binary", stdin=data)
        until(lambda: path.exists() and path.stat().st_size >= 3_000_000, "all bytes")
    assert any_device.adb("exec-out", "cat /data/local/tmp/binary").stdout == data


def test_nothing_of_this_machines_environment_is_seen(device: Attached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    names = {line.partition("=")[0] for line in device.adb("shell", "env").stdout.decode().splitlines()}
    allowed = {"PATH", "HOME", "TMPDIR", "ANDROID_DATA", "ANDROID_ROOT", "LANG", "PWD", "OLDPWD", "FARM_PROCESS", "_"}
    assert names <= allowed | {"SHLVL", "VIRTUAL_LIFE"}


def test_only_whole_device_paths_are_mapped(device: Attached) -> None:
    echoed = device.adb("shell", "echo /data/local/tmp/x /data/local/tmpfs a/data/local/tmp L=/data/local/tmp").stdout
    here = f"{device.root}/data/local/tmp"
    assert echoed.decode().split() == [f"{here}/x", "/data/local/tmpfs", "a/data/local/tmp", f"L={here}"]


def test_many_files_are_hashed_as_one_is(device: Attached) -> None:
    root = "/data/local/tmp/hashed"
    made = f"mkdir {root}; cd {root}; for n in 1 2 3 4 5 6 7 8 9 10; do echo $n >file-$n; done"
    shown = device.adb("shell", f"{made}; sha256sum -- *; echo and; for one in *; do sha256sum -- $one; done")
    many, one_by_one = (part.split("\n") for part in shown.stdout.decode().rstrip("\n").split("\nand\n"))
    assert device.adb("shell", f"cd {root}; sha256sum -- * none", check=False).returncode == 1
    assert many == one_by_one
    assert many[0] == f"{hashlib.sha256(b'1' + bytes([10])).hexdigest()}  file-1"


def test_links_that_lead_out_are_refused(device: Attached, tmp_path: Path) -> None:
    for name, target in (("out", "/etc/passwd"), ("up", "../../../../../etc/passwd"), ("fine", "real")):
        (tmp_path / "links").mkdir(exist_ok=True)
        (tmp_path / "links" / name).symlink_to(target)
    (tmp_path / "links/real").write_text("here")
    device.adb("push", tmp_path / "links", "/data/local/tmp/links", check=False)
    device.adb("shell", "ln -sf /etc/passwd /data/local/tmp/passwd")
    for way in ("/data/local/tmp/passwd", "/../../../../etc/passwd", "/etc/passwd", "/.incoming"):
        refused = device.adb("pull", way, tmp_path / "got", check=False)
        assert refused.returncode != 0, way
        assert not (tmp_path / "got").exists()
    passwd = "/etc/passwd"
    before = os.stat(passwd)
    assert device.adb("push", tmp_path / "links/real", "/data/local/tmp/../../../../etc/passwd", check=False).returncode
    assert os.stat(passwd).st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("way", ["shell", "exec-out"])
def test_hanging_up_tells_one_process_and_what_it_started_lives_on(any_device: Attached, way: str) -> None:
    """As on a phone, adbd sends SIGHUP to the command of a shell alone, and to no process for `exec-out`."""
    script = "echo $$; sleep 600 & echo $!; setsid sleep 600 & echo $!; wait"
    with Started(
        any_device.command(way, script), env=any_device.environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None
        command, *children = (int(shell.stdout.readline()) for _ in range(3))
        shell.kill()
    try:
        until(lambda: way != "shell" or not any_device.alive(command), "the end of the command")
        living = children if way == "shell" else [command, *children]
        assert all_the_time(lambda: all(any_device.alive(pid) for pid in living), 0.2)
        assert any_device.alive(command) == (way != "shell")
    finally:
        any_device.adb("shell", f"kill -9 {command} {' '.join(map(str, children))}", check=False)


def test_a_program_that_writes_to_nobody_ends(any_device: Attached) -> None:
    with Started(
        any_device.command("exec-out", "echo $$; exec yes"), env=any_device.environment, stdout=subprocess.PIPE
    ) as shell:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        shell.kill()
    until(lambda: not any_device.alive(pid), "the end of the program", 60)


def test_files_have_the_rights_that_adbd_gives_them(any_device: Attached, tmp_path: Path) -> None:
    for mode in (0o600, 0o755, 0o744, 0o444):
        source = tmp_path / f"{mode:o}"
        source.write_bytes(b"x")
        source.chmod(mode)
        any_device.adb("push", source, f"/data/local/tmp/rights/deep/{mode:o}")
    any_device.adb("shell", "mkdir /data/local/tmp/rights/made; touch /data/local/tmp/rights/written")
    folder = any_device.root / "data/local/tmp/rights"
    modes = {str(path.relative_to(folder)): f"{path.stat().st_mode & 0o777:o}" for path in folder.rglob("*")}
    expected = {"deep/600": "666", "deep/755": "777", "deep/744": "777", "deep/444": "444"}
    assert modes == {**expected, "deep": "775", "made": "777", "written": "666"}
    assert any_device.root.stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_a_file_is_refused_in_adbds_words(any_device: Attached, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("new")
    for place, words in (
        # adb looks first and pushes into the folder, where a folder with the file's name exists.
        ("folder.txt", "couldn't create file: Is a directory"),
        ("no-such-folder/", "couldn't create file: Is a directory"),
        ("plain/below", "Not a directory"),
    ):
        (any_device.root / "data/local/tmp/folder.txt/file").mkdir(parents=True, exist_ok=True)
        (any_device.root / "data/local/tmp/plain").write_text("old")
        done = any_device.adb("push", tmp_path / "file", f"/data/local/tmp/{place}", check=False)
        assert (done.returncode, words in (done.stdout + done.stderr).decode()) == (1, True), (place, done)
    assert not (any_device.root / "data/local/tmp/no-such-folder").exists()
    assert (any_device.root / "data/local/tmp/plain").read_text() == "old"
