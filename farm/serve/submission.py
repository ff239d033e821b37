"""Submission of runs by users: options of `farm run` that the server takes, uploaded suites, and the id of the run."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from farm.base.config.settings import Config
from farm.base.errors import ArtifactLostError, ExitCode, InfraError, NoDeviceError, UsageError
from farm.base.files import published, withdraw
from farm.base.forms import is_run_id
from farm.base.paths import is_path
from farm.base.text import one_line

logger = logging.getLogger(__name__)

MOST_BYTES = 32 << 20
"""Largest archive of a suite."""
_FLAGS = frozenset({"--heap", "--exitfirst", "--last-failed", "--failed-first", "--wait-for-hosts"})
RUN_OPTIONS = _FLAGS | {
    "--backend", "--precision", "--device", "--label", "--max-devices", "--toolchain", "--purpose", "--option",
    "--profile", "--maxfail", "--changed-since", "--shard", "--budget", "--iterations", "--warm-up", "--seconds",
    "--timeout",
}  # fmt: skip
"""Options of `farm run` that a user may give to a run on the server: none names a file."""
# Planning and uploading take seconds; a longer command goes on, and its run appears in the list.
_SUBMIT_S = 45.0
# Lock of uploads: a second upload could remove a suite whose new use is not noted yet.
_UPLOADING = threading.Lock()
_MOST_FILES = 20_000
_MOST_KEPT_BYTES = 1 << 30
_UPLOAD = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)@([0-9a-f]{64})")
_UPLOADED = re.compile(r"[^\s='\"]*/serve/suites/[0-9a-f]{16}/[^/\s]+@[0-9a-f]{64}/suites/")
# A run that is resumed needs its suite again.
_KEPT_S = 90 * 86_400


def checked(options: Iterable[str]) -> list[str]:
    """Return the options of a run. Raises UsageError for an option that the server refuses."""
    found, toolchains = list(options), 0
    for word in found:
        name, equals, value = word.partition("=")
        if name not in RUN_OPTIONS:
            raise UsageError(f"options: {name[:40]!r}: expected {', '.join(sorted(RUN_OPTIONS))}")
        # A word without its value would take the next word as one.
        if (is_flag := name in _FLAGS) in (bool(equals), bool(value)):
            raise UsageError(f"options: {word[:60]!r}: expected {name if is_flag else f'{name}=VALUE'}")
        toolchains += name == "--toolchain"
        if toolchains > 1:
            raise UsageError("options: --toolchain: a run has one toolchain: start a run for each")
        if is_path(value) and name != "--shard":
            raise UsageError(f"options: {word[:60]!r}: names a path, which would be the server's: upload the suite")
    return found


def keep_suite(config: Config, user: str, name: str, content: bytes) -> str:
    """Unpack the archive of a suite and return its name for a run, `NAME@SHA256`.

    The suite's code is read and not executed: build hosts execute it. Suites that no run has used for 90 days are
    removed, and the oldest ones of a user with more than 1 GiB. Raises UsageError for an archive without that suite, or
    with files elsewhere, InfraError for a server without space.
    """
    from farm.store.objects.archive import unpack
    from farm.suites.manifests import load_suite

    found = f"{name}@{hashlib.sha256(content).hexdigest()}"
    if not _UPLOAD.fullmatch(found):
        raise UsageError(f"name: {name[:60]!r}: expected the name of a suite")

    def fill(folder: Path) -> None:
        archive = folder / ".archive"
        archive.write_bytes(content)
        unpack(archive, folder, _MOST_FILES)
        archive.unlink()
        root = folder.resolve() / "suites"
        try:
            load_suite(root / name / "suite.toml", inside=root)
        except UsageError as error:
            # Users may not see folders of the server.
            raise UsageError(str(error).replace(f"{root}/", "")) from None

    own = _own(config, user)
    try:
        with _UPLOADING:
            os.utime(published(own / found, fill))
            _remove_old(config.uploads_folder, own / found)
    except ArtifactLostError as error:
        raise UsageError(str(error)) from None
    except InfraError as error:
        # Users may not see folders of the server.
        logger.warning("upload of %s by %s: %s", name, user, error)
        raise InfraError("the server cannot keep the suite: its operator finds the reason in its log") from None
    return found


def _remove_old(uploads: Path, newest: Path) -> None:
    """Remove suites without a use in 90 days, and the oldest ones of a user with more than the most bytes."""
    # Locks, and folders of a killed server, have longer names.
    found = [folder for folder in uploads.glob("*/*@*") if _UPLOAD.fullmatch(folder.name)]
    used = [(folder.stat().st_mtime, folder) for folder in found]
    left, oldest = _MOST_KEPT_BYTES, time.time() - _KEPT_S
    for used_s, folder in sorted(used, reverse=True):
        is_own = folder.parent == newest.parent
        left -= sum(path.stat().st_size for path in folder.rglob("*")) if is_own else 0
        if used_s < oldest or (left < 0 and is_own and folder != newest):
            withdraw(folder)


def folder_of(config: Config, user: str, upload: str) -> Path:
    """Return the folder of a suite that a user has uploaded, `NAME@SHA256`. Raises UsageError."""
    known, root = _UPLOAD.fullmatch(upload), _own(config, user) / upload
    if known is None or not root.is_dir():
        raise UsageError(f"suite: {upload[:100]!r}: is not on the server: upload it")
    os.utime(root)
    return root / "suites" / known[1]


def run_id_of(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the id of the run that a command submits; empty for a command that takes longer.

    Raises UsageError or NoDeviceError with the last line of a command that failed.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(_SUBMIT_S)
        lines = log.read_text("utf-8", "replace").splitlines()
        last = one_line(lines[-1], 1000) if lines else ""
        if code == 0 and is_run_id(last):
            return last
        # Other codes are results, of a resumed run without missing jobs.
        if code not in (ExitCode.PASSED, ExitCode.FAILED, ExitCode.REGRESSION):
            problem = without_folders(last.removeprefix("farm: ")) or f"farm ended with exit code {code}"
            raise (UsageError if code in (ExitCode.USAGE, ExitCode.NOTHING) else NoDeviceError)(problem)
    return ""


def without_folders(text: str) -> str:
    """Return a text with uploaded suites named as a user names them, without folders of the server."""
    return _UPLOADED.sub("", text)


def _own(config: Config, user: str) -> Path:
    # A name of OpenID may have any characters.
    return config.uploads_folder / hashlib.sha256(user.encode()).hexdigest()[:16]
