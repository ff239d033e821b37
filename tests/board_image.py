"""Boot image of a small board: Debian's kernel for Arm, and a file system of busybox, dropbear and a C++ runtime."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from debian import unpack
from parts import do_without

from farm.base.errors import MissingToolError
from farm.base.files import published

NEEDED = {
    "qemu-system-aarch64": "qemu-system-arm", "qemu-aarch64": "qemu-user", "fdtput": "device-tree-compiler",
    "ssh-keygen": "openssh-client",
}  # fmt: skip

_RELEASE = "bookworm"
# The kernel for clouds is small, and has all that QEMU's boards have.
_PACKAGES = ("linux-image-cloud-arm64", "busybox", "dropbear-bin", "libstdc++6")
# Load order of the modules, each after its dependencies.
_MODULES = ("virtio", "virtio_ring", "virtio_mmio", "failover", "net_failover", "virtio_net")
_TRIPLET = "aarch64-linux-gnu"
_PROGRAMS = ("bin/busybox", "usr/sbin/dropbear")
_LIBRARIES = (
    "ld-linux-aarch64", "libc", "libcrypt", "libdl", "libgcc_s", "libgmp", "libm", "libnss_files", "libpthread",
    "libresolv", "librt", "libstdc++", "libtomcrypt", "libtommath", "libz",
)  # fmt: skip

STORAGE_MB = 192
"""Room where farm keeps its files."""

# First process. `reboot` sends it SIGTERM; it restarts the login only. `df` shows a file system of its
# own only where one is mounted.
_INIT = f"""#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts
mount -t devpts devpts /dev/pts
mount -t tmpfs -o size={STORAGE_MB}m,mode=1777 tmpfs /var/tmp
for module in {" ".join(_MODULES)}; do insmod /lib/modules/$module.ko; done
hostname board
ifconfig lo 127.0.0.1 up
ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up
route add default gw 10.0.2.2
chown -R 0:0 /root /etc
trap 'reboot -f' TERM
while :; do
    /usr/sbin/dropbear -F -E -s -r /etc/dropbear/host_key &
    wait $!
done
"""
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\n",
    "etc/group": "root:x:0:\n",
    "etc/shells": "/bin/sh\n",
    "etc/os-release": 'PRETTY_NAME="A board of busybox and dropbear"\n',
}


@dataclass(frozen=True)
class BoardImage:
    """Files that a board boots from, and keys that let a test log in to it."""

    folder: Path

    @property
    def kernel(self) -> Path:
        return self.folder / "kernel"

    @property
    def initramfs(self) -> Path:
        return self.folder / "initramfs"

    @property
    def user_key(self) -> Path:
        return self.folder / "user_key"

    @property
    def host_key(self) -> str:
        """Public key, as a line of known hosts has it behind the name."""
        return (self.folder / "host_key.pub").read_text()


def board_image(cache: Path) -> BoardImage:
    """Return the boot image, made once in `cache`; skips where it cannot be made, or fails where it is required."""
    lacking = [package for tool, package in NEEDED.items() if shutil.which(tool) is None]
    missing = f"apt-get install --no-install-recommends {' '.join(lacking)}" if lacking else ""
    try:
        debian = Path() if missing else unpack(_PACKAGES, cache, suite=_RELEASE, architecture="arm64")
    except MissingToolError as error:
        missing = str(error)
    if missing:
        do_without(f"there is no board that boots: {missing}")
    key = hashlib.sha256(Path(__file__).read_bytes() + debian.parent.name.encode()).hexdigest()[:16]
    return BoardImage(published(cache / "board" / key, lambda folder: _make(debian, folder)))


def _make(debian: Path, folder: Path) -> None:
    [kernel] = debian.glob("boot/vmlinuz-*")
    shutil.copy(kernel, folder / "kernel")
    board = folder / "board"
    _file_system(debian, board)
    _keys(folder, debian, board)
    packed = _emulated(debian, ["bin/busybox", "cpio", "-o", "-H", "newc"], cwd=board, stdin=_names(board))
    (folder / "initramfs").write_bytes(packed)
    shutil.rmtree(board)


def _file_system(debian: Path, board: Path) -> None:
    for name in ("bin", "dev", "proc", "sys", "tmp", "var/tmp", "root/.ssh", "etc/dropbear", "lib/modules", "run"):
        (board / name).mkdir(parents=True)
    for name in _PROGRAMS:
        (board / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(debian / name, board / name, follow_symlinks=False)
    # Debian has them in two places, of which the loader knows.
    for name in _LIBRARIES:
        found = [path for place in ("lib", "usr/lib") for path in (debian / place / _TRIPLET).glob(f"{name}.so*")]
        assert found, name
        for path in found:
            place = board / path.relative_to(debian)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place, follow_symlinks=False)
    shutil.copy(debian / "lib/ld-linux-aarch64.so.1", board / "lib", follow_symlinks=False)
    for name in _MODULES:
        [module] = (debian / "lib/modules").rglob(f"{name}.ko")
        shutil.copy(module, board / "lib/modules")
    for name, text in _FILES.items():
        (board / name).write_text(text)
    (board / "init").write_text(_INIT)
    (board / "init").chmod(0o755)


def _keys(folder: Path, debian: Path, board: Path) -> None:
    user_key = folder / "user_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", user_key], check=True)
    shutil.copy(folder / "user_key.pub", board / "root/.ssh/authorized_keys")
    for name, mode in (("root", 0o700), ("root/.ssh", 0o700), ("root/.ssh/authorized_keys", 0o600)):
        (board / name).chmod(mode)
    host_key = board / "etc/dropbear/host_key"
    output = _emulated(debian, ["usr/bin/dropbearkey", "-t", "ed25519", "-f", str(host_key)]).decode()
    [line] = [line for line in output.splitlines() if line.startswith("ssh-ed25519 ")]
    (folder / "host_key.pub").write_text(f"{line}\n")


def _names(board: Path) -> bytes:
    """Return the names of all files of a board, a folder before its content, as cpio reads them."""
    return b"".join(os.fsencode(f"{path.relative_to(board)}\n") for path in sorted(board.rglob("*")))


def _emulated(debian: Path, words: Sequence[str], *, cwd: Path | None = None, stdin: bytes = b"") -> bytes:
    """Return the output of a program for the board's processor, emulated on this machine."""
    program, *arguments = words
    argv = ["qemu-aarch64", "-L", debian, debian / program, *arguments]
    done = subprocess.run(argv, cwd=cwd, input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
