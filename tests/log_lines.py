"""Lines that farm logs, for tests that assert them."""

from __future__ import annotations

import logging


class LogLines(list[str]):
    """Messages of farm, from level info on, until the test ends or `close`."""

    def __init__(self, logger: str = "farm") -> None:
        super().__init__()
        self._logger = logging.getLogger(logger)
        self._handler = _Appending(self)
        self._logger.addHandler(self._handler)
        logging.getLogger("farm").setLevel(logging.INFO)

    def close(self) -> None:
        self._logger.removeHandler(self._handler)


class _Appending(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())
