"""Errors of the place of a shared farm's files: retries while it is away, and then one clear error.

The import of tenacity would take 50 ms of each command, in place of a loop of 20 lines.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from farm.base.errors import ArtifactsError, DeviceError, DeviceGoneError, DeviceTimeoutError, FarmError
from farm.base.text import reason_line

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
_NOTED_AFTER_S = 1.0
# Errors that waiting does not end.
_FOR_GOOD = {errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


class PlaceRetry:
    """Retries of actions on a place, for a limited time."""

    def __init__(
        self,
        where: str,
        seconds: float,
        stop: threading.Event | None = None,
    ) -> None:
        """`where` names the place in errors. `stop` ends the wait, as if the time were over."""
        self._where, self._seconds, self._stop = where, seconds, stop or threading.Event()
        self._lock, self._is_noted = threading.Lock(), False

    def retry_while_away(self, action: Callable[[], _Answer]) -> _Answer:
        """Return the result of `action`, called again until the place can be reached.

        Raises ArtifactsError for a place that stays away or refuses, and all other errors of `action`.
        """
        began = time.monotonic()
        end, pause = began + self._seconds, _FIRST_PAUSE_S
        while True:
            try:
                answer = action()
            except Exception as error:
                problem, for_good = _explain(error)
                if not problem:
                    raise
                if for_good:
                    raise ArtifactsError(f"{self._where}: {problem}") from None
                if time.monotonic() + pause > end or self._stop.is_set():
                    waited = f" (tried for {self._seconds:g} s)" if self._seconds >= 1 else ""
                    raise ArtifactsError(f"{self._where}: {problem}{waited}: {_AWAY}") from None
            else:
                self._warn_once("")
                return answer
            if time.monotonic() - began > _NOTED_AFTER_S:
                self._warn_once(problem)
            self._stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _warn_once(self, problem: str) -> None:
        """Log that a place is away, once for all waiting threads, or that it is there again."""
        with self._lock:
            if self._is_noted == bool(problem):
                return
            self._is_noted = bool(problem)
        if problem:
            logger.warning("waiting for %s: %s", self._where, problem)
        else:
            logger.info("%s is there again", self._where)


_AWAY = "the place where the farm keeps its files is away, no device and no code is at fault"


def _explain(error: Exception) -> tuple[str, bool]:
    """Return the problem of the place, empty for other errors, and whether waiting is useless."""
    if isinstance(error, DeviceError):
        # Unknown host keys and refused logins are final; a gone or silent machine may return.
        return error.problem, not isinstance(error, DeviceGoneError | DeviceTimeoutError)
    if isinstance(error, FarmError):
        return (str(error), False) if type(error) is ArtifactsError else ("", True)
    name = type(error).__name__
    if name in _NO_CREDENTIALS:
        how = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or write them into ~/.aws/credentials"
        return f"no credentials for S3 are there ({name}): {how}", True
    if isinstance(error, PermissionError):
        return f"it refuses: {_text(error)}", True
    if isinstance(error, OSError):
        return _text(error), error.errno in _FOR_GOOD
    is_theirs = isinstance(error, EOFError) or type(error).__module__.partition(".")[0] in _LIBRARIES
    return (_text(error), False) if is_theirs else ("", True)


_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError")
_LIBRARIES = ("paramiko", "botocore", "aiobotocore", "aiohttp", "fsspec", "s3fs", "asyncio")


def _text(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return reason_line(str(text))
