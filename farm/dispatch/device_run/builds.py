"""How builds and workers meet: the controller leaves one file for every build that ended, workers wait for theirs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from farm.base.atomic import write_atomically
from farm.builds.compile.protocol import BuildReply

# A build takes seconds; looking 50 times a second costs nothing that can be measured.
_POLL_SECONDS = 0.02


def builds_folder(run_folder: Path) -> Path:
    """Return where the replies of a run are."""
    return run_folder / "builds"


def leave_reply(run_folder: Path, reply: BuildReply) -> None:
    """Tell the workers that a build ended."""
    write_atomically(_reply_file(run_folder, reply.key), msgspec.json.encode(reply))


def has_reply(run_folder: Path, key: str) -> bool:
    """Tell whether the build of `key` has ended."""
    return _reply_file(run_folder, key).exists()


def read_reply(run_folder: Path, key: str) -> BuildReply:
    """Return the reply for `key`. Raises FileNotFoundError before it is there."""
    return msgspec.json.decode(_reply_file(run_folder, key).read_bytes(), type=BuildReply)


def await_reply(run_folder: Path, key: str, stop: Callable[[], bool]) -> BuildReply | None:
    """Return the reply for `key` once it is there; None when `stop` returns True before."""
    while True:
        try:
            return read_reply(run_folder, key)
        except FileNotFoundError:
            if stop():
                return None
            time.sleep(_POLL_SECONDS)


def _reply_file(run_folder: Path, key: str) -> Path:
    return builds_folder(run_folder) / f"{key}.json"
