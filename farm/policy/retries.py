"""Retries: classification of the attempts of a job on several devices, and which other devices try it again. Pure.

docs/guides/infra_or_failed.md has the rules with their reasons.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from farm.base.text import reason_line
from farm.results.attempt import Attempt, Cause, Stage, Verdict

MOST_DEVICES = 3
"""Most devices that try one job."""

# Devices lost during one job from which the job counts as the cause.
_KILLED_DEVICES = 2

_CODE = {Cause.COMPILE, Cause.UNSUPPORTED}
# A crash, a refusal or wrong numbers may come from the job or from the device: another device decides.
_OPEN = {
    Cause.CRASH: "crashed",
    Cause.HANG: "hung",
    Cause.NUMERICS: "wrong numbers",
    Cause.REFUSED: "refused",
}
# A second opinion on a job that was red before would be no news.
_NO_NEWS = {Cause.NUMERICS, Cause.REFUSED}
# Causes of a refusal by a live runner, which a new session on the same device may not meet.
_REFUSALS = {Cause.REFUSED, Cause.SESSION, Cause.DEVICE, Cause.RUNTIME}
# Causes of a failing health check that are no fault of the device itself.
_OF_HEALTH_CHECK = {Cause.RUNTIME, Cause.SESSION, Cause.SPACE}
# Causes after which recovery may bring the device back; NONE stands for a misbehaving device without a known cause.
_LOST = {Cause.NONE, Cause.CONNECTION, Cause.GONE, Cause.SPACE, Cause.DAMAGE, Cause.DEVICE}
# Another device would not change it.
_NO_DEVICE = {Cause.BUILDER, Cause.DISK, Cause.LOCAL, Cause.REQUEST, Cause.INFEASIBLE}


class Classification(StrEnum):
    """Party that a failed attempt counts against."""

    NONE = "none"
    """No party: the attempt passed or was skipped."""
    CODE = "code"
    FARM = "farm"
    """A device, its connection, or farm itself."""
    UNDECIDED = "undecided"
    """Undecided: one device alone gives no verdict, and the attempt does not count against the code."""


class Tried(msgspec.Struct, frozen=True):
    """An attempt of a job on one device; of a job that was run again alone there, the second."""

    device: str
    """Id of the device; empty if no device was needed."""
    verdict: Verdict
    cause: Cause
    stage: Stage
    reason: str
    again: bool = False
    """The same device may try the job again."""


class Decision(msgspec.Struct, frozen=True):
    """Decision from all attempts of a job so far."""

    classification: Classification
    repeat: bool
    """Try it once more, on a device that has not tried it."""
    evidence: str
    """Evidence of the classification in one line; empty if the last attempt is the evidence."""
    again: bool = False
    """Try it once more, also on the same device, once its health check passes."""


def tried(attempt: Attempt) -> Tried:
    """Return what `attempt` adds to the history of its job."""
    return Tried(attempt.device, attempt.verdict, attempt.cause, attempt.stage, attempt.reason)


def with_names(history: Iterable[Tried], names: Mapping[str, str]) -> tuple[Tried, ...]:
    """Return a history with other names of devices; `names` has the new name by the old."""
    return tuple(msgspec.structs.replace(one, device=names.get(one.device, one.device)) for one in history)


def is_open(cause: Cause) -> bool:
    """Return whether a failure of this cause may be the device's as well as the code's."""
    return cause in _OPEN


def is_failure(attempt: Attempt) -> bool:
    """Return whether the last attempt of a job counts for `--maxfail`: pytest's counts failures and errors."""
    return attempt.verdict in {Verdict.FAILED, Verdict.INFRA} and not attempt.known_issue


def unfit(attempt: Attempt, problem: str, cause: Cause = Cause.DEVICE) -> Attempt:
    """Return `attempt` as infra; `problem` and `cause` are of the health check that failed just after it.

    A health check without a known trouble of runtime, session or storage has the device at fault.
    """
    reason = f"the device fails its health check as well ({problem}): its {_finding(attempt)} ({attempt.reason})"
    cause = cause if cause in _OF_HEALTH_CHECK else Cause.DEVICE
    return _as_infra(msgspec.structs.replace(attempt, cause=cause, reason=reason_line(reason)))


