"""Log records of farm: where they are shown, at which level and in which form.

Modules log with `logging.getLogger(__name__)`. Records may have the fields `run`, `job`, `device` and `agent`, given by
`extra`. Text of a device or a user is made visible by the formatters. systemd's own Python package needs libsystemd,
and its units start farm with `Type=exec`, which expects no notification.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farm.base.errors import UnknownNameError, UsageError
from farm.base.text import one_line, visible

VARIABLE = "FARM_LOG"
FIELDS = ("agent", "run", "job", "device")
LEVELS = ("debug", "info", "warning", "error")
FILE_BYTES, OLDER_FILES = 1 << 20, 2
"""Size of a log file, and how many full ones are kept beside it."""
_LOG = logging.getLogger("farm")


class RecordHandler(logging.Handler):
    """Handler that passes each record, as one line, to `show`."""

    def __init__(self, show: Callable[[str], object], formatter: logging.Formatter | None = None) -> None:
        super().__init__()
        self._show = show
        self.setFormatter(formatter or LineFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        try:
            self._show(self.format(record))
        except Exception:  # noqa: BLE001 - a full disk ends no command
            self.handleError(record)


class LineFormatter(logging.Formatter):
    """Message of a record on one line; with `time_format`, the local time in front of it."""

    def __init__(self, time_format: str = "") -> None:
        super().__init__(datefmt=time_format)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = one_line(super().format(record))
        return f"{self.formatTime(record, self.datefmt)} {line}" if self.datefmt else line


class JournalFormatter(LineFormatter):
    """Message of a record on one line, with its priority as systemd-journald reads it (sd-daemon(3))."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        priority = 3 if record.levelno >= logging.ERROR else 4 if record.levelno >= logging.WARNING else 6
        return f"<{7 if record.levelno < logging.INFO else priority}>{super().format(record)}"


class JsonFormatter(logging.Formatter):
    """JSON object of a record: time, level, logger, fields and message."""

    def __init__(self, **fields: str) -> None:
        """Add `fields` to every record."""
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        """Return the object on one line."""
        import json
        from datetime import UTC, datetime

        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"time": time, "level": record.levelname.lower(), "logger": record.name, **self._fields}
        own = {name: str(value) for name in FIELDS if (value := getattr(record, name, None)) is not None}
        shown = {name: visible(text) for name, text in {**head, **own, "message": super().format(record)}.items()}
        return json.dumps(shown, ensure_ascii=False)


def begin_logging(handler: RecordHandler, *, verbose: bool = False) -> None:
    """Show records of farm by `handler`, at the levels of FARM_LOG; without it at info, at debug with `verbose`.

    Raises UsageError for levels that do not exist.
    """
    levels = {"farm": "debug" if verbose else "info", **levels_of(os.environ.get(VARIABLE, ""))}
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level.upper())
    _replace(handler)


def _replace(handler: logging.Handler) -> None:
    """Show records by `handler` alone; files of `logged_to` go on."""
    _LOG.handlers[:] = [*(one for one in _LOG.handlers if not isinstance(one, RecordHandler)), handler]


def levels_of(text: str) -> dict[str, str]:
    """Return the levels by logger in `LEVEL` or `farm.MODULE=LEVEL`, separated by commas. Raises UsageError."""
    levels, root = {}, Path(__file__).parents[2]
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, mark, level = part.rpartition("=")
        name = name if mark else "farm"
        module = root.joinpath(*name.split("."))
        if level.lower() not in LEVELS:
            raise UsageError(f"{VARIABLE}: {UnknownNameError('level', level, LEVELS)}")
        if name.partition(".")[0] != "farm" or not (module.is_dir() or module.with_suffix(".py").is_file()):
            raise UsageError(f"{VARIABLE}: {one_line(name)}: expected a module of farm, such as farm.dispatch.cluster")
        levels[name] = level.lower()
    return levels


def is_journal(descriptor: int) -> bool:
    """Return whether `descriptor` is the journal's stream, by JOURNAL_STREAM (systemd.exec(5))."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


@contextmanager
def logged_to(path: Path, formatter: logging.Formatter) -> Iterator[None]:
    """Write records of farm to `path` as well, which is bounded, within the body. A full disk loses records."""
    from logging.handlers import RotatingFileHandler

    class FileHandler(RotatingFileHandler):
        def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the name of `logging`
            del record

    handler = FileHandler(path, maxBytes=FILE_BYTES, backupCount=OLDER_FILES, encoding="utf-8", delay=True)
    handler.setFormatter(formatter)
    _LOG.addHandler(handler)
    try:
        yield
    finally:
        _LOG.removeHandler(handler)
        with suppress(OSError):
            handler.close()


@contextmanager
def shown_by(show: Callable[[str], object]) -> Iterator[None]:
    """Let `show` have the lines that the command would print, within the body."""
    former = list(_LOG.handlers)
    _replace(RecordHandler(show))
    try:
        yield
    finally:
        _LOG.handlers[:] = former


@contextmanager
def only_warnings() -> Iterator[None]:
    """Drop records below a warning within the body, for steps that are no steps of the command."""
    level = _LOG.level
    _LOG.setLevel(max(level, logging.WARNING))
    try:
        yield
    finally:
        _LOG.setLevel(level)
