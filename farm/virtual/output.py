"""What a command on a virtual device writes and how it ends, or what a fault makes of that."""

from __future__ import annotations

import asyncio
import re
import signal
from typing import TYPE_CHECKING

from farm.virtual.faults import CONDITIONS, LINK_KINDS, FaultKind
from farm.virtual.streams import StreamClosedError

if TYPE_CHECKING:
    from farm.virtual.command import Command
    from farm.virtual.faults import Fault
    from farm.virtual.injection import Injection

# How a runner that takes jobs is called, and what is in its answer to one: docs/native_runner.md.
_SESSION = re.compile(r"(?<![\w-])--serve(?![\w-])")
_ANSWER = b'"job"'

_ENDLESS_BYTES = 64 * 1024


class Output:
    """The outputs of one command."""

    def __init__(self, command: Command, faults: Injection, text: str, fault: Fault | None) -> None:
        """`text` is what the shell was given; `fault` strikes the command as a whole."""
        self._command, self._faults, self._text = command, faults, text
        self._is_session = _SESSION.search(text) is not None
        self._fault = fault
        self._left = fault.after_bytes if fault is not None else 0

    async def read(self, number: int) -> bytes:
        """Return what comes next from a descriptor, empty at its end. Raises StreamClosedError to hang up."""
        is_stdout = number == self._command.stdout
        if is_stdout and self._has(FaultKind.ENDLESS_OUTPUT):
            return self._repeated()
        if self._has(FaultKind.PARTIAL_OUTPUT):
            return await self._part(number)
        data = await self._command.read(number)
        if is_stdout and self._is_session and self._faults.armed and _ANSWER in data:
            return await self._answer(data)
        return data

    async def wait(self) -> int:
        """Return the exit code. Raises StreamClosedError to hang up instead."""
        code = await self._command.wait()
        if self._has(FaultKind.PARTIAL_OUTPUT):
            raise StreamClosedError
        if self._fault is not None and self._has(FaultKind.EXIT_CODE):
            return self._fault.code or 1
        return code

    def last_words(self) -> bytes:
        """Return what a fault says on standard error before the end."""
        return self._fault.text.encode() if self._fault is not None and self._has(FaultKind.EXIT_CODE) else b""

    def _has(self, kind: FaultKind) -> bool:
        return self._fault is not None and self._fault.kind == kind

    def _repeated(self) -> bytes:
        text = (self._fault.text if self._fault is not None else "").encode() or b"y\n"
        return text * max(1, _ENDLESS_BYTES // len(text))

    async def _part(self, number: int) -> bytes:
        if not self._left:
            raise StreamClosedError
        data = (await self._command.read(number))[: self._left]
        self._left -= len(data)
        return data

    async def _answer(self, data: bytes) -> bytes:
        """Return what reaches the host of a runner's answer to a job."""
        fault = self._faults.strike("answer", self._text)
        if fault is None:
            return data
        kind = FaultKind(fault.kind)
        if kind in LINK_KINDS or kind in CONDITIONS:
            await self._faults.hit(fault)
            return data
        if kind is FaultKind.WRONG_NUMBERS:
            self._faults.spoil_outputs(fault.after_bytes)
            return data
        if kind is FaultKind.HANG_RUNNER:
            self._command.signal(signal.SIGSTOP)
            await asyncio.Event().wait()
        self._fault = fault
        start = data.rfind(b"\n", 0, data.index(_ANSWER)) + 1
        before, answer = data[:start], data[start:]
        if kind is FaultKind.PARTIAL_OUTPUT:
            # Whatever it says: the answer is not whole.
            self._left = 0
            before += answer[: min(fault.after_bytes, len(answer) // 2)]
        elif kind in (FaultKind.KILL_RUNNER, FaultKind.EXIT_CODE):
            self._command.signal(fault.code if fault.code and kind is FaultKind.KILL_RUNNER else signal.SIGKILL)
        return before or await self.read(self._command.stdout)
