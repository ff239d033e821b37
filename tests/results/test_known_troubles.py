"""The table of known lines: each is found by its line, names one party, and stands in docs/reference/troubles.md."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from farm.base.text import REASON_LIMIT
from farm.policy.retries import classify, tried
from farm.results.attempt import Attempt, Cause, Ending, Stage, Verdict, failed, infra
from farm.results.judge import build_failure
from farm.results.known_troubles import TROUBLES, Party, Retry
from farm.results.outcome import explain_by_logs, explain_ending, known_trouble
from farm.suites.suite import Case, InputSpec, Job, Target

REFUSED = failed(Stage.LOAD, "load: Loading of method forward failed", Cause.REFUSED)
PAGE = Path(__file__).parents[2] / "docs/reference/troubles.md"

# Logs from public issues: the deciding line among its consequences.
NO_STUB = """\
<W> Failed in loading stub: dlopen failed: library "libQnnHtpV79Stub.so" not found
<E> Failed to create transport for device, error: 4000
<E> Failed to load skel, error: 4000
"""
NOT_VISIBLE = """\
<E> DspTransport.openSession qnn_open failed, {code}, prio 100
<E> DspTransport failed,cannot open session, error 0x00000009
<E> Unable to load Skel Library. transportStatus: 9
<E> Failed to load skel, error: 1008
"""
OPEN_SHELL = """\
fastrpc_apps_user.c:3040: Error 0xd: open_shell failed for domain 3 search paths are /dsp/ (errno Permission denied)
fastrpc_apps_user.c:3252: Error 0x80000580: apps_dev_init failed for domain 3, errno Success, ioErr -2147482240
<E> DspTransport.openSession qnn_open failed, 0x80000406, prio 100
"""
OTHER_SKEL = "dlerror RX VA 0xFFF00000 outside ELF segment\n<E> DspTransport.openSession qnn_open failed, 0x80000406\n"
NEWER_OPERATOR = "<E> hexagonArch[0] has incorrect Value 68, expected >= 73."
TOO_LARGE = (
    'A single op, "q::ForceFormat_Crouton" (Op ID: 1165b600001430), requires 0x2400000 bytes of TCM, which is greater '
    "than the TCM size of 0x800000!\n<E> Failed to finalize graph (id: 1) with err 1002"
)
RESTARTED = "SSR Detected - You must free and recreate affected QNN API handles associated with deviceId 0 coreId 0"
RUNTIME, DEVICE, SESSION, PROGRAM = Cause.RUNTIME, Cause.DEVICE, Cause.SESSION, Cause.UNSUPPORTED
CAUSES = {Party.RUNTIME: RUNTIME, Party.DEVICE: DEVICE, Party.SESSION: SESSION, Party.PROGRAM: Cause.REFUSED}


def ended(log: str, ending: Ending = REFUSED) -> Ending:
    return explain_ending(ending, f"I executorch: Model file is loaded.\n{log}\nFail to initialize Qnn Manager\n")


@pytest.mark.parametrize(
    ("log", "cause", "words"),
    [
        (NO_STUB, RUNTIME, "the stub library libQnnHtpV79Stub.so is missing"),
        ("<E> Skel failed to process context binary.\n<E> Context create from binary failed for deviceId 0 err 1002",
         RUNTIME, "its size is not the reason"),
        ("<W> No Snapdragon SOC detected\n<E> Failed to load skel, error: 4000", RUNTIME, "SDK is older than the SoC"),
        *((NOT_VISIBLE.format(code=code), RUNTIME, f"not visible to the DSP ({code})")
          for code in ("0x80000416", "0x80000406", "0x80000600")),
        (OPEN_SHELL, DEVICE, "0x80000580"),
        (OTHER_SKEL, RUNTIME, "does not accept the skel"),
        ("[ERROR] <E> Unsupported HTP arch 73 from device custom config", PROGRAM, "built for Hexagon V73"),
        (NEWER_OPERATOR, PROGRAM, "built for Hexagon V73 with these data types, and the SoC"),
        (TOO_LARGE, PROGRAM, "needs 0x2400000 bytes"),
    ],
)  # fmt: skip
def test_a_refusal_with_a_known_line_names_its_party(log: str, cause: Cause, words: str) -> None:
    assert words in require_cause(log, cause)


def require_cause(log: str, cause: Cause) -> str:
    """Assert the cause of a refusal with this log, and where it is tried again; return its reason."""
    ending = ended(log)
    verdict = Verdict.FAILED if cause in (PROGRAM, Cause.REFUSED) else Verdict.INFRA
    assert (ending.verdict, ending.cause) == (verdict, cause), ending.reason
    assert ending.reason.startswith(f"{REFUSED.reason}; ")
    attempt = Attempt("s/c", ending.verdict, ending.stage, ending.reason, device="a", cause=ending.cause)
    assert classify([tried(attempt)], others=1).repeat == (cause is not PROGRAM)
    return ending.reason


def _rows_of_docs() -> list[tuple[list[str], str]]:
    """Return the rows of the page: lines, and the other columns."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    columns = [re.split(r" (?<!\\)\| ", row.removeprefix("| ").removesuffix(" |"), maxsplit=1) for row in rows]
    return [(lines.strip("`").replace("\\|", "|").split("`<br>`"), rest) for lines, rest in columns]


