"""Which files of an execution are kept with its attempt, as artifacts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from farm.errors import FarmError
from farm.execution.raw import ETDUMP_FILE
from farm.results.attempt import Verdict
from farm.results.profile.etdump import ETDUMP_LIMIT
from farm.results.text import one_line
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord
from farm.suites.socs import find_soc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from farm.bundles.bundle import Bundle
    from farm.execution.session import DeviceSession
    from farm.request.plan import PlannedJob, RunPlan
    from farm.results.attempt import Attempt


class AttemptArtifacts:
    """What one worker does with the files of its executions."""

    def __init__(self, plan: RunPlan, session: Callable[[], DeviceSession]) -> None:
        self._profile, self._optrace, self._session = plan.profile, plan.optrace, session
        self._store = ArtifactStore(plan.artifact_root)

    def keep(
        self, attempt: Attempt, planned: PlannedJob, bundle: Bundle, folder: Path
    ) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        """Keep what the run wants of `folder`, and return the attempt, with a note on what could not be had.

        For a job that passed, that includes the SDK's timeline, where the run wants one. What goes wrong here changes
        no verdict.
        """
        kept = []
        etdump = folder / ETDUMP_FILE
        try:
            # What is greater is refused by whoever reads it.
            if self._profile.kept and etdump.is_file() and etdump.stat().st_size <= ETDUMP_LIMIT:
                kept.append(self._put("etdump", etdump))
        except (FarmError, OSError) as error:
            attempt = _noted(attempt, f"the ETDump is not kept: {error}")
        if self._optrace is not None and attempt.verdict is Verdict.PASSED:
            from farm.execution.optrace import collect_optrace

            soc = find_soc(planned.job.target.soc)
            try:
                files = collect_optrace(self._session(), bundle, soc, self._optrace, folder / "optrace")
                kept += [self._put(kind, path) for kind, path in files.items()]
            except (FarmError, OSError) as error:
                attempt = _noted(attempt, f"no optrace: {error}")
        return attempt, tuple(kept)

    def keep_crash_logs(self, files: Mapping[str, Path]) -> tuple[ArtifactRecord, ...]:
        """Keep what a device's logs say of a crash, by kind; what cannot be kept is left out."""
        kept = []
        for kind, path in files.items():
            with contextlib.suppress(FarmError, OSError):
                kept.append(self._put(kind, path))
        return tuple(kept)

    def _put(self, kind: str, path: Path) -> ArtifactRecord:
        return ArtifactRecord(self._store.put(path), path.stat().st_size, kind)


def _noted(attempt: Attempt, note: str) -> Attempt:
    return msgspec.structs.replace(attempt, notes=(*attempt.notes, one_line(note)))
