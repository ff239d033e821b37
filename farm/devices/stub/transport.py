"""A stand-in for a device: a folder with the answers of programs and the files that were pushed. It runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import msgspec

from farm.base.errors import DeviceError, DeviceGoneError
from farm.devices.device import DeviceAddress, LocalAddress
from farm.devices.local.transport import LocalTransport
from farm.devices.transport import Link, Output, Process, Transport


class StubAddress(msgspec.Struct, DeviceAddress, frozen=True, tag="stub"):
    """Address of a made-up device, which is absent while its folder is missing."""

    folder: str
    """`answers/NAME` has the output of the program NAME, `files` the device's files, `asked` a line for each use."""

    @property
    def place(self) -> str:
        """The folder."""
        return self.folder


class StubTransport(LocalTransport):
    """Transport of the made-up device `serial`. A program without an answer ends with 127, like a missing one."""

    no_reboot = ""

    def __init__(self, serial: str, address: StubAddress) -> None:
        super().__init__(serial, LocalAddress("/farm"))
        self._folder = Path(address.folder)

    def spawn(self, argv: Sequence[str], command: str, timeout_s: float, *, stdin: bool) -> StubProcess:
        """Return a program that has ended already: see Transport."""
        del command, timeout_s, stdin
        self._note(argv[0])
        answer = self._folder / "answers" / argv[0].replace("/", "_")
        return StubProcess(answer.read_bytes() if answer.is_file() else None)

    def push(self, files: Mapping[PurePosixPath, Path | bytes | Link]) -> None:
        """Write files: see Transport."""
        self._note("push")
        super().push({self._here(path): source for path, source in files.items()})

    def pull(self, files: Mapping[PurePosixPath, Path], *, max_bytes: int | Mapping[PurePosixPath, int]) -> None:
        """Read files: see Transport."""
        self._note("pull")
        limits = max_bytes if isinstance(max_bytes, Mapping) else dict.fromkeys(files, max_bytes)
        here = {self._here(path): limit for path, limit in limits.items()}
        super().pull({self._here(path): target for path, target in files.items()}, max_bytes=here)

    def shell_argv(self, words: Sequence[str], *, terminal: bool) -> tuple[list[str], dict[str, str]]:
        """Raise UsageError: see Transport."""
        return Transport.shell_argv(self, words, terminal=terminal)

    def become_root(self) -> None:
        """Answer `id` with 0 from now on."""
        self._note("root")
        (self._folder / "answers/id").write_text("0\n")

    def root_refusal(self) -> str:
        """Return nothing: see Transport."""
        return ""

    def reconnect(self) -> None:
        """Note it."""
        self._note("reconnect")

    def restart(self) -> None:
        """Note it."""
        self._note("restart")

    def reboot(self) -> None:
        """Note it."""
        self._note("reboot")

    def _here(self, path: PurePosixPath) -> PurePosixPath:
        if not path.is_absolute() or ".." in path.parts:
            raise DeviceError(self.serial, f"{path} cannot be a path on a device: absolute, without '..'")
        return PurePosixPath(self._folder, "files", path.relative_to("/"))

    def _note(self, what: str) -> None:
        if not self._folder.is_dir():
            raise DeviceGoneError(self.serial, f"there is no folder {self._folder}")
        with (self._folder / "asked").open("a", encoding="utf-8") as file:
            file.write(f"{what}\n")


class StubProcess(Process):
    """A program that has printed its answer and ended: see Process."""

    def __init__(self, answer: bytes | None) -> None:
        super().__init__()
        self._output = Output(answer or b"", b"", 127 if answer is None else 0)

    def receive(self, timeout_s: float) -> Output:
        """Return the answer, once."""
        del timeout_s
        output, self._output = self._output, Output(b"", b"", self._output.code)
        return output

    def close(self) -> None:
        """See Process."""

    def _send(self) -> None:
        """Lose it, as a program that has ended does."""