def test_a_row_is_found_by_each_line_of_docs_troubles_with_the_next_step() -> None:
    for row, (lines, rest) in zip(TROUBLES, _rows_of_docs(), strict=True):
        text = re.sub(r"\{(\w+)(?::,)?\}", r"*\1*", f"{row.text} | {row.next_step}")
        assert rest == f"{row.party} | {text} | {row.retry}"
        # Only a trouble of the program is not tried again, as no device can run the program.
        assert row.retry is Retry.SESSION or row.party is Party.PROGRAM, row.text
        for line in lines:
            found = known_trouble(f"before\n{line}\nafter\n")
            assert found is not None, line
            assert found == known_trouble(line)
            assert (found.party, found.retry) == (row.party, row.retry), line
            assert re.search(row.pattern, line)
            assert "{" not in found.text
            # The whole of it is in the reason.
            reason = require_cause(f"{line}\n", PROGRAM if row.retry is Retry.NO else CAUSES[row.party])
            assert reason.endswith(found.text)
            assert len(reason) <= REASON_LIMIT


def test_a_crash_with_a_known_line_of_the_farm_is_no_fault_of_the_program_either() -> None:
    crash = failed(Stage.EXECUTE, "the runner ended with signal 6 (SIGABRT)", Cause.CRASH)
    assert (ended(NO_STUB, crash).verdict, ended(NO_STUB, crash).cause) == (Verdict.INFRA, Cause.RUNTIME)
    assert ended(OPEN_SHELL, crash).cause is Cause.DEVICE
    # A program may have restarted the DSP: a crash is tried in a new session as it is.
    assert (ended(RESTARTED, crash).verdict, ended(RESTARTED, crash).cause) == (Verdict.FAILED, Cause.CRASH)
    assert ended(TOO_LARGE, crash).cause is Cause.CRASH


def test_no_row_takes_long_over_a_hostile_log_and_the_simulators_own_words_are_no_trouble() -> None:
    pieces = (
        'library "libQnn', "fastrpc_shell_unsigned_3 ", "cannot ", "/dev/fastrpc-a ", "No such file ", "err 1002 ",
        "createUnsignedPD ", "Context create from binary failed ", "could not create op: q::a",
    )  # fmt: skip
    started = time.process_time()
    for piece in pieces:
        known_trouble(piece * (65_536 // len(piece)))
    assert time.process_time() - started < 5.0
    assert known_trouble("<V> No Snapdragon SOC detected, defaulting to SM8350\n") is None
    assert known_trouble("<E> axis[0] has incorrect Value 4, expected >= 0.\n") is None


def test_an_operator_that_the_cpu_runs_explains_no_build_that_failed_otherwise() -> None:
    types = "<E> Unsupported input/output datatypes requested for the HTP Op 'Conv3d' in the node 'aten_conv'"
    job = Job(Case("s", "c", "torch.nn:ReLU", (InputSpec((1,)),)), Target("SM8650", "htp", "8a8w"))
    raised = "ValueError: no such shape"
    assert build_failure(job, raised, f"{types}\n{NEWER_OPERATOR}").reason == raised
    assert "HTP has no Conv3d" in build_failure(job, f"QNN: {types}", types).reason
    large = "graph requires estimated allocation of 4861664 KB, limit is 3670016 KB"
    assert "a context of 4,861,664 KB" in build_failure(job, "the compiler crashed (SIGABRT)", large).reason


def test_a_runtime_that_does_not_fit_together_is_no_fault_of_the_program() -> None:
    mismatch = (
        "<E> Stub lib id mismatch: expected (v2.28.2), detected (v2.25.17)\n<E> Unable to load Remote symbols 1008"
    )
    ending = explain_ending(REFUSED, mismatch)
    assert (ending.verdict, ending.stage, ending.cause) == (Verdict.INFRA, Stage.LOAD, Cause.RUNTIME)
    assert "of two QNN SDKs" in ending.reason, "the first cause, not what follows from it"
    too_large = explain_ending(REFUSED, "<E> Failed to map weights buffer to device!")
    assert (too_large.verdict, too_large.cause) == (Verdict.FAILED, Cause.REFUSED)
    gone = infra(Stage.EXECUTE, "the device is gone", Cause.GONE)
    assert explain_ending(gone, "nothing that is known") == gone


def test_device_logs_add_to_the_reason_of_a_crash_what_the_runner_did_not_say() -> None:
    crash = Attempt("s/c", Verdict.FAILED, Stage.EXECUTE, "the runner ended with signal 6 (SIGABRT)", cause=Cause.CRASH)
    logs = ["11-23 06:00 I adsprpc: fine\n", "11-23 06:00 E QnnDsp: SMMU fastrpc mmap error (err 1002)\n"]
    explained = explain_by_logs(crash, logs)
    assert explained.reason.startswith(f"{crash.reason}; by the device's logs ")
    assert "SMMU" in explained.reason
    # A log of the whole device decides no verdict, and its explanation is added once.
    assert (explained.verdict, explained.cause) == (crash.verdict, crash.cause)
    assert explain_by_logs(explained, logs) == explained
    assert explain_by_logs(crash, ["Stub lib id mismatch"]) == crash


def test_a_cause_in_the_devices_logs_takes_the_place_of_what_follows_from_it() -> None:
    opening = "<E> DspTransport.openSession qnn_open failed, 0x80000406"
    log = f"{opening}\n<E> Unable to load Skel Library. transportStatus: 9\n"
    refused = explain_ending(REFUSED, log)
    attempt = Attempt("s/c", refused.verdict, refused.stage, refused.reason, cause=refused.cause, log=log)
    cause = "adsprpc: dynamic loading failed (dlerror signature verify start failed for libQnnLpaiSkel.so)"
    explained = explain_by_logs(attempt, [cause])
    assert explained.reason == f"{REFUSED.reason}; by the device's logs {known(cause)}"
    assert (explained.verdict, explained.cause) == (Verdict.INFRA, Cause.RUNTIME)
    assert explain_by_logs(attempt, ["<E> Unable to load Skel Library. transportStatus: 9"]) == attempt


def known(log: str) -> str:
    trouble = known_trouble(log)
    assert trouble is not None
    return trouble.text
