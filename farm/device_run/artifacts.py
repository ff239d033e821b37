"""Which files of an execution are kept with its attempt, as artifacts."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from farm.errors import FarmError
from farm.execution.crash_logs import collect_crash_logs
from farm.execution.raw import ETDUMP_FILE, RESULT_FILE
from farm.results.attempt import Verdict
from farm.results.dsp_trouble import explain_by_logs
from farm.results.profile.etdump import ETDUMP_LIMIT
from farm.results.runner_report import ReportError, read_report
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord
from farm.suites.socs import find_soc
from farm.system.text import reason_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from farm.bundles.bundle import Bundle
    from farm.devices.device import Device
    from farm.devices.transport import Transport
    from farm.execution.optrace import OptraceTools
    from farm.execution.session import DeviceSession
    from farm.request.profiling import Profile
    from farm.results.attempt import Attempt

OUTPUT = "output:"
"""What the kind of an artifact that is an output begins with; its file name follows."""
TOKENS = "tokens"
"""The kind of what a program generated in an attempt that passed: token ids by prompt, as JSON."""

# Outputs of one attempt, in all: what those of a segmentation network take a hundred times over.
_OUTPUT_BYTES = 64 << 20
# One file that a command keeps by name: the layers of a network of a thousand.
_FILE_BYTES = 256 << 20


class AttemptArtifacts:
    """Keeps what a command wants of the files of its executions. What goes wrong here changes no verdict."""

    def __init__(
        self, root: Path, profile: Profile, *, outputs: bool = False, optrace: OptraceTools | None = None
    ) -> None:
        """Keep the ETDump where `profile` wants one, `outputs`, and the SDK's timeline of what passed by `optrace`."""
        self._store = ArtifactStore(root)
        self._profile, self._outputs, self._optrace = profile, outputs, optrace

    def keep(
        self, attempt: Attempt, bundle: Bundle, folder: Path, session: Callable[[], DeviceSession]
    ) -> tuple[Attempt, tuple[ArtifactRecord, ...]]:
        """Keep what is wanted of `folder`; return the attempt, with notes on what could not be had."""
        notes, kept = list(attempt.notes), []
        for path, kind in self._wanted(folder, notes).items():
            try:
                kept.append(self._put(kind, path))
            except (FarmError, OSError) as error:
                notes.append(reason_line(f"{path.name} is not kept: {error}"))
        if bundle.manifest.generation is not None and attempt.verdict is Verdict.PASSED:
            tokens, problems = self.keep_files(_tokens(folder, bundle.manifest.samples))
            kept, notes = [*kept, *tokens], [*notes, *problems]
        if self._optrace is not None and attempt.verdict is Verdict.PASSED:
            from farm.execution.optrace import collect_optrace

            try:
                files = collect_optrace(
                    session(), bundle, find_soc(bundle.manifest.soc), self._optrace, folder / "optrace"
                )
                kept += [self._put(kind, path) for kind, path in files.items()]
            except (FarmError, OSError) as error:
                notes.append(reason_line(f"no optrace: {error}"))
        return msgspec.structs.replace(attempt, notes=tuple(notes)), tuple(kept)

    def keep_files(self, files: Mapping[str, Path | bytes]) -> tuple[tuple[ArtifactRecord, ...], tuple[str, ...]]:
        """Keep `files` by their kinds; return notes on those that are not here afterwards."""
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
        """Keep what a device's logs say of a crash, and return the attempt with the known trouble that they tell of.

        What cannot be kept is left out.
        """
        kept, texts = [], []
        for kind, path in collect_crash_logs(transport, device.os, folder, since=since_s).items():
            with contextlib.suppress(FarmError, OSError):
                texts.append(path.read_text(encoding="utf-8"))
                kept.append(self._put(kind, path))
        return explain_by_logs(attempt, texts), tuple(kept)

    def _wanted(self, folder: Path, notes: list[str]) -> dict[Path, str]:
        """Return the kinds of the files to keep; what is too large is left out, and noted where it was asked for."""
        wanted = {}
        outputs = sorted(folder.glob("output_*.raw")) if self._outputs else []
        if sum(path.stat().st_size for path in outputs) <= _OUTPUT_BYTES:
            wanted = {path: f"{OUTPUT}{path.name}" for path in outputs}
        else:
            notes.append(f"its outputs are not kept: they have more than {_OUTPUT_BYTES >> 20} MiB")
        etdump = folder / ETDUMP_FILE
        if self._profile.kept and etdump.is_file() and etdump.stat().st_size <= ETDUMP_LIMIT:
            wanted[etdump] = "etdump"
        return wanted

    def _put(self, kind: str, path: Path) -> ArtifactRecord:
        return ArtifactRecord(self._store.put(path), path.stat().st_size, kind)


def _tokens(folder: Path, prompts: int) -> dict[str, bytes]:
    """Return what was generated after each prompt the first time, by the kind of such an artifact."""
    try:
        report = read_report(folder / RESULT_FILE)
    except (ReportError, OSError):
        report = None
    return {TOKENS: msgspec.json.encode([one.tokens for one in report.generated[:prompts]])} if report else {}


def kept_outputs(artifacts: Iterable[ArtifactRecord]) -> dict[str, str]:
    """Return the SHA-256 of the outputs among `artifacts` by their file names; of a name that comes twice the last."""
    return {one.kind.removeprefix(OUTPUT): one.sha256 for one in artifacts if one.kind.startswith(OUTPUT)}
