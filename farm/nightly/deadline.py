"""A limit for all of a conversation with a server: the timeout of a socket is one for each of its packets."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")


def within(seconds: float, action: Callable[[], _T]) -> _T:
    """Return what `action` returns, or raise what it raises; TimeoutError when that takes longer than `seconds`.

    A name that is being looked up cannot be interrupted, nor can a TLS handshake: the action goes on in a thread that
    ends with the process, and nothing of what it finds out is used.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - raised again, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="notification")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]
