"""Threads that an exception ends: the rest of the process goes on without their work, unless it takes notice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noticing_deaths(died: Callable[[str], None]) -> Iterator[None]:
    """Call `died`, in the thread that ends, with the reason for each thread that an exception ends during the body.

    The traceback goes to standard error as before.
    """
    before = threading.excepthook

    def hook(facts: threading.ExceptHookArgs) -> None:
        before(facts)
        name = facts.thread.name if facts.thread is not None else "of a gone thread"
        died(f"the thread {name} failed: {facts.exc_type.__name__}: {facts.exc_value}")

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
