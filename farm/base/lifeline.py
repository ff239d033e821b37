"""Pipe by which the kernel kills a child after the end of its starter, also if other processes were killed with it.

Only the standard library: virtual devices use it, and start in a fifth of a second.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import weakref


class Lifeline:
    """A pipe between this process and one child; nothing is ever written to it.

    Any program can be the child: it inherits `child_end` and needs no code. When the last copy of our end is closed, as
    at every death of this process, the kernel signals the owner of the child's end: O_ASYNC, F_SETOWN and F_SETSIG of
    fcntl(2). Its share beside the reaper: docs/developers/architecture.md, "Processes".
    """

    def __init__(self) -> None:
        """Make the pipe. Raises OSError."""
        self.child_end, self._our_end = os.pipe()
        _lifelines.add(self)

    @property
    def our_end(self) -> int:
        """Descriptor for which poll(2) reports an error once no process holds the child's end; -1 if closed."""
        return self._our_end

    def tie(self, pid: int, *, group: bool) -> None:
        """Have the child that inherited `child_end`, or its whole process group, killed when this process is gone.

        A death between fork and this call goes unnoticed here.
        """
        # A child that is gone already, and waited for, owns nothing.
        with contextlib.suppress(ProcessLookupError):
            fcntl.fcntl(self.child_end, fcntl.F_SETOWN, -pid if group else pid)
            fcntl.fcntl(self.child_end, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(self.child_end, fcntl.F_SETFL, os.O_ASYNC)
        os.close(self.child_end)
        self.child_end = -1

    def cut(self) -> None:
        """Close both ends: the kernel kills the remaining processes of the child. May be called again."""
        self.let_go()
        if self.child_end >= 0:
            os.close(self.child_end)
            self.child_end = -1

    def let_go(self) -> None:
        """Close our end alone."""
        number, self._our_end = self._our_end, -1
        if number >= 0:
            os.close(number)


_lifelines: weakref.WeakSet[Lifeline] = weakref.WeakSet()


def _let_go_of_all() -> None:
    # A forked copy of this process has no children of ours, and may live on.
    for lifeline in list(_lifelines):
        lifeline.let_go()


os.register_at_fork(after_in_child=_let_go_of_all)
