"""A store in a file belongs on a disk of the machine: the locks of SQLite do not reach further."""

from __future__ import annotations

from pathlib import Path

import pytest

from farm.base.errors import NoStoreError
from farm.store import store_file
from farm.store.store import open_store
from farm.store.store_file import network_kind

MOUNTS = r"""27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
30 27 0:25 / /dev/shm rw,relatime shared:3 - tmpfs tmpfs rw
40 27 0:50 / /home rw,relatime shared:9 master:2 - nfs4 nas:/home rw,vers=4.2
41 40 8:1 / /home/ada/disk rw,relatime - xfs /dev/sda1 rw
42 27 0:51 / /mnt/lab\040files rw - cifs //nas/lab rw
43 27 0:52 / /mnt/far rw - fuse.sshfs me@far:/ rw
45 27 0:54 / /srv rw - nfs nas:/srv rw
46 45 8:2 / /srv rw - ext4 /dev/sdc1 rw
47 27 0:55 / /mnt/c rw - 9p C:\134 rw
nonsense
49 27 0:57 / /mnt/object rw - fuse.s3fs s3fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/farm/farm.db", ""),
        ("/home/ada/.local/state/farm/farm.db", "nfs4"),
        ("/homes/ada/farm.db", ""),
        ("/home/ada/disk/farm.db", ""),
        ("/mnt/lab files/farm.db", "cifs"),
        ("/mnt/far/farm.db", "fuse.sshfs"),
        ("/srv/farm.db", ""),
        ("/mnt/c/farm.db", "9p"),
        ("/mnt/object/farm.db", "fuse.s3fs"),
    ],
)
def test_the_mount_that_covers_a_path_decides(path: str, kind: str) -> None:
    assert network_kind(MOUNTS, path) == kind


def test_a_store_on_a_network_file_system_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"{MOUNTS}50 27 0:58 / {tmp_path}/share rw - nfs4 nas:/x rw\n")
    monkeypatch.setattr(store_file, "_MOUNTS", mounts)
    (tmp_path / "share").mkdir()
    (tmp_path / "link").symlink_to("share")
    for folder in ("share/deep", "link"):
        with pytest.raises(NoStoreError, match=r"network file system \(nfs4\).*postgresql://"):
            open_store(tmp_path / folder / "farm.db")
    assert list((tmp_path / "share").iterdir()) == []
    open_store(tmp_path / "disk" / "farm.db").close()
