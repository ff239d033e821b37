"""What one execution of a job on a device left behind: files and timings, no judgement."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

RESULT_FILE = "result.json"
ETDUMP_FILE = "etdump.etdp"


class RawResult(msgspec.Struct, frozen=True, kw_only=True):
    """One execution, judged by nobody yet. Everything in it that a device said is hostile."""

    job_id: str
    serial: str
    """Serial of the device."""
    folder: Path
    """Local folder with what was pulled: `output_{sample}_{index}.raw`, and RESULT_FILE and ETDUMP_FILE where the
    device had them."""
    started_ms: int
    """Epoch, milliseconds."""
    exit_code: int | None = None
    """Of the runner's process; -n or 128 + n for signal n; None when the device never reported one."""
    stderr: str = ""
    """What the runner wrote to standard error, cut to a bounded size by whoever pulled it."""
    push_seconds: float = 0.0
    run_seconds: float = 0.0
    """Wall time of the runner's process, seen from the host."""
    pull_seconds: float = 0.0
    timed_out: bool = False
    """The runner was alive and reachable and did not finish in its time; `error` stays empty then."""
    error: str = ""
    """What the farm or the device did wrong, in one line; empty when nothing."""
    error_stage: Literal["", "push", "execute", "pull"] = ""
    """Where `error` happened; empty exactly when `error` is."""

    @property
    def seconds(self) -> float:
        """Wall time on the device, staging included."""
        return self.push_seconds + self.run_seconds + self.pull_seconds

    def output(self, sample: int, index: int) -> Path:
        """Return where output `index` of inference `sample` is, if it was pulled."""
        return self.folder / f"output_{sample}_{index}.raw"
