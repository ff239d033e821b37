"""How an execution ended, with the known trouble in its log -> a report that can be judged, or the party at fault."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from farm.base.text import reason_line
from farm.devices.execution.raw import RESULT_FILE, RawResult
from farm.results.attempt import Attempt, Cause, Ending, Stage, Verdict, failed, infra
from farm.results.known_troubles import LOADER_FAILURE, TROUBLES, KnownTrouble, Party, Retry
from farm.results.runner_report import UNSUPPORTED, ReportError, RunnerError, RunnerReport, read_report
from farm.suites.options import FrameSetting

# A log -> the known trouble in it, and what that changes about an ending. Pure; the table is `known_troubles.py`.


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


# How an execution ended -> whether it left a report that can be judged, or the party at fault.


# Stages of the runner's errors that are the farm's doing: flags, options, inputs and the workspace are made by it.
_FARM_STAGES = {
    "flags": Stage.LOAD,
    "options": Stage.LOAD,
    "inputs": Stage.EXECUTE,
    "outputs": Stage.EXECUTE,
    "etdump": Stage.EXECUTE,
}
# Refusals of what farm asked for: another device with the same runtime refuses it as well.
_REQUEST_STAGES = ("flags", "options")
_CODE_STAGES = {"load": Stage.LOAD, "execute": Stage.EXECUTE}
# The runner's own watchdog ended it: docs/reference/native_runner.md.
_TIMEOUT_EXIT = 9
# A signal that asks for the end: nothing that the program did.
_SIGNALLED_EXIT = 11
_NO_SPACE = "No space left on device"

# A shell's codes for a program that cannot be executed or is not there; glibc's loader uses 127 as well.
_NOT_STARTED = (126, 127)

_SIGNAL_HINTS = {
    "SIGALRM": ": it hung, and wrote no result",
    "SIGABRT": ": it ended by itself; the log may have the reason",
    "SIGKILL": ": something killed it, perhaps for want of memory",
    "SIGSEGV": ": it touched memory that is not its own",
}

# A clock on the device and the host's may differ; durations that exceed the host's by more than this are made up.
_CLOCK_SLACK = 1.2
_CLOCK_SLACK_SECONDS = 1.0


def outcome(raw: RawResult) -> Ending | RunnerReport:
    """Return the report of a successful execution, or the ending of another one.

    The first of these decides: an error of the farm or the device, an error reported by the runner, a timeout, a signal
    or another exit code, a missing or implausible report. The reason includes a known trouble from the runner's log.
    """
    found = _outcome(raw)
    return explain_ending(found, raw.stderr) if isinstance(found, Ending) else found


def _outcome(raw: RawResult) -> Ending | RunnerReport:
    if raw.error or raw.error_stage:
        stage = Stage(raw.error_stage or "execute")
        return infra(stage, raw.error or f"the farm or the device failed at {stage}", Cause(raw.error_cause))
    report: RunnerReport | None = None
    refused = ""
    try:
        report = read_report(raw.folder / RESULT_FILE)
    except (ReportError, OSError) as error:
        refused = f"{RESULT_FILE} is refused: {error}"
    if report and report.error:
        return _runner_error(report.error, report.exit_code)
    if raw.timed_out or raw.exit_code != 0:
        return _bad_ending(raw, report, refused)
    if report is None:
        return infra(Stage.PULL, refused or f"the runner ended well, but there is no {RESULT_FILE}")
    if problem := _executions_problem(raw, report) or _clock_problem(raw, report):
        return infra(Stage.PULL, f"{RESULT_FILE} is refused: {problem}")
    return report


def _runner_error(error: RunnerError, code: int) -> Ending:
    timed_out = code == _TIMEOUT_EXIT
    message = reason_line(error.message).removeprefix(f"{error.stage}: ")
    reason = f"{error.stage}: {message or 'the runner gave no message: see the log'}"
    if error.stage == UNSUPPORTED:
        return failed(Stage.EXECUTE, reason, Cause.UNSUPPORTED)
    if error.stage in _FARM_STAGES:
        asked = Cause.REQUEST if error.stage in _REQUEST_STAGES else Cause.NONE
        cause = Cause.SPACE if _NO_SPACE in error.message else asked
        return infra(_FARM_STAGES[error.stage], reason, Cause.HANG if timed_out else cause)
    if code == _SIGNALLED_EXIT:
        return infra(_CODE_STAGES[error.stage], reason)
    return failed(_CODE_STAGES[error.stage], reason, Cause.HANG if timed_out else Cause.REFUSED)


def _bad_ending(raw: RawResult, report: RunnerReport | None, refused: str) -> Ending:
    code = raw.exit_code
    if raw.timed_out:
        return failed(Stage.EXECUTE, f"the runner did not end within {raw.run_seconds:.0f} s", Cause.HANG)
    if code is None:
        return infra(Stage.EXECUTE, "the device never reported how the runner ended", Cause.CONNECTION)
    if report is None and (why := _not_started(raw.stderr, code)):
        return infra(Stage.EXECUTE, f"the runner did not start: {why}")
    # Shells report 128 + n for signal n, Python's subprocess -n.
    number = -code if code < 0 else code - 128
    if 1 <= number <= 64:
        # SIGALRM is the watchdog's last step, for a process that cannot report its timeout.
        cause = Cause.HANG if number == signal.SIGALRM else Cause.CRASH
        return failed(Stage.EXECUTE, _signal_text(number), cause)
    left = refused or f"it left no {RESULT_FILE}"
    if report is not None:
        left = "it had reported success"
    return failed(Stage.EXECUTE, f"the runner ended with exit code {code}; {left}", Cause.CRASH)


def _not_started(stderr: str, code: int) -> str:
    # Android's loader ends with a signal after its message, so this comes before signals.
    for line in stderr.splitlines():
        if re.search(LOADER_FAILURE.pattern, line):
            return line
    return f"exit code {code}: {stderr}" if code in _NOT_STARTED else ""


def _signal_text(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a real-time signal"
    return f"the runner ended with signal {number} ({name}){_SIGNAL_HINTS.get(name, '')}"


def _executions_problem(raw: RawResult, report: RunnerReport) -> str:
    for inference in report.inferences:
        if inference.executions < raw.executions:
            return (
                f"inferences[{inference.line}] has {inference.executions} executions, {raw.executions} were asked for"
            )
    return ""


def _clock_problem(raw: RawResult, report: RunnerReport) -> str | None:
    claimed = (report.verification_ns or 0) + (report.load_ns or 0)
    if report.generated:
        # The steps of the first round are part of the inferences as well.
        claimed += sum(max(one.total_ns or 0, sum(one.prefill_ns) + sum(one.steps_ns)) for one in report.generated)
    else:
        claimed += sum(sum(inference.warm_up_ns) + sum(inference.iterations_ns) for inference in report.inferences)
    possible = raw.run_seconds * _CLOCK_SLACK + _CLOCK_SLACK_SECONDS
    if claimed > possible * 1e9:
        return f"it claims {claimed / 1e9:.1f} s of work, and the runner ran for {raw.run_seconds:.1f} s"
    return None
