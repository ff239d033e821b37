"""Packages of another release of Debian: from the machine's mirror, signed, never installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from debian import apt_configuration, find_mirror, source_entry, unpack

from farm.base.errors import MissingToolError

PRINTED = """\
'https://download.example.com/linux/debian/dists/bookworm/InRelease' download_InRelease 0
'http://deb.example.org/debian-security/dists/bookworm-security/InRelease' security_InRelease 0
'http://deb.example.org/debian/dists/bookworm/InRelease' debian_InRelease 0
'http://deb.example.org/debian/dists/bookworm/main/binary-amd64/Packages.xz' debian_Packages 0
"""

needs_apt = pytest.mark.skipif(shutil.which("apt-get") is None, reason="there is no apt here")


def test_the_mirror_is_the_one_that_the_machine_uses() -> None:
    assert find_mirror(PRINTED) == "http://deb.example.org/debian"
    assert find_mirror(PRINTED.splitlines()[0]) == "https://download.example.com/linux/debian"
    assert find_mirror(PRINTED.splitlines()[1]) == ""
    assert find_mirror("") == ""


def test_of_the_machines_configuration_only_the_way_to_the_network_counts(tmp_path: Path) -> None:
    lines = [
        'Acquire::http::Proxy "http://proxy.example.org:3128";',
        'Acquire::AllowInsecureRepositories "1";',
        'DPkg::Post-Invoke:: "rm -f /var/cache/apt/archives/*.deb";',
        'Dir::State "/var/lib/apt";',
    ]
    made = apt_configuration(tmp_path, tmp_path / "lists", lines, "amd64")
    assert lines[0] in made
    assert "Post-Invoke" not in made
    assert "/var/lib" not in made
    assert made.index('Acquire::AllowInsecureRepositories "1"') < made.index('AllowInsecureRepositories "false"')


@needs_apt
def test_an_index_that_debian_has_not_signed_is_refused(tmp_path: Path) -> None:
    for name in ("lists/partial", "cache/archives/partial", "state", "debian/dists/sid/main/binary-amd64"):
        (tmp_path / name).mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / "state/status").touch()
    packages = tmp_path / "debian/dists/sid/main/binary-amd64/Packages"
    packages.write_bytes(b"Package: adbd\nVersion: 99\nArchitecture: amd64\nFilename: a.deb\n")
    digest = hashlib.sha256(packages.read_bytes()).hexdigest()
    release = f"Suite: sid\nSHA256:\n {digest} {packages.stat().st_size} main/binary-amd64/Packages\n"
    (tmp_path / "debian/dists/sid/Release").write_text(release)
    allowing = ['Acquire::AllowInsecureRepositories "true";']
    (tmp_path / "apt.conf").write_text(apt_configuration(tmp_path, tmp_path / "lists", allowing, "amd64"))
    (tmp_path / "farm.sources").write_text(source_entry(f"file:{tmp_path}/debian", "sid"))
    environment = {**os.environ, "APT_CONFIG": str(tmp_path / "apt.conf"), "LC_ALL": "C"}
    done = subprocess.run(["apt-get", "update"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "is not signed" in done.stderr
    assert list((tmp_path / "lists").glob("*Packages*")) == []


def test_a_machine_without_apt_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"packages of Debian cannot be had: there is no dpkg: this is not Deb"):
        unpack(["adbd"], tmp_path / "cache")
