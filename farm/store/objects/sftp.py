"""Files of fsspec over SFTP, on farm's own connection: with known host keys and the settings of ~/.ssh/config."""

from __future__ import annotations

from typing import TYPE_CHECKING

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

if TYPE_CHECKING:
    from farm.devices.ssh.link import SshLink


class CheckedSftp(SFTPFileSystem):  # type: ignore[misc]
    """File system over a further SFTP session of `link`, with known host keys alone: fsspec's own accepts any.

    Raises DeviceError.
    """

    cachable = False

    def __init__(self, link: SshLink, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s
        super().__init__("artifacts", host_key_policy="reject")

    def _connect(self) -> None:
        channel = self._link.sftp(timeout_s=self._timeout_s)
        channel.settimeout(self._timeout_s)
        self.ftp = paramiko.SFTPClient(channel)

    def set_mode(self, path: str, mode: int) -> None:
        """Set the permissions of a file or folder."""
        self.ftp.chmod(path, mode)

    def mode_of(self, path: str) -> int:
        """Return the permissions of a file or folder."""
        return int(self.ftp.stat(path).st_mode or 0) & 0o7777

    def make_folder(self, path: str) -> None:
        """Make a folder. Raises OSError if the path exists."""
        self.ftp.mkdir(path)

    def put_in_place(self, old: str, new: str) -> None:
        """Rename a file, also over another one."""
        self.ftp.posix_rename(old, new)

    def renew(self, path: str) -> None:
        """Give a file the present time."""
        self.ftp.utime(path, None)
