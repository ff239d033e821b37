"""Trust in files, and paths that users name."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import run_fork
from users import User

from farm.base.errors import UsageError
from farm.base.paths import beside, is_path

# Trusted files: an unnamed farm.toml, and the content of a cache. With real users, owners and modes.


SAY = "from farm.base.config.settings import load_config; print(load_config().sdk_root)"
HOSTILE = '[qnn]\nsdk_root = "/his/sdk"\n'
OWN = '[qnn]\nsdk_root = "/own/sdk"\n'


@pytest.fixture
def ada(two_users: tuple[User, User]) -> Iterator[User]:
    """Ada in a folder of her own, in a folder that all users may write, as /tmp is."""
    user = two_users[0]
    base = user.home.parent / "everybody"
    base.mkdir()
    base.chmod(0o1777)
    folder = base / "work"
    folder.mkdir()
    os.chown(folder, user.uid, user.gid)
    yield dataclasses.replace(user, cwd=folder)
    shutil.rmtree(base)


@pytest.fixture
def bob(two_users: tuple[User, User]) -> User:
    return two_users[1]


def place(path: Path, text: str, uid: int, gid: int, mode: int = 0o644) -> Path:
    """Leave a file with an owner and a mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def let_write(file: Path, uid: int) -> None:
    """Let one more user read and write a file, by an access control list: acl(5), and linux/posix_acl_xattr.h."""
    anybody = 0xFFFFFFFF
    user_obj, user, group_obj, mask, other = 0x01, 0x02, 0x04, 0x10, 0x20
    entries = [(user_obj, 6, anybody), (user, 6, uid), (group_obj, 4, anybody), (mask, 6, anybody), (other, 4, anybody)]
    try:
        os.setxattr(file, "system.posix_acl_access", struct.pack("<I" + "HHI" * 5, 2, *itertools.chain(*entries)))
    except OSError as error:
        pytest.skip(f"{file} can have no access control list: {error.strerror}")


