"""Files of fsspec over SFTP, on farm's own connection: with known host keys and the settings of ~/.ssh/config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

from farm.devices.ssh.config import ssh_address
from farm.devices.ssh.link import SshLink

if TYPE_CHECKING:
    from farm.base.config.shared import ArtifactsAddress

_WHO = "artifacts"


def sftp_link(address: ArtifactsAddress) -> SshLink:
    """Return the connection to the machine of `address`, opened on first use. Raises InfraError."""
    if address.login is None:
        raise ValueError(address)
    return SshLink(_WHO, ssh_address(address.login))


def open_sftp(link: SshLink, timeout_s: float) -> Any:
    """Return fsspec's file system over a further SFTP session of `link`. Raises DeviceError."""
    return _CheckedSftp(link, timeout_s)


class _CheckedSftp(SFTPFileSystem):  # type: ignore[misc]
    """File system with known host keys alone: fsspec's own accepts any unknown host key."""

    cachable = False

    def __init__(self, link: SshLink, timeout_s: float) -> None:
        self._link, self._timeout_s = link, timeout_s
        super().__init__(_WHO, host_key_policy="reject")

    def _connect(self) -> None:
        channel = self._link.sftp(timeout_s=self._timeout_s)
        channel.settimeout(self._timeout_s)
        self.ftp = paramiko.SFTPClient(channel)
