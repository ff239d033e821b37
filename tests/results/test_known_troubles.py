"""The table of known lines: each is found by its line, names one party, and stands in docs/reference/troubles.md."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from farm.base.text import REASON_LIMIT
from farm.policy.retries import classify, tried
from farm.results.attempt import Attempt, Cause, Ending, Stage, Verdict, failed
from farm.results.dsp_trouble import explain_ending, known_trouble
from farm.results.judge import build_failure
from farm.results.known_troubles import TROUBLES, Party, Retry
from farm.suites.suite import Case, InputSpec, Job, Target

REFUSED = failed(Stage.LOAD, "load: Loading of method forward failed", Cause.REFUSED)
ROWS = [(row, line) for row in TROUBLES for line in row.lines]
PAGE = Path(__file__).parents[2] / "docs/reference/troubles.md"

# Logs from public issues: the deciding line among its consequences.
NO_STUB = """\
<W> Failed in loading stub: dlopen failed: library "libQnnHtpV79Stub.so" not found
<W> Failed to create transport instance: 4000
<E> Failed to create transport for device, error: 4000
<E> Failed to load skel, error: 4000
<E> Transport layer setup failed: 14001
"""
OLD_SDK = """\
<W> No Snapdragon SOC detected
<E> Failed to create transport for device, error: 4000
<E> Failed to load skel, error: 4000
"""
NOT_VISIBLE = """\
<E> DspTransport.openSession qnn_open failed, {code}, prio 100
<E> IDspTransport: Unable to load lib {code}
<E> DspTransport failed,cannot open session, error 0x00000009
<E> Unable to load Skel Library. transportStatus: 9
<E> Failed to load skel, error: 1008
"""
NO_UNSIGNED = """\
<E> DspTransport.createUnsignedPD unsigned PD or DSPRPC_GET_DSP_INFO not supported by HTP
<E> Unable to load Skel Library. transportStatus: -1
<E> Failed to load skel, error: 1008
"""
NO_BINARY = """\
<E> Skel failed to process context binary.
<E> Context create from binary failed for deviceId 0 coreId 0 pdId 0 err 1002
"""
OPEN_SHELL = """\
fastrpc_apps_user.c:3040: Error 0xd: open_shell failed for domain 3 search paths are /dsp/ (errno Permission denied)
fastrpc_apps_user.c:3252: Error 0x80000580: apps_dev_init failed for domain 3, errno Success, ioErr -2147482240
<E> DspTransport.openSession qnn_open failed, 0x80000406, prio 100
"""
OLD_SHELL = "fastrpc_apps_user.c:1830: Error 0x8000054f: remote_handle64_open failed for file:///libQnnHtpV73Skel.so\n"
NO_SHELL = "apps_std_fopen_fd failed to open /vendor/dsp/fastrpc_shell_unsigned_3 (errno No such file or directory)\n"
OTHER_SKEL = """\
dlerror RX VA 0xFFF00000 outside ELF segment
<E> DspTransport.openSession qnn_open failed, 0x80000406, prio 100
"""
RESTARTED = "SSR Detected - You must free and recreate affected QNN API handles associated with deviceId 0 coreId 0\n"
NEWER_ARCH = "[ERROR] <E> Unsupported HTP arch 73 from device custom config\n"
NEWER_OPERATOR = "<E> hexagonArch[0] has incorrect Value 68, expected >= 73.\n"
TOO_LARGE = """\
A single op, "q::ForceFormat_Crouton" (Op ID: 1165b600001430), requires 0x2400000 bytes of TCM, which is greater than \
the TCM size of 0x800000!
<E> Failed to finalize graph (id: 1) with err 1002
"""
NO_KERNEL = "graph_prepare.cc:204:ERROR:could not create op: q::flat_from_vtcm\n"
NO_CONTEXT = (
    "Failed to interpret QNN context binary. Error code 30010. Try verifying binary with online-prepare format.\n"
)


def ended(log: str, ending: Ending = REFUSED) -> Ending:
    return explain_ending(ending, f"I executorch: Model file is loaded.\n{log}Fail to initialize Qnn Manager\n")


@pytest.mark.parametrize(
    ("log", "verdict", "cause", "words"),
    [
        (NO_STUB, Verdict.INFRA, Cause.RUNTIME, "the stub library libQnnHtpV79Stub.so is missing"),
        (NO_BINARY, Verdict.INFRA, Cause.RUNTIME, "its size is not the reason"),
        (OLD_SDK, Verdict.INFRA, Cause.RUNTIME, "the SDK is older than the SoC"),
        (NO_UNSIGNED, Verdict.INFRA, Cause.DEVICE, "no unsigned process domain"),
        ("transportStatus = -1\n", Verdict.INFRA, Cause.DEVICE, "no unsigned process domain"),
        (NOT_VISIBLE.format(code="0x80000416"), Verdict.INFRA, Cause.RUNTIME, "not visible to the DSP (0x80000416)"),
        (NOT_VISIBLE.format(code="0x80000406"), Verdict.INFRA, Cause.RUNTIME, "not visible to the DSP (0x80000406)"),
        (NOT_VISIBLE.format(code="0x80000600"), Verdict.INFRA, Cause.RUNTIME, "not visible to the DSP (0x80000600)"),
        (RESTARTED, Verdict.INFRA, Cause.SESSION, "the DSP was restarted (SSR)"),
        (OLD_SHELL, Verdict.INFRA, Cause.DEVICE, "0x8000054f"),
        (NO_SHELL, Verdict.INFRA, Cause.DEVICE, "fastrpc_shell_unsigned_3"),
        (OPEN_SHELL, Verdict.INFRA, Cause.DEVICE, "0x80000580"),
        (OTHER_SKEL, Verdict.INFRA, Cause.RUNTIME, "does not accept the skel"),
        (NEWER_ARCH, Verdict.FAILED, Cause.UNSUPPORTED, "built for Hexagon V73"),
        (NEWER_OPERATOR, Verdict.FAILED, Cause.UNSUPPORTED, "built for Hexagon V73 with these data types, and the SoC"),
        (TOO_LARGE, Verdict.FAILED, Cause.UNSUPPORTED, "needs 0x2400000 bytes"),
        (NO_KERNEL, Verdict.FAILED, Cause.UNSUPPORTED, "no kernel for q::flat_from_vtcm"),
        (NO_CONTEXT, Verdict.FAILED, Cause.REFUSED, "the program has no context binary for this runtime"),
        # Not in the issue: the same kinds of trouble in other words.
        ("qnn_graph_execute failed. Error 1007\n", Verdict.INFRA, Cause.SESSION, "the connection to the DSP broke"),
        ("<W> SSR detected on device config {0,0,0}.\n", Verdict.INFRA, Cause.SESSION, "the DSP was restarted"),
        ("Failed to open /dev/fastrpc-cdsp: Permission denied\n", Verdict.INFRA, Cause.DEVICE, "cannot be opened"),
        ("libQnnHtpV75Stub.so: cannot open shared object file\n", Verdict.INFRA, Cause.RUNTIME, "libQnnHtpV75Stub"),
        ("<E> Using newer context binary on old SDK\n", Verdict.FAILED, Cause.UNSUPPORTED, "--toolchain"),
    ],
)  # fmt: skip
def test_a_refusal_with_a_known_line_names_its_party(log: str, verdict: Verdict, cause: Cause, words: str) -> None:
    ending = ended(log)
    assert (ending.verdict, ending.cause) == (verdict, cause), ending.reason
    assert ending.reason.startswith(f"{REFUSED.reason}; ")
    assert words in ending.reason
    attempt = Attempt("s/c", ending.verdict, ending.stage, ending.reason, device="a", cause=ending.cause)
    asks_another = classify([tried(attempt)], others=1).repeat
    assert asks_another == (cause is not Cause.UNSUPPORTED)


@pytest.mark.parametrize(("row", "line"), ROWS, ids=[line[:50] for _, line in ROWS])
def test_a_row_is_found_by_each_of_its_lines_with_the_next_step(row: object, line: str) -> None:
    found = known_trouble(f"before\n{line}\nafter\n")
    assert found is not None
    own = next(one for one in TROUBLES if one is row)
    assert found == known_trouble(line)
    assert (found.party, found.retry) == (own.party, own.retry)
    assert own.pattern.search(line)
    assert "{" not in found.text
    # The whole of it is in the reason.
    assert ended(f"{line}\n").reason.endswith(found.text), len(found.text)
    assert len(ended(f"{line}\n").reason) <= REASON_LIMIT


def test_what_no_device_can_run_is_the_programs_and_all_else_is_tried_again() -> None:
    for row in TROUBLES:
        assert row.retry is Retry.SESSION or row.party is Party.PROGRAM, row.text
        assert row.text[0].islower() or row.text.startswith("HTP"), row.text


def test_docs_troubles_has_every_line_with_party_next_step_and_retry() -> None:
    page = PAGE.read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(TROUBLES)
    for row, shown in zip(TROUBLES, rows, strict=True):
        assert shown == shown_row(row)


def shown_row(row: object) -> str:
    """Return the row of docs/reference/troubles.md; the page is written from this by hand or by WRITE_TROUBLES."""
    own = next(one for one in TROUBLES if one is row)
    lines = "<br>".join(f"`{line}`".replace("|", "\\|") for line in own.lines)
    text = re.sub(r"\{(\w+)(?::,)?\}", r"*\1*", f"{own.text} | {own.next_step}")
    return f"| {lines} | {own.party} | {text} | {own.retry} |"


def test_a_crash_with_a_known_line_of_the_farm_is_no_fault_of_the_program_either() -> None:
    crash = failed(Stage.EXECUTE, "the runner ended with signal 6 (SIGABRT)", Cause.CRASH)
    assert (ended(NO_STUB, crash).verdict, ended(NO_STUB, crash).cause) == (Verdict.INFRA, Cause.RUNTIME)
    assert ended(OPEN_SHELL, crash).cause is Cause.DEVICE
    # A program may have restarted the DSP: a crash is tried in a new session as it is.
    assert (ended(RESTARTED, crash).verdict, ended(RESTARTED, crash).cause) == (Verdict.FAILED, Cause.CRASH)
    assert ended(TOO_LARGE, crash).cause is Cause.CRASH


def test_the_simulators_own_words_are_no_trouble() -> None:
    assert known_trouble("<V> No Snapdragon SOC detected, defaulting to SM8350\n") is None
    assert known_trouble("<E> axis[0] has incorrect Value 4, expected >= 0.\n") is None


def test_no_row_takes_long_over_a_hostile_log() -> None:
    pieces = (
        'library "libQnn', "fastrpc_shell_unsigned_3 ", "cannot ", "/dev/fastrpc-a ", "No such file ", "err 1002 ",
        "createUnsignedPD ", "Context create from binary failed ", "could not create op: q::a",
    )  # fmt: skip
    started = time.process_time()
    for piece in pieces:
        known_trouble(piece * (65_536 // len(piece)))
    assert time.process_time() - started < 5.0


def test_an_operator_that_the_cpu_runs_explains_no_build_that_failed_otherwise() -> None:
    types = "<E> Unsupported input/output datatypes requested for the HTP Op 'Conv3d' in the node 'aten_conv'"
    job = Job(Case("s", "c", "torch.nn:ReLU", (InputSpec((1,)),)), Target("SM8650", "htp", "8a8w"))
    raised = "ValueError: no such shape"
    assert build_failure(job, raised, f"{types}\n{NEWER_OPERATOR}").reason == raised
    assert "HTP has no Conv3d" in build_failure(job, f"QNN: {types}", types).reason
    large = "graph requires estimated allocation of 4861664 KB, limit is 3670016 KB"
    assert "a context of 4,861,664 KB" in build_failure(job, "the compiler crashed (SIGABRT)", large).reason
