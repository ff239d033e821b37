"""Debian packages of another release than this machine's, unpacked into the tests' cache and never installed.

apt runs with its own configuration, sources, lists and state. It uses the mirror of this machine's apt;
packages are refused unless a key of the package debian-archive-keyring has signed them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from farm.base.errors import MissingToolError
from farm.base.publish import published

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""Debian's keys, of the package debian-archive-keyring."""
CONTENTS = "packages.txt"
"""File beside the unpacked tree: packages in it, each with its version."""

_HAD_NOT = "packages of Debian cannot be had"
_TREE = "root"
# The index of a whole release is some 11 MB, and a mirror may be slow.
_UPDATE_SECONDS = 600.0
_DOWNLOAD_SECONDS = 600.0
_UNPACK_SECONDS = 120.0
_INDEX_URI = re.compile(r"'([^' ]+)/dists/[^' ]+/(?:In)?Release'")


def unpack(packages: Sequence[str], cache_dir: Path, *, suite: str = "sid", architecture: str = "") -> Path:
    """Return a folder with `packages` of a suite of Debian and their dependencies, unpacked below `cache_dir`.

    Without `architecture`, packages are for this machine. A folder that exists is used at any age; `packages.txt`
    beside it lists the versions. A program in it needs its own C library: a chroot, or its `ld-linux` with
    `--library-path`. Raises MissingToolError where apt, a mirror of Debian or the keys are missing, the mirror does
    not answer, or a signature is wrong.
    """
    wanted = sorted(set(packages))
    architecture = architecture or _output(["dpkg", "--print-architecture"], dict(os.environ), _UNPACK_SECONDS).strip()
    key = hashlib.sha256("\0".join((architecture, *wanted)).encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        # Outside the published folder: the user that apt downloads as may not enter that.
        with tempfile.TemporaryDirectory(prefix="farm-apt-") as scratch:
            for archive in _Apt(Path(scratch), cache_dir, suite, architecture).download(wanted):
                _unpack_archive(archive, folder)

    return published(cache_dir / "debian" / f"{suite}-{key}", fill) / _TREE


def find_mirror(printed: str) -> str:
    """Return the address of the Debian mirror in the output of `apt-get update --print-uris`, empty for none. Pure.

    The path of a mirror ends in `debian`. Archives of other vendors have longer paths: the shortest wins.
    """
    addresses = [found for found in _INDEX_URI.findall(printed) if urlsplit(found).path.rsplit("/", 1)[-1] == "debian"]
    return min(addresses, key=lambda address: len(urlsplit(address).path), default="")


def apt_configuration(folder: Path, lists: Path, acquire: Iterable[str], architecture: str) -> str:
    """Return an apt.conf that takes only `acquire`, lines about downloads, from this machine's configuration. Pure.

    An expired index is accepted, as many mirrors are weeks old; an unsigned index is refused.
    """
    own = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "Acquire::Check-Valid-Until": "false",
        "Acquire::GzipIndexes": "true",
        "Acquire::Languages": "none",
        "Acquire::Retries": "2",
        "Dir::Cache": f"{folder}/cache",
        "Dir::Etc::main": "/dev/null",
        "Dir::Etc::parts": "/dev/null",
        "Dir::Etc::preferences": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::Etc::sourcelist": f"{folder}/farm.sources",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::trusted": "/dev/null",
        "Dir::Etc::trustedparts": "/dev/null",
        "Dir::State": f"{folder}/state",
        "Dir::State::lists": str(lists),
        "Dir::State::status": f"{folder}/state/status",
    }
    # After `acquire`, which may allow unsigned repositories.
    refused = {f"Acquire::Allow{kind}Repositories": "false" for kind in ("Insecure", "Weak", "DowngradeToInsecure")}
    kept = [line for line in acquire if line.startswith("Acquire::") and not line.startswith("Acquire::Languages")]
    return "".join([*(f"{line}\n" for line in kept), *(f'{key} "{text}";\n' for key, text in (own | refused).items())])


def source_entry(mirror: str, suite: str) -> str:
    """Return an entry for one suite of `mirror`, in apt's deb822 format. Pure."""
    return f"Types: deb\nURIs: {mirror}\nSuites: {suite}\nComponents: main\nSigned-By: {KEYRING}\n"


