"""Packages of another release of Debian: from the machine's mirror, signed, never installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from debian import apt_configuration, source_entry


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="there is no apt here")
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
