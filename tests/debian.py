"""Debian packages of another release than this machine's, unpacked into the tests' cache and never installed.

apt runs with its own configuration, sources, lists and state. It uses the mirror of this machine's apt;
packages are refused unless a key of the package debian-archive-keyring has signed them.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from farm.base.errors import MissingToolError
from farm.base.files import published

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
            for archive in _download(Path(scratch), wanted, suite, architecture):
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
    nothing = ("main", "parts", "preferences", "preferencesparts", "sourceparts", "trusted", "trustedparts")
    own = {
        "APT::Architecture": architecture, "APT::Architectures": architecture, "APT::Install-Recommends": "false",
        "Acquire::Check-Valid-Until": "false", "Acquire::GzipIndexes": "true", "Acquire::Languages": "none",
        "Acquire::Retries": "2", "Dir::Cache": f"{folder}/cache", "Dir::Etc::sourcelist": f"{folder}/farm.sources",
        "Dir::State": f"{folder}/state", "Dir::State::lists": str(lists),
        "Dir::State::status": f"{folder}/state/status",
        **{f"Dir::Etc::{name}": "/dev/null" for name in nothing},
    }  # fmt: skip
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


def _download(folder: Path, packages: list[str], suite: str, architecture: str) -> list[Path]:
    """Return the archives of `packages` and of their dependencies, downloaded by an apt with its state in `folder`."""
    if not KEYRING.is_file():
        raise MissingToolError(f"{_HAD_NOT}: there is no {KEYRING}: install debian-archive-keyring, on Debian")
    machine = {**os.environ, "LC_ALL": "C"}
    folder.chmod(0o755)
    mirror = find_mirror(_output(["apt-get", "update", "--print-uris"], machine, _UNPACK_SECONDS))
    if not mirror:
        raise MissingToolError(f"{_HAD_NOT}: no source of this machine's apt is Debian's")
    acquire = _output(["apt-config", "dump"], machine, _UNPACK_SECONDS).splitlines()
    for name in ("cache/archives/partial", "lists/partial", "state"):
        (folder / name).mkdir(parents=True)
    (folder / "state/status").touch()
    (folder / "farm.sources").write_text(source_entry(mirror, suite), encoding="utf-8")
    (folder / "apt.conf").touch(mode=0o600)
    configuration = apt_configuration(folder, folder / "lists", acquire, architecture)
    (folder / "apt.conf").write_text(configuration, encoding="utf-8")
    environment = {**machine, "APT_CONFIG": str(folder / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"}
    _output(["apt-get", "--quiet", "update"], environment, _UPDATE_SECONDS)
    if not [*(folder / "lists").glob("*_Packages*")]:
        raise MissingToolError(f"{_HAD_NOT}: {mirror} sent no index of {suite}")
    words = ["apt-get", "--quiet", "install", "--yes", "--download-only", *packages]
    _output(words, environment, _DOWNLOAD_SECONDS)
    return sorted((folder / "cache/archives").glob("*.deb"))


def _output(argv: list[str], environment: dict[str, str], timeout_s: float) -> str:
    """Return the output of a program of Debian. Raises MissingToolError with its first error."""
    try:
        done = subprocess.run(
            argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=timeout_s, check=False,
        )  # fmt: skip
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
