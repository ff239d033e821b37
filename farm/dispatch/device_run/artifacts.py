"""Choice of an execution's files that are kept with its attempt as artifacts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError
from farm.base.socs import find_soc
from farm.base.text import reason_line
from farm.builds.bundles.bundle import MANIFEST, Bundle
from farm.devices.execution.liveness import collect_crash_logs
from farm.devices.execution.raw import ETDUMP_FILE
from farm.results.attempt import Attempt, Verdict
from farm.results.outcome import explain_by_logs
from farm.results.profile.etdump import ETDUMP_LIMIT
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from farm.base.config.runs import FailuresConfig
    from farm.devices.device import Device
    from farm.devices.execution.optrace import OptraceTools
    from farm.devices.execution.session import DeviceSession
    from farm.devices.transport import Transport
    from farm.dispatch.request.profiling import Profile

OUTPUT = "output:"
"""Prefix of the kind of an output's artifact; its file name follows."""
INPUT = "input:"
"""Prefix of the kind of an artifact that is an input, before its file name."""

_OUTPUTS = "output_*.raw"
# Most bytes of all outputs of an attempt: a hundred times the outputs of a segmentation network.
_OUTPUT_BYTES = 64 << 20
# Most bytes of a file that a command keeps by name: the layers of a network of a thousand.
_FILE_BYTES = 256 << 20


class FailedFiles:
    """Places for the inputs and outputs of failed attempts of one run, shared by its workers."""

    def __init__(self, limits: FailuresConfig, folder: Path) -> None:
        """`folder` has a file for each taken place."""
        self._limits, self._folder = limits, folder

    def refusal(self, size: int) -> str:
        """Return an empty text for files of `size` bytes that may be kept, which takes a place, else the reason."""
        most, places = self._limits.keep_mb, self._limits.keep_attempts
        if size > most << 20:
            return f"{-(-size >> 20)} MiB, at most {most} (failures.keep_mb in farm.toml)"
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in range(places):
            with contextlib.suppress(FileExistsError):
                (self._folder / str(number)).touch(exist_ok=False)
                return ""
        return f"{places} failed attempts have theirs (failures.keep_attempts in farm.toml)"

    def is_selected(self, attempt: Attempt) -> bool:
        """Return whether the files of an attempt are wanted: a failure without a known issue."""
        return bool(self._limits.keep_attempts) and attempt.verdict is Verdict.FAILED and not attempt.known_issue


@dataclass
class AttemptArtifacts:
    """Keeper of the files that a command selects from its executions. Errors here change no verdict."""

    root: Path
    """Folder of artifacts."""
    profile: Profile
    """Profiling level, which may want the ETDump."""
    outputs: bool = False
    optrace: OptraceTools | None = None
    """Tools for the SDK's timeline of attempts that passed."""
    failed: FailedFiles | None = None
    """Places for inputs and outputs of failed attempts."""

    def __post_init__(self) -> None:
        self._store = ArtifactStore(self.root)

    def keep(
        self, attempt: Attempt, bundle: Bundle, folder: Path, session: Callable[[], DeviceSession]
    ) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        """Keep the selected files of `folder`; return the attempt, with notes on missing ones."""
        notes, kept = list(attempt.notes), []
        wanted = self._wanted(folder, notes) | self._of_failure(attempt, bundle, folder, notes)
        for path, kind in wanted.items():
            try:
                kept.append(self._put(kind, path))
            except (FarmError, OSError) as error:
                notes.append(reason_line(f"{path.name} is not kept: {error}"))
        if self.optrace is not None and attempt.verdict is Verdict.PASSED:
            from farm.devices.execution.optrace import collect_optrace

            try:
                files = collect_optrace(
                    session(), bundle, find_soc(bundle.manifest.soc), self.optrace, folder / "optrace"
                )
                kept += [self._put(kind, path) for kind, path in files.items()]
            except (FarmError, OSError) as error:
                notes.append(reason_line(f"no optrace: {error}"))
        return msgspec.structs.replace(attempt, notes=tuple(notes)), tuple(kept)

    def keep_files(self, files: Mapping[str, Path | bytes]) -> tuple[tuple[ArtifactRecord, ...], tuple[str, ...]]:
        """Keep `files` by their kinds; return notes on files that could not be kept."""
        kept, notes = [], []
        for kind, content in files.items():
            try:
                size = len(content) if isinstance(content, bytes) else content.stat().st_size
                if size > _FILE_BYTES:
                    notes.append(f"{kind} is not kept: it has more than {_FILE_BYTES >> 20} MiB")
                    continue
                kept.append(ArtifactRecord(self._store.put(content), size, kind))
            except (FarmError, OSError) as error:
                notes.append(reason_line(f"{kind} is not kept: {error}"))
        return tuple(kept), tuple(notes)

    def keep_crash_logs(
        self, attempt: Attempt, transport: Transport, device: Device, folder: Path, *, since_s: float
    ) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        """Keep the device's logs of a crash, and return the attempt with the known trouble in them.

        Logs that cannot be kept are left out.
        """
        kept, texts = [], []
        for kind, path in collect_crash_logs(transport, device.os, folder, since=since_s).items():
            with contextlib.suppress(FarmError, OSError):
                texts.append(path.read_text(encoding="utf-8"))
                kept.append(self._put(kind, path))
        return explain_by_logs(attempt, texts), tuple(kept)

    def _wanted(self, folder: Path, notes: list[str]) -> dict[Path, str]:
        """Return the kinds of the files to keep; too large files are left out, with a note if requested."""
        wanted = {}
        outputs = sorted(folder.glob(_OUTPUTS)) if self.outputs else []
        if sum(path.stat().st_size for path in outputs) <= _OUTPUT_BYTES:
            wanted = {path: f"{OUTPUT}{path.name}" for path in outputs}
        else:
            notes.append(f"its outputs are not kept: they have more than {_OUTPUT_BYTES >> 20} MiB")
        etdump = folder / ETDUMP_FILE
        if self.profile.kept and etdump.is_file() and etdump.stat().st_size <= ETDUMP_LIMIT:
            wanted[etdump] = "etdump"
        return wanted

    def _of_failure(self, attempt: Attempt, bundle: Bundle, folder: Path, notes: list[str]) -> dict[Path, str]:
        """Return the kinds of the inputs and outputs to keep of a failed attempt, and of the manifest with shapes."""
        outputs = sorted(folder.glob(_OUTPUTS))
        if self.failed is None or not self.failed.is_selected(attempt) or not outputs:
            return {}
        files = {path: f"{OUTPUT}{path.name}" for path in outputs}
        for sample in range(bundle.manifest.samples):
            files |= {path: f"{INPUT}{path.name}" for path in bundle.input_files(sample)}
        try:
            problem = self.failed.refusal(sum(path.stat().st_size for path in files))
        except OSError as error:
            problem = str(error)
        if problem:
            notes.append(reason_line(f"inputs and outputs are not kept: {problem}"))
            return {}
        return files | {bundle.folder / MANIFEST: f"manifest:{MANIFEST}"}

    def _put(self, kind: str, path: Path) -> ArtifactRecord:
        return ArtifactRecord(self._store.put(path), path.stat().st_size, kind)


def kept_outputs(artifacts: Iterable[ArtifactRecord]) -> dict[str, str]:
    """Return the SHA-256 of the outputs among `artifacts` by their file names; of a name that comes twice the last."""
    return {one.kind.removeprefix(OUTPUT): one.sha256 for one in artifacts if one.kind.startswith(OUTPUT)}
