"""Handling of Ctrl-C, SIGTERM and SIGHUP in a command, and of threads that an exception ends."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from queue import SimpleQueue
from types import FrameType
from typing import Any

from farm.base.errors import ExitCode

logger = logging.getLogger(__name__)

INTERRUPTED = ExitCode.INTERRUPTED
"""Exit code of a command that Ctrl-C ended."""

_LOGGING_SECONDS = 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptHandler:
    """Handler of Ctrl-C: a command stops at once, unless it has work to finish first.

    SIGTERM and a closing terminal stop it at once, as a second Ctrl-C does: by KeyboardInterrupt, with all clean-up.
    With `term`, SIGTERM acts as Ctrl-C does, for commands of a service manager.
    """

    def __init__(self, *, term: bool = False) -> None:
        self._soft = (signal.SIGINT, signal.SIGTERM) if term else (signal.SIGINT,)
        self._kept: dict[int, Any] = {}
        self._finish: Callable[[], None] | None = None
        self._signalled: SimpleQueue[bool] = SimpleQueue()
        self.was_interrupted = False
        """Ctrl-C came, and what ran was let finish."""

    @contextmanager
    def finishing(self, finish: Callable[[], None], *lines: str) -> Iterator[None]:
        """Let the first Ctrl-C call `finish`, which may only set a flag, while the body works.

        `lines` are logged then, in another thread, because the interrupted code may hold the locks of the display.
        """
        signalled = self._signalled = SimpleQueue()
        # The thread exists before, because a handler runs in the middle of this thread's code.

        def log_lines() -> None:
            if signalled.get():
                for line in lines:
                    logger.info(line)

        logging_thread = threading.Thread(target=log_lines, name="ctrl-c", daemon=True)
        logging_thread.start()
        self._finish = finish
        try:
            yield
        finally:
            self._finish = None
            signalled.put(False)
            logging_thread.join(_LOGGING_SECONDS)

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            # Signals that nohup ignores stay ignored.
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    handler = self._interrupted if number in self._soft else signal.default_int_handler
                    self._kept[number] = signal.signal(number, handler)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._finish is None or self.was_interrupted:
            signal.default_int_handler(number, frame)
        self.was_interrupted = True
        if self._finish is not None:
            self._finish()
        # Python's documentation: may be called in the middle of itself.
        self._signalled.put(True)


@contextmanager
def postponed(wanted: bool) -> Iterator[None]:
    """Handle signals that ask to end after the body, a short transaction; at once where that is not `wanted`.

    An exception in the middle of a library's own clean-up would leave a transaction open in a connection without
    references, and the next write of this process would wait for that.
    """
    received: list[tuple[int, FrameType | None]] = []
    kept: dict[int, Any] = {}
    number: int
    if wanted and threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if callable(handler := signal.getsignal(number)):
                kept[number] = handler
                signal.signal(number, lambda number, frame: received.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for number, frame in received:
            kept[number](number, frame)


def handling(outer: InterruptHandler | None) -> AbstractContextManager[InterruptHandler]:
    """Return `outer`, the handler of a command that this is a part of, which goes on, or else a new one."""
    return InterruptHandler() if outer is None else nullcontext(outer)


# Threads that an exception ends: the rest of the process goes on without their work, unless it takes notice.


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