def damaged(attempt: Attempt, what: str) -> Attempt:
    """Return `attempt` as infra; `what` names the files whose content differed from the pushed one."""
    reason = f"{what}: its {_finding(attempt)} ({attempt.reason})"
    return _as_infra(msgspec.structs.replace(attempt, cause=Cause.DAMAGE, reason=reason_line(reason)))


def _finding(attempt: Attempt) -> str:
    return "refusal means nothing" if attempt.cause in _CODE | _REFUSALS else "numbers mean nothing"


def needs_new_session(attempt: Attempt) -> bool:
    """Return whether an attempt that a live runner refused is made again in a new session on the same device."""
    return attempt.cause in _REFUSALS


def needs_health_check(attempt: Attempt, *, failed_before: bool) -> bool:
    """Return whether the health check runs before a failure is believed: a device may fail after a passed check.

    `failed_before`: wrong numbers of the job are no news.
    """
    if attempt.verdict is not Verdict.FAILED:
        return False
    return attempt.cause is Cause.REFUSED or (attempt.cause is Cause.NUMERICS and not failed_before)


def after_rerun(first: Attempt, alone: Attempt, *, ended_again: bool, refused: bool = False) -> tuple[Attempt, Attempt]:
    """Return both attempts as they are recorded. Pure.

    `refused`: the runner answered the first with an error, and did not end. `ended_again`: the second ended in the
    same way. A job that ends the runner again, or is refused again, although nothing ran before it is at fault.
    Otherwise it was a victim of its company or of the device. Either way the second decides, and the first counts
    against the farm: a job has one verdict.
    """
    event = "was refused" if refused else "ended the runner"
    company = "not in a process of its own"
    note = f"in a process of its own, after it {event} in a session: {first.reason}"
    if ended_again:
        company = "and again in a process of its own"
        note = f"{event} in a session and again in a process of its own"
    elif alone.verdict is Verdict.INFRA:
        company = "and could not be tried in a process of its own"
    reason = f"{event} in a session, {company}: {first.reason}"
    first_as_infra = msgspec.structs.replace(first, verdict=Verdict.INFRA, reason=reason_line(reason), known_issue="")
    if ended_again and alone.cause is Cause.SESSION:
        # Two restarts of the DSP are a crash by the program, until a second device disagrees.
        alone = msgspec.structs.replace(alone, verdict=Verdict.FAILED, cause=Cause.CRASH)
    return first_as_infra, msgspec.structs.replace(alone, notes=(*alone.notes, reason_line(note)))


def classify(history: Sequence[Tried], *, others: int, failed_before: bool = False) -> Decision:
    """Classify the last attempt of `history`: all attempts of one job, oldest first.

    `others`: how many healthy devices of its SoC have not tried it. `failed_before`: the job failed in the newest run
    before this one as well, so that wrong numbers and refusals are no news that a second device has to confirm.
    """
    last, earlier = history[-1], history[:-1]
    more = others > 0 and len(_devices(history)) < MOST_DEVICES
    if last.verdict in {Verdict.PASSED, Verdict.SKIPPED}:
        return Decision(Classification.NONE, repeat=False, evidence=_earlier_results(history))
    if (proof := _proof(history, more=more, failed_before=failed_before)) is not None:
        return Decision(Classification.CODE, repeat=False, evidence=proof)
    if last.cause is Cause.GONE and (killed := _killed(history)):
        evidence = f"the job may be killing devices: {killed} went away while they ran it"
        return Decision(Classification.FARM, repeat=False, evidence=evidence)
    if any(one.cause in _OPEN for one in history):
        return Decision(Classification.UNDECIDED, repeat=more, evidence=_undecided(history, repeat=more))
    return Decision(
        Classification.FARM,
        repeat=more and last.cause not in _NO_DEVICE,
        evidence=_earlier_results(history),
        again=others == 0 and not earlier and last.cause in _LOST,
    )