def _unpack_archive(archive: Path, folder: Path) -> None:
    environment = dict(os.environ)
    _output(["dpkg-deb", "-x", str(archive), str(folder / _TREE)], environment, _UNPACK_SECONDS)
    argv = ["dpkg-deb", "-W", "--showformat=${Package} ${Version}\n", str(archive)]
    with (folder / CONTENTS).open("a", encoding="utf-8") as file:
        file.write(_output(argv, environment, _UNPACK_SECONDS))


class _Apt:
    """apt with its own configuration in `folder`; the cache keeps the index of each suite."""

    def __init__(self, folder: Path, cache_dir: Path, suite: str, architecture: str) -> None:
        self._folder, self._suite = folder, suite
        self._index = cache_dir / "debian" / f"{suite}-{architecture}-index"
        if not KEYRING.is_file():
            raise MissingToolError(f"{_HAD_NOT}: there is no {KEYRING}: install debian-archive-keyring, on Debian")
        machine = {**os.environ, "LC_ALL": "C"}
        folder.chmod(0o755)
        mirror = find_mirror(_output(["apt-get", "update", "--print-uris"], machine, _UNPACK_SECONDS))
        if not mirror:
            raise MissingToolError(f"{_HAD_NOT}: no source of this machine's apt is Debian's")
        self._mirror = mirror
        acquire = _output(["apt-config", "dump"], machine, _UNPACK_SECONDS).splitlines()
        for name in ("cache/archives/partial", "lists/partial", "state"):
            (folder / name).mkdir(parents=True)
        (folder / "state/status").touch()
        (folder / "farm.sources").write_text(source_entry(mirror, suite), encoding="utf-8")
        configuration = apt_configuration(folder, folder / "lists", acquire, architecture)
        (folder / "apt.conf").touch(mode=0o600)
        (folder / "apt.conf").write_text(configuration, encoding="utf-8")
        self._environment = {**machine, "APT_CONFIG": str(folder / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}

    def download(self, packages: list[str]) -> list[Path]:
        """Return the archives of `packages` and of their dependencies."""
        was_there = self._index.is_dir()
        self._take_index(anew=False)
        try:
            self._fetch(packages)
        except MissingToolError:
            if not was_there:
                raise
            # The mirror has newer versions than the index names.
            self._take_index(anew=True)
            self._fetch(packages)
        return sorted((self._folder / "cache/archives").glob("*.deb"))

    def _fetch(self, packages: list[str]) -> None:
        words = ["apt-get", "--quiet", "install", "--yes", "--download-only", *packages]
        _output(words, self._environment, _DOWNLOAD_SECONDS)

    def _take_index(self, *, anew: bool) -> None:
        published(self._index, self._update, anew=anew)
        shutil.rmtree(self._folder / "lists")
        (self._folder / "lists/partial").mkdir(parents=True)
        for file in self._index.iterdir():
            shutil.copy2(file, self._folder / "lists")

    def _update(self, folder: Path) -> None:
        _output(["apt-get", "--quiet", "update"], self._environment, _UPDATE_SECONDS)
        files = [file for file in (self._folder / "lists").iterdir() if file.is_file() and file.name != "lock"]
        if not any("_Packages" in file.name for file in files):
            raise MissingToolError(f"{_HAD_NOT}: {self._mirror} sent no index of {self._suite}")
        for file in files:
            shutil.copy2(file, folder)


def _output(argv: list[str], environment: dict[str, str], timeout_s: float) -> str:
    """Return the output of a program of Debian. Raises MissingToolError with its first error."""
    try:
        done = subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise MissingToolError(f"{_HAD_NOT}: there is no {argv[0]}: this is not Debian") from None
    except subprocess.TimeoutExpired:
        raise MissingToolError(f"{_HAD_NOT}: {argv[0]} took over {timeout_s:g} s") from None
    errors = [line for line in done.stderr.splitlines() if line.startswith("E: ")]
    # apt-get exits with 0 where an index cannot be fetched.
    if done.returncode != 0 or (errors and argv[0] == "apt-get"):
        why = (errors or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise MissingToolError(f"{_HAD_NOT}: {argv[0]}: {why.removeprefix('E: ')}")
    return done.stdout
