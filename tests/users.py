"""Two real users of this machine, made for the tests and removed again: what one can do to the other."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from farm_home import FarmHome
from forked_command import PRELOADED
from forks import run_fork, start_forking
from parts import do_without
from waiting import poll

import farm

_REQUIRE = "FARM_REQUIRE_USERS"
_CHECKOUT = Path(farm.__file__).resolve().parents[1]
# Tries to change the list of users, which another process may be changing.
_TRIES = 60


@dataclass(frozen=True)
class User(FarmHome):
    """A user with a home of their own, in which `farm` finds cache and state by itself."""

    name: str = ""
    uid: int = -1
    gid: int = -1
    """Id of the private group, which has no other member."""
    shared_gid: int = -1
    """Id of the group of both users."""
    umask: int = 0o022
    home: Path = Path("/nonexistent")
    forks: Path | None = None
    """Socket of a process of theirs that forks."""

    @property
    def env(self) -> dict[str, str]:
        # An interpreter outside of the virtual environment finds its packages by this path.
        packages = [path for path in sys.path if path.endswith("site-packages")]
        kept = {name: os.environ[name] for name in ("ANDROID_ADB_SERVER_PORT", "LANG") if name in os.environ}
        return {
            **kept,
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.pathsep.join([str(_CHECKOUT), *packages]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "80",
        }

    @property
    def start(self) -> dict[str, Any]:
        groups = [self.gid, self.shared_gid]
        return {"user": self.uid, "group": self.gid, "extra_groups": groups, "umask": self.umask}

    def run(self, *argv: str, env: Mapping[str, str] | None = None, timeout_s: float = 60) -> str:
        """Run a command as this user in their current folder, and return its output."""
        done = subprocess.run(
            argv, **self.start, env={**self.env, **(env or {})}, cwd=self.cwd, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def answer(
        self, arguments: Sequence[str], env: Mapping[str, str], options: Mapping[str, Any], *, forked: bool
    ) -> subprocess.CompletedProcess[str]:
        """Run `farm` as this user, in a fork of a process of theirs where `forked` allows it."""
        if forked and self.forks is not None:
            return run_fork(self.forks, [*self.program, *arguments], env=env, umask=self.umask, **options)
        return super().answer(arguments, env, options, forked=forked)

    def python(self, *argv: str, env: Mapping[str, str] | None = None) -> str:
        """Run Python as this user and return its output."""
        if self.forks is None:
            return self.run(self.interpreter, *argv, env=env)
        every = {**self.env, **(env or {})}
        words = [self.interpreter, *argv]
        done = run_fork(self.forks, words, env=every, cwd=self.cwd, umask=self.umask, timeout_s=60)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout

    def begin(self) -> None:
        """Let the user have an empty home, but for a folder to work in."""
        shutil.rmtree(self.home, ignore_errors=True)
        for folder in (self.home, self.cwd):
            folder.mkdir()
            os.chown(folder, self.uid, self.gid)
            folder.chmod(0o755)

    def write(self, path: Path, text: str, mode: int = 0o644) -> Path:
        """Write a file as this user, with the folders above it."""
        code = (
            "import os, pathlib, sys; path = pathlib.Path(sys.argv[1]); path.parent.mkdir(parents=True, exist_ok=True);"
            "path.write_text(sys.argv[2]); os.chmod(path, int(sys.argv[3]))"
        )
        self.python("-c", code, str(path), text, str(mode))
        return path


@contextlib.contextmanager
def two_users() -> Iterator[tuple[User, User]]:
    """Make two users with a group that both are in; skips the test where that cannot be."""
    if os.geteuid() != 0:
        do_without("two real users are made for this: it needs root", _REQUIRE)
    if missing := [tool for tool in ("useradd", "userdel", "groupadd", "groupdel") if shutil.which(tool) is None]:
        do_without(f"two real users are made for this: {', '.join(missing)} is not installed", _REQUIRE)
    token = secrets.token_hex(3)
    shared = f"farm-{token}"
    # Not below tmp_path, which is closed to others.
    base = Path(tempfile.mkdtemp(prefix="farm-users-", dir="/tmp"))
    base.chmod(0o755)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, base, ignore_errors=True)
        _change("groupadd", shared)
        stack.callback(_change, "groupdel", shared)
        users = []
        for short in ("ada", "bob"):
            name, home = f"farm-{short}-{token}", base / short
            _change("useradd", "-M", "-U", "-G", shared, "-d", str(home), "-s", "/bin/sh", name)
            stack.callback(_change, "userdel", name)
            users.append(_user(name, home, shared))
            stack.callback(_end_processes, users[-1].uid)
        for user in users:
            user.begin()
            _require_python(user)
        for number, user in enumerate(users):
            start = {name: value for name, value in user.start.items() if name != "umask"}
            forks, owner = base / f"forks-{number}", os.getpid()
            process = start_forking(forks, PRELOADED, owner=owner, env=user.env, interpreter=user.interpreter, **start)
            stack.callback(process.wait)
            stack.callback(process.kill)
            users[number] = dataclasses.replace(user, forks=forks)
        yield users[0], users[1]


def _user(name: str, home: Path, shared: str) -> User:
    import grp
    import pwd

    account = pwd.getpwnam(name)
    return User(
        home / ".cache" / "farm", home / ".local" / "state" / "farm", home / "work", owns_cache=True, name=name,
        uid=account.pw_uid, gid=account.pw_gid, shared_gid=grp.getgrnam(shared).gr_gid, home=home,
        interpreter=_interpreter(account.pw_uid),
    )  # fmt: skip


def _interpreter(uid: int) -> str:
    """Return a Python of this version that a user can start: the tests' interpreter may be in root's home."""
    fallback = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, fallback):
        with contextlib.suppress(OSError):
            if subprocess.run([path, "-c", ""], user=uid, cwd="/", capture_output=True, check=False).returncode == 0:
                return path
    return do_without(f"neither {sys.executable} nor {fallback} can be started by another user than root", _REQUIRE)


def _require_python(user: User) -> None:
    try:
        user.python("-c", "import farm.cli.main, msgspec, numpy, sqlalchemy")
    except AssertionError as error:
        do_without(f"another user than root cannot import farm here: {error}", _REQUIRE)


def _end_processes(uid: int) -> None:
    """Wait for the end of a user's processes, which `userdel` requires; kill the rest after ten seconds."""
    if poll(lambda: not _processes_of(uid), 10.0):
        return
    for pid in _processes_of(uid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    poll(lambda: not _processes_of(uid), 10.0)


def _processes_of(uid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == uid:
                found.append(int(folder.name))
    return found


def _change(*argv: str) -> None:
    for _ in range(_TRIES):
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if "lock" not in done.stderr:
            break
        time.sleep(0.5)
    raise AssertionError(f"{argv}: {done.stderr}")
