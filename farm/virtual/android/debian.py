"""Debian packages of a newer release than this machine's, unpacked into farm's cache: nothing is installed.

apt runs with a configuration, sources, lists and state of its own. The mirror is the one that this machine's apt uses,
and what comes from it counts only where Debian's keys, as this machine has them, have signed it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from farm.errors import MissingToolError
from farm.system.publish import published

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
"""Debian's keys, of the package debian-archive-keyring."""
CONTENTS = "packages.txt"
"""Beside the unpacked tree: the packages in it, each with its version."""

_HAD_NOT = "packages of Debian cannot be had"
_TREE = "root"
# The index of a whole release is some 11 MB, and a mirror may be slow.
_UPDATE_SECONDS = 600.0
_DOWNLOAD_SECONDS = 600.0
_UNPACK_SECONDS = 120.0
_INDEX_URI = re.compile(r"'([^' ]+)/dists/[^' ]+/(?:In)?Release'")


def unpack(
    packages: Sequence[str],
    cache_dir: Path,
    *,
    suite: str = "sid",
    architecture: str = "",
    depends: bool = True,
    log: Callable[[str], None] | None = None,
) -> Path:
    """Return a folder with `packages` of a release of Debian, unpacked below `cache_dir`, and what they depend on.

    The release is a suite or a codename, the architecture this machine's unless another is named; without `depends`
    there are just the packages. What is there already is used as it is, however old; `packages.txt` beside the folder
    has the versions. Programs in it need its own C library: a chroot, or its `ld-linux` with `--library-path`. `log`
    gets a line about what takes long. Raises MissingToolError where this machine has no apt, no mirror of Debian or
    none of Debian's keys, or where the mirror does not answer or what it sends is not signed.
    """
    wanted = sorted(set(packages))
    architecture = architecture or _own_architecture()
    key = hashlib.sha256("\0".join((architecture, str(depends), *wanted)).encode()).hexdigest()[:16]

    def fill(folder: Path) -> None:
        # Not in the folder that is published: apt's downloads run as a user of their own, who has to get there.
        with tempfile.TemporaryDirectory(prefix="farm-apt-") as scratch:
            apt = _Apt(Path(scratch), cache_dir, suite, architecture, log or (lambda _line: None))
            for archive in apt.download(wanted, depends=depends):
                _unpack_archive(archive, folder)

    return published(cache_dir / "debian" / f"{suite}-{key}", fill) / _TREE


def find_mirror(printed: str) -> str:
    """Return the address of the Debian mirror in what `apt-get update --print-uris` prints, empty for none. Pure.

    A mirror's path ends in `debian`; that of the archive itself is nothing else, that of another vendor's often is.
    """
    addresses = [found for found in _INDEX_URI.findall(printed) if urlsplit(found).path.rsplit("/", 1)[-1] == "debian"]
    return min(addresses, key=lambda address: len(urlsplit(address).path), default="")


def apt_configuration(folder: Path, lists: Path, acquire: Iterable[str], architecture: str) -> str:
    """Return an apt.conf for which nothing of this machine counts but `acquire`, its lines about how to download. Pure.

    The release is not asked whether its index has expired: mirrors that stand still for some weeks are common, and
    nothing depends on having the newest. The signature on it counts all the same.
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
    # Whatever this machine allows: without a signature nothing is used.
    refused = {f"Acquire::Allow{kind}Repositories": "false" for kind in ("Insecure", "Weak", "DowngradeToInsecure")}
    kept = [line for line in acquire if line.startswith("Acquire::") and not line.startswith("Acquire::Languages")]
    return "".join([*(f"{line}\n" for line in kept), *(f'{key} "{text}";\n' for key, text in (own | refused).items())])


def source_entry(mirror: str, suite: str) -> str:
    """Return the one source that is asked, in apt's deb822 format. Pure."""
    return f"Types: deb\nURIs: {mirror}\nSuites: {suite}\nComponents: main\nSigned-By: {KEYRING}\n"


def _own_architecture() -> str:
    return _output(["dpkg", "--print-architecture"], dict(os.environ), _UNPACK_SECONDS).strip()


def _unpack_archive(archive: Path, folder: Path) -> None:
    environment = dict(os.environ)
    _output(["dpkg-deb", "-x", str(archive), str(folder / _TREE)], environment, _UNPACK_SECONDS)
    argv = ["dpkg-deb", "-W", "--showformat=${Package} ${Version}\n", str(archive)]
    with (folder / CONTENTS).open("a", encoding="utf-8") as file:
        file.write(_output(argv, environment, _UNPACK_SECONDS))


class _Apt:
    """apt with its own configuration in `folder`; the index of a release is kept for the next time."""

    def __init__(
        self, folder: Path, cache_dir: Path, suite: str, architecture: str, log: Callable[[str], None]
    ) -> None:
        self._folder, self._suite, self._log = folder, suite, log
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
        self.environment = {**machine, "APT_CONFIG": str(folder / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}

    def download(self, packages: list[str], *, depends: bool) -> list[Path]:
        """Return the archives of `packages`, and of what they depend on."""
        was_there = self._index.is_dir()
        self._take_index(anew=False)
        try:
            self._fetch(packages, depends=depends)
        except MissingToolError:
            if not was_there:
                raise
            # The mirror has gone on, and what the index names is not there any more.
            self._take_index(anew=True)
            self._fetch(packages, depends=depends)
        return sorted((self._folder / "cache/archives").glob("*.deb"))

    def _fetch(self, packages: list[str], *, depends: bool) -> None:
        words = ["install", "--yes", "--download-only"] if depends else ["download"]
        archives = self._folder / "cache/archives"
        _output(["apt-get", "--quiet", *words, *packages], self.environment, _DOWNLOAD_SECONDS, cwd=archives)

    def _take_index(self, *, anew: bool) -> None:
        published(self._index, self._update, anew=anew)
        shutil.rmtree(self._folder / "lists")
        (self._folder / "lists/partial").mkdir(parents=True)
        for file in self._index.iterdir():
            shutil.copy2(file, self._folder / "lists")

    def _update(self, folder: Path) -> None:
        self._log(f"asking {urlsplit(self._mirror).hostname} for the packages of Debian {self._suite}: about a minute")
        _output(["apt-get", "--quiet", "update"], self.environment, _UPDATE_SECONDS)
        files = [file for file in (self._folder / "lists").iterdir() if file.is_file() and file.name != "lock"]
        if not any("_Packages" in file.name for file in files):
            raise MissingToolError(f"{_HAD_NOT}: {self._mirror} sent no index of {self._suite}")
        for file in files:
            shutil.copy2(file, folder)


def _output(argv: list[str], environment: dict[str, str], timeout_s: float, cwd: Path | None = None) -> str:
    """Return what a program of Debian prints. Raises MissingToolError, with its last line, when it fails."""
    try:
        done = subprocess.run(
            argv,
            cwd=cwd,
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
    # An index that could not be fetched is a warning of apt's, and the old one goes on being used.
    if done.returncode != 0 or (errors and argv[0] == "apt-get"):
        why = (errors or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
        raise MissingToolError(f"{_HAD_NOT}: {argv[0]}: {why.removeprefix('E: ')}")
    return done.stdout