def look(user: User, **env: str) -> tuple[str, str]:
    """Return the SDK that farm takes, and its standard error."""
    words, every = [user.interpreter, "-c", SAY], {**user.env, **env}
    if user.uid and user.forks:
        done = run_fork(user.forks, words, env=every, cwd=user.cwd, umask=user.umask)
    else:
        done = subprocess.run(words, env=every, cwd=user.cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


class TestFarmToml:
    def test_that_of_somebody_else_above_is_ignored_and_said_in_one_line(self, ada: User, bob: User) -> None:
        file = bob.write(ada.cwd.parent / "farm.toml", HOSTILE)
        sdk, output = look(ada)
        assert sdk == "None"
        assert output.count("\n") == 1
        assert output.startswith(f"farm: {file} is ignored: it belongs to {bob.name}")
        assert "--config" in output
        assert "FARM_CONFIG" in output

    def test_a_nearer_one_of_somebody_else_hides_none_of_ones_own(self, ada: User, bob: User) -> None:
        place(ada.cwd / "farm.toml", OWN, ada.uid, ada.gid)
        place(ada.cwd / "sub" / "farm.toml", HOSTILE, bob.uid, bob.gid)
        sdk, output = look(dataclasses.replace(ada, cwd=ada.cwd / "sub"))
        assert (sdk, output.count("is ignored")) == ("/own/sdk", 1)

    def test_the_owner_decides(self, ada: User) -> None:
        own = place(ada.cwd.parent / "farm.toml", OWN, ada.uid, ada.gid)
        assert look(ada) == ("/own/sdk", "")
        sdk, output = look(dataclasses.replace(ada, uid=0, gid=0, shared_gid=0))
        assert (sdk, f"is ignored: it belongs to {ada.name}" in output) == ("None", True)
        os.chown(own, 0, 0)
        assert look(ada) == ("/own/sdk", "")

    def test_one_that_is_named_counts_whoever_owns_it(self, ada: User, bob: User) -> None:
        file = bob.write(ada.cwd.parent / "farm.toml", HOSTILE)
        assert look(ada, FARM_CONFIG=str(file)) == ("/his/sdk", "")
        shown = ada.farm("suites", "--config", str(file))
        assert (shown.returncode, shown.stderr) == (0, "")

    @pytest.mark.parametrize(
        ("mode", "group", "why"),
        [
            (0o644, "private", ""),
            (0o664, "shared", "it can be written by group farm-"),
            (0o666, "private", "it can be written by all users"),
        ],
    )
    def test_others_must_not_be_able_to_write_it(self, ada: User, mode: int, group: str, why: str) -> None:
        gid = ada.gid if group == "private" else ada.shared_gid
        place(ada.cwd / "farm.toml", OWN, ada.uid, gid, mode)
        sdk, output = look(ada)
        assert sdk == ("None" if why else "/own/sdk")
        assert why in output
        assert bool(why) == bool(output)

    @pytest.mark.parametrize(
        ("mode", "group", "counts"),
        [
            (0o775, "shared", False),
            (0o2770, "shared", False),
            (0o3770, "shared", True),
            (0o777, "private", False),
            (0o1777, "private", True),
        ],
    )
    def test_others_must_not_be_able_to_replace_it(self, ada: User, mode: int, group: str, counts: bool) -> None:
        place(ada.cwd / "sub" / "farm.toml", OWN, ada.uid, ada.gid)
        os.chown(ada.cwd, ada.uid, ada.gid if group == "private" else ada.shared_gid)
        ada.cwd.chmod(mode)
        sdk, output = look(dataclasses.replace(ada, cwd=ada.cwd / "sub"))
        assert sdk == ("/own/sdk" if counts else "None")
        assert (f"{ada.cwd} can be written by" in output) == (not counts)

    def test_nor_to_lead_to_another_by_a_link(self, ada: User, bob: User) -> None:
        own = place(ada.home / "configs" / "farm.toml", OWN, ada.uid, ada.gid)
        bob.run("ln", "-s", str(own), str(ada.cwd.parent / "farm.toml"))
        sdk, output = look(ada)
        assert (sdk, f"is ignored: it belongs to {bob.name}" in output) == ("None", True)
        theirs = bob.write(bob.home / "farm.toml", HOSTILE)
        ada.run("ln", "-s", str(theirs), str(ada.cwd / "farm.toml"))
        sdk, output = look(ada)
        assert (sdk, f"is ignored: {theirs} belongs to {bob.name}" in output) == ("None", True)

    def test_a_group_with_another_member_is_no_private_one(self, ada: User, bob: User) -> None:
        place(ada.cwd / "farm.toml", OWN, ada.uid, ada.gid, 0o664)
        for tool, counts in (("-a", False), ("-d", True)):
            subprocess.run(["gpasswd", tool, bob.name, ada.name], check=True, capture_output=True)
            assert look(ada)[0] == ("/own/sdk" if counts else "None")

    def test_a_private_group_does_not_hide_who_else_may_write(self, ada: User, bob: User) -> None:
        file = place(ada.cwd / "farm.toml", OWN, ada.uid, ada.gid, 0o664)
        let_write(file, bob.uid)
        bob.run("sh", "-c", f"echo '# bob was here' >>{file}")
        assert look(ada)[0] == "None"

    def test_what_is_said_has_no_control_characters(self, ada: User, bob: User) -> None:
        folder = ada.cwd.parent / "a\x1b[31mb\nc"
        folder.mkdir()
        os.chown(folder, ada.uid, ada.gid)
        place(folder / "farm.toml", HOSTILE, bob.uid, bob.gid)
        _, output = look(dataclasses.replace(ada, cwd=folder))
        assert output.count("\n") == 1
        assert output.strip().isprintable()


BUNDLE = "ab" * 32
LOOK_UP = """
import sys
from pathlib import Path
from farm.builds.bundles.cache import BundleCache
from farm.base.errors import UntrustedError
try:
    print(BundleCache(Path(sys.argv[1])).lookup(sys.argv[2]) is not None)
except UntrustedError as error:
    print(error)
"""
BUILD = f"""
import sys
from pathlib import Path
from farm.builds.bundles.cache import BundleCache
sys.path.append({str(Path(__file__).parent)!r})
from made import write_bundle

contents = {{"model.pte": b"a model", "inputs/input_0_0.raw": b"an input"}}
BundleCache(Path(sys.argv[1])).build(sys.argv[2], lambda folder: write_bundle(folder, contents, key=sys.argv[2]))
"""


class TestCache:
    """The content of a cache is executed."""

    @pytest.fixture
    def cache(self, ada: User) -> Path:
        return ada.cwd / "cache"

    @staticmethod
    def build(user: User, cache: Path) -> Path:
        user.python("-c", BUILD, str(cache), BUNDLE)
        return cache / "bundles" / BUNDLE[:2] / BUNDLE

    @staticmethod
    def look_up(user: User, cache: Path) -> str:
        return user.python("-c", LOOK_UP, str(cache), BUNDLE).strip()

    @pytest.mark.parametrize("umask", [0o022, 0o077, 0o000])
    def test_ones_own_bundle_is_found_under_any_umask(self, ada: User, cache: Path, umask: int) -> None:
        ada = dataclasses.replace(ada, umask=umask)
        # A folder for files of the group, which is not the private one.
        os.chown(ada.cwd, ada.uid, ada.shared_gid)
        ada.cwd.chmod(0o2755)
        folder = self.build(ada, cache)
        assert self.look_up(ada, cache) == "True"
        if umask == 0o022:
            for path in (cache, *cache.rglob("*")):
                os.chown(path, 0, 0)
            assert self.look_up(ada, cache) == "True"
        assert not any(path.stat().st_mode & 0o022 for path in (cache, folder, *folder.rglob("*")))

    def test_that_of_somebody_else_is_not_and_it_is_said_what_to_do(self, ada: User, bob: User) -> None:
        cache = bob.cwd / "cache"
        self.build(bob, cache)
        output = self.look_up(ada, cache)
        assert output.startswith(f"{cache / 'bundles'}/ab/{BUNDLE} is not used")
        assert f": it belongs to {bob.name}: set FARM_CACHE_DIR to a folder that only you can write" in output

    @pytest.mark.parametrize("part", [".", "bundles/ab", "bundle", "bundle/model.pte"])
    def test_that_others_may_write_anywhere_on_the_way_is_not(self, ada: User, cache: Path, part: str) -> None:
        folder = self.build(ada, cache)
        path = folder / part[7:] if part.startswith("bundle/") else folder if part == "bundle" else cache / part
        os.chown(path, ada.uid, ada.shared_gid)
        path.chmod(path.stat().st_mode | 0o020)
        assert "can be written by group farm-" in self.look_up(ada, cache)

    def test_a_file_that_somebody_put_into_it_makes_it_useless(self, ada: User, bob: User, cache: Path) -> None:
        folder = self.build(ada, cache)
        for name in ("farm_runner", "inputs/input_0_0.raw"):
            file = place(folder / name, "his", bob.uid, bob.gid)
            assert f"{file} belongs to {bob.name}" in self.look_up(ada, cache)
            file.unlink()
        bob.run("ln", "-s", str(bob.home), str(ada.cwd.parent / "link"))
        (ada.cwd.parent / "link").rename(folder / "link")
        assert f"{folder / 'link'} belongs to {bob.name}" in self.look_up(ada, cache)

    def test_a_command_does_not_execute_what_a_group_may_write(self, ada: User, bob: User, toolchain: Path) -> None:
        cache = ada.cwd / "cache"
        shutil.copytree(toolchain, cache, symlinks=True)
        for path in (cache, *cache.rglob("*")):
            os.chown(path, ada.uid, ada.gid, follow_symlinks=False)
        env = {"FARM_CACHE_DIR": str(cache)}
        assert ada.farm("setup", "runtime", "env", env=env).returncode == 0
        for part in ("sdk", "native"):
            target = cache / part
            os.chown(target, ada.uid, ada.shared_gid)
            target.chmod(0o2775)
            bob.write(target / "marker", "bob can write here")
            done = ada.farm("setup", "runtime", "env", env=env)
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (8, "", 1), done.stderr
            assert f"{target} can be written by group farm-" in done.stderr
            (target / "marker").unlink()
            target.chmod(0o755)
        target.chmod(0o2775)
        assert "set FARM_CACHE_DIR to a folder that only you can write" in ada.farm("doctor", env=env).stdout


@pytest.mark.whole
@pytest.mark.parametrize("umask", [0o002, *(pytest.param(one, marks=pytest.mark.soak) for one in (0o022, 0o077))])
def test_what_a_user_does_every_day_works_under_usual_umasks(
    two_users: tuple[User, User], toolchain: Path, umask: int
) -> None:
    ada = dataclasses.replace(two_users[0], umask=umask)
    ada.run("mkdir", "-p", str(ada.cache))
    for part in toolchain.iterdir():
        # The copy belongs to Ada, like a toolchain of her own build.
        ada.run("cp", "-r", str(part), str(ada.cache))
    ada.run("sh", "-c", "echo '[build]\nbuilders = 1' >farm.toml")
    run = ("run", "--soc", "SM8650", "--suite", "smoke", "-k", "conv2d", "--virtual", "1")
    for arguments in (
        run,
        run,
        ("jobs", "rerun", "smoke/conv2d"),
        ("report",),
        ("setup", "cache", "show"),
        ("runs", "prune", "--keep=1d"),
    ):
        done = ada.farm(*arguments, timeout_s=300, code=0)
        assert "is ignored" not in done.stderr
    assert ada.farm("runs", "prune", "--keep=1d", "--yes").returncode == 0
    assert ada.farm("setup", "cache", "prune", "--all", "--yes").stdout.startswith("removed")


# Texts of users that name a path.


def test_a_text_with_a_slash_or_with_a_dot_or_a_tilde_in_front_is_a_path() -> None:
    assert all(is_path(text) for text in (".", "..", "./et", ".venv", "~", "~ada/et", "/opt/et", "et/src", "../et"))
    assert not any(is_path(text) for text in ("", "main", "main.old", "1.5.0", "v2.49.40", "default", "et~"))


def test_a_path_is_relative_to_the_file_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert [beside(tmp_path, text) for text in ("et", "~/et", "/opt/et")] == [
        tmp_path / "et", tmp_path / "home/et", Path("/opt/et")
    ]  # fmt: skip
    with pytest.raises(UsageError, match="~no-such-user/et: there is no such home"):
        beside(tmp_path, "~no-such-user/et")
