"""Programs that QNN refuses for their frame rate alone: neither the code nor the device is at fault. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from farm.base.text import reason_line
from farm.results.attempt import Attempt, Cause, Verdict

if TYPE_CHECKING:
    from farm.suites.frame_settings import FrameSetting

# ExecuTorch 1.5, backends/qualcomm/runtime/backends/lpai/LpaiGraph.cpp: a graph of a binary is finalized when it loads.
_REFUSED = re.compile(r"Failed to finalize Qnn Graph with error: (-?\d{1,10})")


def finalize_error(log: str) -> str:
    """Return QNN's error from finalizing a graph, as the runner's log has it; "" without one."""
    found = _REFUSED.search(log)
    return found[1] if found else ""


def infeasible(attempt: Attempt, setting: FrameSetting, error: str) -> Attempt:
    """Return `attempt`, a refusal, as skipped: the same program was executed once its time did not have to be kept."""
    reason = (
        f"infeasible: QNN does not keep {setting.text} (finalize ended with error {error}; the program runs without "
        "the demand for real time): lower fps, or raise ftrt_ratio"
    )
    return msgspec.structs.replace(
        attempt, verdict=Verdict.SKIPPED, cause=Cause.INFEASIBLE, reason=reason_line(reason), known_issue=""
    )
