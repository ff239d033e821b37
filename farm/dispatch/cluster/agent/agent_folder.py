"""Folder of an agent on its host: it belongs to one process at a time, and outlives that process."""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING, Self

from farm.base.atomic import write_atomically
from farm.base.errors import AgentRefusedError, InfraError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from farm.store.cluster.records import AgentId

_RETRY_SECONDS = 1.0


class AgentFolder:
    """Folder of an agent, locked from start to end of its process; a context manager.

    Raises AgentRefusedError if another process has the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.previous_token = ""
        """Token of the previous process of this agent, if it ended without `remove_token`."""

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise InfraError(f"{self.path}: {error.strerror}: an agent keeps there what is not recorded yet") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise AgentRefusedError(
                f"an agent {self.path.name} runs on this host already: "
                "end that one, or give this one another name with '--name'"
            ) from None
        if self._token.exists():
            self.previous_token = self._token.read_text()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def write_token(self, token: str) -> None:
        """Write the token of this process for the next one. Raises OSError."""
        write_atomically(self._token, token, mode=0o600, durable=True)

    def remove_token(self) -> None:
        """Remove the token: the store has the end of this process."""
        self._token.unlink(missing_ok=True)

    @property
    def _token(self) -> Path:
        return self.path / "token"


def register_when_free(register: Callable[[], AgentId], ttl_s: float, ending: threading.Event) -> AgentId:
    """Return the result of `register`, called again until a dead agent of the same name has expired in the store.

    Needed on a host that lost its folder, or took over the name of another. Raises AgentRefusedError if that agent
    lives on.
    """
    # The database may have started a moment ago: agents expire only after it has been up for a lease duration.
    deadline = time.monotonic() + 2 * ttl_s + _RETRY_SECONDS
    while True:
        try:
            return register()
        except AgentRefusedError as error:
            if not error.may_pass or time.monotonic() > deadline or ending.wait(_RETRY_SECONDS):
                raise
