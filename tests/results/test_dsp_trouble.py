"""Lines in the form of QNN's libraries, and reasons derived from them. The texts were read from the libraries only."""

from __future__ import annotations

import time

import pytest

from farm.results.attempt import Attempt, Cause, Stage, Verdict, failed, infra
from farm.results.dsp_trouble import explain_by_logs, explain_ending, known_trouble

REFUSED = failed(Stage.LOAD, "load: Error 0x12 loading method forward", Cause.REFUSED)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[ERROR] [Qnn ExecuTorch]:  <E> fastrpc memory map for fd: 33 with length: 817889280 failed with error: 0x1",
         ("SMMU", "1002", "more contexts")),
        ("[ERROR] SMMU fastrpc mmap error (err 1002)", ("SMMU", "1002", "executorch #18862")),
        ("<E> SMMU mapping of shared weights buffer failed with err = 1002", ("SMMU",)),
        ("<E> Failed to map weights buffer to device!", ("SMMU",)),
        ("fa_alloc.cc:2737::ERROR:graph requires estimated allocation of 4861664 KB, limit is 3670016 KB",
         ("a context of 4,861,664 KB", "3,670,016 KB", "4 GB", "more contexts")),
        ("<E> This META does not support far mapping. Cannot map larger than 4GB", ("4 GB", "more contexts")),
        ("<E> Failed to find available PD for contextId 7 on deviceId 0 coreId 0with context size estimate 9",
         ("process domain", "executorch #14985")),
        ("<E> Stub lib id mismatch: expected (v2.28.2.241116104011_103376), detected (v2.25.17.241017130936_18858)",
         ("of two QNN SDKs", "v2.28.2.241116104011_103376", "v2.25.17.241017130936_18858", "executorch #8762")),
        ("<E> Skel lib id mismatch: devKey={deviceId=0 coreId=0 pdId=0} expected (v2.51.0.26), detected (v2.47.0.25)",
         ("of two QNN SDKs", "v2.51.0.26", "v2.47.0.25")),
        ("QnnDsp <E> Unable to load Skel Library. transportStatus: 9", ("skel", "signed")),
        ("[ERROR] [Qnn ExecuTorch]:  <E> Using newer context binary on old SDK", ("a newer QNN", "--toolchain")),
    ],
)  # fmt: skip
def test_what_qnn_says_of_a_known_trouble_is_told_in_the_reason_with_what_to_do(
    line: str, words: tuple[str, ...]
) -> None:
    log = f"I 00:00:00.000852 executorch: model is loaded\n{line}\nand more\n"
    reason = explain_ending(REFUSED, log).reason
    assert reason.startswith(f"{REFUSED.reason}; ")
    assert [word for word in words if word not in reason] == []


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


def test_a_hostile_log_costs_no_time_and_no_control_characters_come_through() -> None:
    started = time.process_time()
    assert known_trouble("SMMU mapping of " * 200_000) is None
    assert known_trouble("expected (" * 300_000 + "lib id mismatch: expected (" * 100_000) is None
    assert known_trouble("9" * 3_000_000) is None
    assert time.process_time() - started < 5.0
    trouble = known_trouble("Stub lib id mismatch: expected (\033[31mred), detected (v2)")
    assert trouble is None or "\033" not in explain_ending(REFUSED, "x").reason
