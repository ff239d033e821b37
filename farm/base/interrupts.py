"""What Ctrl-C and other signals that ask a command to end do to it."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended."""

_SAYING_SECONDS = 5.0
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class InterruptHandler:
    """Handles Ctrl-C while a command works: it stops at once, unless there is something to let finish first.

    SIGTERM, and a terminal that closes, stop at once, as a second Ctrl-C does: by KeyboardInterrupt, with everything
    put away. With `term`, SIGTERM is handled as Ctrl-C is, for what a service manager stops.
    """

    def __init__(self, *, term: bool = False) -> None:
        self._soft = (signal.SIGINT, signal.SIGTERM) if term else (signal.SIGINT,)
        self._kept: dict[int, Any] = {}
        self._finish: Callable[[], None] | None = None
        self._heard: SimpleQueue[bool] = SimpleQueue()
        self.was_interrupted = False
        """Ctrl-C came, and what ran was let finish."""

    @contextmanager
    def finishing(self, finish: Callable[[], None], say: Callable[[], None]) -> Iterator[None]:
        """Let the first Ctrl-C call `finish`, which may only set a flag, while the body works.

        `say` is called then as well, in another thread: what was interrupted may hold the locks that it waits for.
        """
        heard = self._heard = SimpleQueue()
        # Not begun by the handler, in the middle of whatever this thread does.

        def speak() -> None:
            if heard.get():
                say()

        speaker = threading.Thread(target=speak, name="ctrl-c", daemon=True)
        speaker.start()
        self._finish = finish
        try:
            yield
        finally:
            self._finish = None
            heard.put(False)
            speaker.join(_SAYING_SECONDS)

    def __enter__(self) -> InterruptHandler:
        if threading.current_thread() is threading.main_thread():
            # What nohup ignores stays ignored.
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
        self._heard.put(True)


@contextmanager
def postponed(wanted: bool) -> Iterator[None]:
    """Handle signals that ask to end after the body, a short transaction; at once where that is not `wanted`.

    An exception in the middle of a library's own clean-up would leave a transaction open in a connection without
    references, and the next write of this process would wait for that.
    """
    came: list[tuple[int, FrameType | None]] = []
    kept: dict[int, Any] = {}
    number: int
    if wanted and threading.current_thread() is threading.main_thread():
        for number in _ENDING:
            if callable(handler := signal.getsignal(number)):
                kept[number] = handler
                signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for number, frame in came:
            kept[number](number, frame)


def handling(outer: InterruptHandler | None) -> AbstractContextManager[InterruptHandler]:
    """Return `outer`, the handler of a command that this is a part of, which goes on, or else a new one."""
    return InterruptHandler() if outer is None else nullcontext(outer)
