"""Ctrl-C at any moment of a write: the transaction is whole, and the next write does not wait for it."""

from __future__ import annotations

import gc
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from sqlalchemy import text

from farm.store import database
from farm.store.database import Database

LIBRARIES = ("/farm/store/", "/sqlalchemy/")
STEPS = 7
"""Lines of the store between two moments at which the test sends Ctrl-C."""


class Interrupted:
    """Raises SIGINT before the line of a number, among the lines of SQLAlchemy and the store."""

    def __init__(self, line: int) -> None:
        self._left = line

    def __enter__(self) -> None:
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not any(name in frame.f_code.co_filename for name in LIBRARIES):
            return None
        if event == "line":
            self._left -= 1
            if self._left == 0:
                signal.raise_signal(signal.SIGINT)
        return self._trace

    @property
    def came(self) -> bool:
        """True once the line of that number was reached."""
        return self._left <= 0


def test_a_write_after_ctrl_c_waits_for_no_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`farm debug` records the end of its run in the process whose write was interrupted, as this test does."""
    monkeypatch.setattr(database, "PATIENCE_S", 0.0)
    store = Database(tmp_path / "farm.db")
    store.write(lambda connection: connection.execute(text("CREATE TABLE seen (line INTEGER)")))
    line, heard = 1, 0
    kept: list[BaseException] = []
    gc.disable()
    try:
        while True:
            interrupted = Interrupted(line)
            try:
                with interrupted:
                    store.write(lambda connection: connection.execute(text("SELECT 1")))
            except KeyboardInterrupt as error:
                kept.append(error)  # as long as a traceback lives, so does the connection in it
                heard += 1
            if not interrupted.came:
                break
            store.write(lambda connection: connection.execute(text("INSERT INTO seen VALUES (1)")))
            kept.clear()
            line += STEPS
    finally:
        gc.enable()
        store.close()
    assert heard > 10