def avoided(history: Sequence[Tried], device: str) -> tuple[str, ...]:
    """Return the ids of the devices that do not get a job again, by its history and `device`, its last one."""
    final = [one.device for one in history if one.device and not one.again]
    return tuple(dict.fromkeys(final if history and history[-1].again else [*final, device]))


def _proof(history: Sequence[Tried], *, more: bool, failed_before: bool) -> str | None:
    """Return what shows that the code is at fault for the last attempt, None when it is not; `more` may try it."""
    last = history[-1]
    if last.cause not in _OPEN or (last.cause in _NO_NEWS and failed_before):
        at_once = last.cause in _CODE or last.verdict is Verdict.FAILED
        return _earlier_results(history) if at_once else None
    if len({one.device for one in history if one.cause in _OPEN}) > 1:
        return _listed(history)
    return "no other device has tried it" if not more and len(_devices(history)) <= 1 else None


def _devices(history: Iterable[Tried]) -> set[str]:
    return {one.device for one in history if one.device}


def as_recorded(attempt: Attempt, history: Sequence[Tried], decision: Decision) -> Attempt:
    """Return `attempt` as it is recorded: infra unless the code is at fault for it, with the results of other devices.

    `decision` is the answer of `classify` for `history`, whose last attempt is this one; otherwise raises ValueError.
    """
    if not history or (history[-1].device, history[-1].cause) != (attempt.device, attempt.cause):
        raise ValueError(f"the last of the history has to be the attempt itself, on {attempt.device or 'no device'}")
    if decision.classification in {Classification.FARM, Classification.UNDECIDED}:
        attempt = _as_infra(attempt)
    if not decision.evidence:
        return attempt
    evidence = reason_line(decision.evidence)
    if attempt.cause is Cause.GONE and not decision.repeat and _killed(history):
        # Some views show the reason alone, so that it carries the classification.
        return msgspec.structs.replace(attempt, reason=reason_line(f"{evidence}; {attempt.reason}"))
    return msgspec.structs.replace(attempt, notes=(*attempt.notes, evidence))


def _as_infra(attempt: Attempt) -> Attempt:
    return msgspec.structs.replace(
        attempt, verdict=Verdict.INFRA, known_issue="", comparisons=(), measurements=(), operators=()
    )


def _killed(history: Iterable[Tried]) -> str:
    devices = list(dict.fromkeys(one.device for one in history if one.cause is Cause.GONE))
    return _joined(devices) if len(devices) >= _KILLED_DEVICES else ""


def _undecided(history: Sequence[Tried], *, repeat: bool) -> str:
    if repeat:
        return f"{_listed(history)}: another device has to decide between a fault of the job and of the device"
    return f"{_listed(history)}: it stays open whether it is the job or the device"


def _earlier_results(history: Sequence[Tried]) -> str:
    earlier = history[:-1]
    before = "before" if all(one.again for one in earlier) else "before, on other devices"
    return f"{before}: {_listed(earlier)}" if earlier else ""


def _listed(history: Sequence[Tried]) -> str:
    """Return what happened where: `crashed on X and on Y, gone on Z`."""
    places: dict[str, list[str]] = {}
    for one in history:
        what = _OPEN.get(one.cause) or _WORDS.get(one.cause) or str(one.verdict)
        places.setdefault(what, []).append(f"on {one.device or 'no device'}")
    return ", ".join(f"{what} {_joined(where)}" for what, where in places.items())


def _joined(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


_WORDS = {
    Cause.COMPILE: "not compiled",
    Cause.UNSUPPORTED: "not supported",
    Cause.RUNTIME: "runtime does not fit",
    Cause.SESSION: "DSP restarted",
    Cause.CONNECTION: "connection lost",
    Cause.GONE: "device gone",
    Cause.ADB_SERVER: "no adb server",
    Cause.SPACE: "no space",
    Cause.DAMAGE: "files damaged",
    Cause.DEVICE: "device failed",
    Cause.DISK: "no room on this machine",
    Cause.LOCAL: "this machine failed",
    Cause.BUILDER: "not built",
    Cause.REQUEST: "not measured",
    Cause.INFEASIBLE: "infeasible",
    Cause.LEASE: "lease lost",
    Cause.WORKER: "worker died",
}
