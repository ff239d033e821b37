"""`farm run --watch`: after a save the affected jobs are compiled and run again, until Ctrl-C.

All jobs run once. Later a job runs again if its bundle would differ, or if its last attempt was infra. An edit that
concerns no bundle runs no job.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.errors import FarmError
from farm.base.hashes import tree_files
from farm.builds.bundles.cache import BundleCache
from farm.builds.bundles.key import forget_sources
from farm.builds.bundles.reuse import find_bundles_for
from farm.builds.toolchains.selection import look_into, prepare, use_toolchain
from farm.dispatch.request.choose import jobs_of, select
from farm.report.model.format import first_of
from farm.results.attempt import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from contextlib import AbstractContextManager

    from farm.base.config.settings import Config
    from farm.dispatch.dispatcher import ProgressListener
    from farm.dispatch.request.request import RunOutcome, RunRequest

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
# An editor may save several files, and a checkout of another branch takes its time.
_SETTLED_S = 0.2
_MOST_NAMED = 3
_Files = dict[Path, dict[str, str]]


class Watch:
    """Runs the jobs of a request, and changed ones again."""

    def __init__(self, config: Config, request: RunRequest, run: Callable[..., RunOutcome]) -> None:
        """Take `run`, the function of `farm.dispatch.run.run` or one with equal arguments."""
        self._config, self._request, self._run = config, request, run
        self._keys: dict[str, str] = {}
        """Keys of judged bundles by job id."""
        self._folders: tuple[Path, ...] = ()

    def rounds(
        self, front: Callable[[], AbstractContextManager[ProgressListener]], after: Callable[[RunOutcome], None]
    ) -> None:
        """Run, wait for a change, and so on, until KeyboardInterrupt; `after` gets what every run came to."""
        while True:
            before = self._look(self._folders)
            try:
                folders, keys, cached = self._now()
                if folders != self._folders:
                    self._folders = folders
                    before = self._look(folders)
                self._round(keys, cached, front, after)
            except FarmError as error:
                if not self._folders:
                    raise
                logger.warning("%s", error)
            self._wait(before)

    def _now(self) -> tuple[tuple[Path, ...], dict[str, str], set[str]]:
        """Return the folders that count, the key of every job's bundle by its id, and those keys that are cached."""
        forget_sources()
        config = use_toolchain(self._config, self._request.toolchain)
        jobs = select(self._request, jobs_of(config, self._request))
        tools = prepare(config, virtual=self._request.virtual > 0)
        found = find_bundles_for(jobs, tools, BundleCache(config.cache_dir))
        developed = [Path(root.folder) for root in tools.compiler.developed]
        package = look_into(config, config.toolchain).folder("executorch")
        of_suites = sorted({Path(job.case.folder) for job in jobs if job.case.folder})
        folders = [*developed, *([package] if package is not None else []), *of_suites]
        keys = {job_id: one.key for job_id, one in found.items()}
        return tuple(dict.fromkeys(folders)), keys, {one.key for one in found.values() if one.cached}

    def _round(
        self,
        keys: Mapping[str, str],
        cached: set[str],
        front: Callable[[], AbstractContextManager[ProgressListener]],
        after: Callable[[RunOutcome], None],
    ) -> None:
        wanted = [job_id for job_id, key in keys.items() if self._keys.get(job_id) != key]
        if not wanted:
            logger.info("none of %s jobs is concerned", len(keys))
            return
        lacking = len({keys[job_id] for job_id in wanted} - cached)
        if self._keys:
            names = first_of(wanted, _MOST_NAMED)
            logger.info(
                "%s of %s jobs are concerned, %s bundles to compile: %s", len(wanted), len(keys), lacking, names
            )
        with front() as listener:
            outcome = self._run(self._config, self._request, listener, only=wanted)
        for view in outcome.view.jobs:
            # Infra attempts run again with the next change.
            if view.decisive is not None and view.decisive.verdict is not Verdict.INFRA and view.id in keys:
                self._keys[view.id] = keys[view.id]
        after(outcome)

    def _look(self, folders: Iterable[Path]) -> _Files:
        found = {}
        for folder in folders:
            try:
                found[folder] = tree_files(self._config.cache_dir, folder)
            except (OSError, FarmError):
                # A folder under replacement counts as changed.
                found[folder] = {}
        return found

    def _wait(self, before: _Files) -> None:
        """Return when something has changed since `before` was seen, and nothing more does."""
        logger.info("waiting for a change, until Ctrl-C")
        now = self._look(before)
        while now == before:
            time.sleep(_LOOK_EVERY_S)
            now = self._look(before)
        while True:
            time.sleep(_SETTLED_S)
            settled = self._look(before)
            if settled == now:
                break
            now = settled
        names = [
            name
            for folder, files in now.items()
            for name in sorted(files.keys() | before[folder].keys())
            if files.get(name) != before[folder].get(name)
        ]
        logger.info("changed: %s", first_of(names, _MOST_NAMED))
