"""A log -> the known trouble in it, and what that changes about an ending. Pure; the table is `known_troubles.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from farm.base.text import reason_line
from farm.results.attempt import Attempt, Cause, Ending, Verdict
from farm.results.known_troubles import TROUBLES, KnownTrouble, Party, Retry

if TYPE_CHECKING:
    from farm.suites.frame_settings import FrameSetting

# Trouble of these parties decides however the runner ended.
_CAUSE_OF_PARTY = {Party.RUNTIME: Cause.RUNTIME, Party.DEVICE: Cause.DEVICE}
# Causes that a known line may replace: `gone` and others come from questions to the device itself.
_OF_RUNNER = {Cause.NONE, Cause.REQUEST, Cause.REFUSED, Cause.CRASH, Cause.HANG}
# ExecuTorch 1.5, backends/qualcomm/runtime/backends/lpai/LpaiGraph.cpp: a graph of a binary is finalized when it loads.
_REFUSED = re.compile(r"Failed to finalize Qnn Graph with error: (-?\d{1,10})")


class Trouble(NamedTuple):
    """Known trouble as a log has it."""

    text: str
    """Explanation and next step, part of a reason."""
    party: Party
    retry: Retry


def known_trouble(log: str, *, operators: bool = True) -> Trouble | None:
    """Return the known trouble in `log`, None without any; of several the cause of the others.

    Without `operators`, lines that QNN also prints for operators on the CPU do not count.
    """
    rows = (row for row in TROUBLES if operators or not row.of_operator)
    return next((_trouble(row, found.groupdict()) for row in rows if (found := re.search(row.pattern, log))), None)


def _trouble(row: KnownTrouble, groups: dict[str, str | None]) -> Trouble:
    # `built2` is what `built` is in another spelling of the line.
    named = {name.rstrip("2"): text for name, text in groups.items() if text is not None}
    values = {name: int(text) if text.isdecimal() else text for name, text in named.items()}
    return Trouble(f"{row.text}: {row.next_step}".format(**values), row.party, row.retry)


def explain_ending(ending: Ending, log: str) -> Ending:
    """Return a failed ending with the known trouble from the runner's own log.

    Trouble of runtime, device or session is infra; a program that no device can run needs no second device.
    """
    trouble = known_trouble(log)
    if trouble is None:
        return ending
    ending = msgspec.structs.replace(ending, reason=reason_line(f"{ending.reason}; {trouble.text}"))
    if ending.cause not in _OF_RUNNER:
        return ending
    if trouble.party in _CAUSE_OF_PARTY:
        return msgspec.structs.replace(ending, verdict=Verdict.INFRA, cause=_CAUSE_OF_PARTY[trouble.party])
    if ending.cause is Cause.REFUSED and trouble.party is Party.SESSION:
        return msgspec.structs.replace(ending, verdict=Verdict.INFRA, cause=Cause.SESSION)
    if ending.cause is Cause.REFUSED and trouble.retry is Retry.NO:
        return msgspec.structs.replace(ending, cause=Cause.UNSUPPORTED)
    return ending


def explain_by_logs(attempt: Attempt, logs: Iterable[str]) -> Attempt:
    """Return an attempt with the known trouble in the device's logs, which are of all programs there.

    A cause takes the place of its consequence in the runner's own log.
    """
    texts = list(logs)
    own, first = known_trouble(attempt.log), known_trouble("\n".join((*texts, attempt.log)))
    if first is None or first == own or first.text in attempt.reason:
        return attempt
    found = f"by the device's logs {first.text}"
    if own is not None and own.text in attempt.reason:
        return msgspec.structs.replace(attempt, reason=reason_line(attempt.reason.replace(own.text, found)))
    return msgspec.structs.replace(attempt, reason=reason_line(f"{attempt.reason}; {found}"))


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
