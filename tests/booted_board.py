"""An Arm board that boots here, in QEMU: Debian's kernel, busybox, an old dropbear, and a QCS9100's device tree."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from board_image import BoardImage
from waiting import free_port, until

from farm.base.processes import Child, Supervisor
from farm.devices.device import LOOPBACK, SshAddress

BOOT_SECONDS = 300.0
"""Longest time of a start, which needs 4 s of a processor."""
_ANSWER_SECONDS = 20.0
# Line of dropbear on the console as soon as it listens.
_UP = "Not backgrounding"

# A small buffer of translated code is emptied often. Code of an earlier start that stays in it makes each write to its
# pages slow: a restart then takes 40 s of a processor, not 4 s.
_TRANSLATOR = "tcg,tb-size=32"
_MACHINE = ("-machine", "virt", "-cpu", "cortex-a76", "-smp", "1", "-m", "768", "-accel", _TRANSLATOR)
# Entries of the device tree of a QCS9100 Ride board, before the entry of QEMU's own board.
_COMPATIBLE = ("qcom,qcs9100-ride", "qcom,qcs9100", "qcom,sa8775p", "linux,dummy-virt")
_MODEL = "Qualcomm QCS9100 Ride, emulated"


class Board:
    """Emulated board. `start` boots it; its port on loopback stays the same over resets and power cuts."""

    def __init__(self, supervisor: Supervisor, image: BoardImage, folder: Path) -> None:
        self._supervisor, self._image, self._folder = supervisor, image, folder
        self._child: Child | None = None
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text(f"[{LOOPBACK}]:{self.port} {image.host_key}")
        self._tree = folder / "board.dtb"
        tree = ["qemu-system-aarch64", *_MACHINE, "-nodefaults", "-display", "none"]
        tree[tree.index("virt")] = f"virt,dumpdtb={self._tree}"
        subprocess.run(tree, check=True, capture_output=True)
        for name, values in (("compatible", _COMPATIBLE), ("model", (_MODEL,))):
            subprocess.run(["fdtput", "-t", "s", self._tree, "/", name, *values], check=True)

    @property
    def address(self) -> SshAddress:
        return SshAddress(LOOPBACK, "root", self.port, str(self._image.user_key), str(self.known_hosts))

    @property
    def configuration(self) -> str:
        """Return the entry of the board in farm.toml."""
        return (
            f'[[device]]\nname = "board"\nssh = "root@{LOOPBACK}:{self.port}"\nssh_config = "none"\n'
            f'key_file = "{self._image.user_key}"\nknown_hosts = "{self.known_hosts}"\n'
        )

    @property
    def console(self) -> str:
        """Return the console output since power-on."""
        return (self._folder / "console").read_text(errors="replace")

    @property
    def is_well(self) -> bool:
        """Return whether the SSH server sends its greeting."""
        # QEMU takes the connection before the board is there.
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=_ANSWER_SECONDS) as probe:
                return probe.recv(4) == b"SSH-"
        except OSError:
            return False

    def start(self) -> Board:
        """Switch the board on, and wait until a login works."""
        network = f"user,id=network,restrict=on,hostfwd=tcp:{LOOPBACK}:{self.port}-:22"
        argv = [
            "qemu-system-aarch64", *_MACHINE, "-nodefaults", "-display", "none", "-qmp", "stdio",
            "-serial", f"file:{self._folder / 'console'}", "-dtb", self._tree,
            "-kernel", self._image.kernel, "-initrd", self._image.initramfs,
            "-append", "console=ttyAMA0 quiet panic=1",
            "-netdev", network, "-device", "virtio-net-device,id=card,netdev=network",
        ]  # fmt: skip
        self._child = self._supervisor.spawn(
            argv, name="board", stdin_pipe=True, stdout_pipe=True, stderr=self._folder / "qemu.log"
        )
        self._unread = b""
        assert "QMP" in self._receive()
        self._order("qmp_capabilities")
        self.wait(start=1)
        return self

    def stop(self) -> None:
        """Pull the plug."""
        if self._child is not None:
            self._child.terminate(timeout_s=1.0)
            self._child = None

    @property
    def starts(self) -> int:
        """How many times it has been up since it was switched on."""
        return self.console.count(_UP)

    def reset(self) -> None:
        """Press the reset button: the board boots at once, with an empty memory."""
        self._order("system_reset")

    def cut_network(self, *, cut: bool = True) -> None:
        """Pull the network's plug, or put it in: open connections get no signal."""
        self._order("set_link", name="card", up=not cut)

    def wait(self, start: int, seconds: float = BOOT_SECONDS) -> None:
        """Return as soon as its SSH server greets, in its start number `start` since it was switched on."""

        def has_started() -> bool:
            assert self._process().poll() is None, (self._folder / "qemu.log").read_text()
            return self.starts >= start and self.is_well

        until(has_started, lambda: f"the start of the board: {self.console[-2000:]}", seconds)

    def _order(self, command: str, **arguments: Any) -> None:
        """Have QEMU do something."""
        process = self._process()
        assert process.stdin is not None
        process.stdin.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        process.stdin.flush()
        while True:
            answer = self._receive()
            assert "error" not in answer, answer
            # Lines about events come between.
            if "return" in answer:
                return

    def _receive(self) -> dict[str, Any]:
        process = self._process()
        assert process.stdout is not None
        deadline = time.monotonic() + _ANSWER_SECONDS
        while b"\n" not in self._unread:
            readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(process.stdout.fileno(), 65536) if readable else b""
            assert data, f"QEMU does not answer: {self._folder / 'qemu.log'}"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _process(self) -> subprocess.Popen[bytes]:
        assert self._child is not None, "the board is switched off"
        return self._child.process
