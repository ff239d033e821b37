"""Runs to render. All of it is example data: believable names and numbers without any measurement."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from farm.results.attempt import (
    Attempt,
    Comparison,
    Direction,
    LayerComparison,
    LayerStep,
    Measurement,
    OperatorProfile,
    Stage,
    Verdict,
)
from farm.store.records import CaseResult, DeviceView, JobView, RunView, SkipReason

OPERATORS = (
    "add", "amax", "avg_pool2d", "batch_norm", "bmm", "cat", "conv1d", "conv2d", "conv2d_relu", "depthwise_conv2d",
    "div", "embedding", "gelu", "group_norm", "hardswish", "index_select", "layer_norm", "linear",
    "linear_shared_weights", "max_pool2d", "mean", "mul", "rms_norm", "sdpa", "softmax",
)  # fmt: skip
PRECISIONS = ("8a8w", "16a8w")
SOCS = ("SM8650", "SM8750")
START_MS = 1_767_261_600_000
GROUP_NORM = "output 0 against fp32: sqnr 11.8 dB < 20 dB"
BUILD_LOG = """[INFO] [Qnn ExecuTorch]: create QNN Logger with log_level 1
[WARNING] [Qnn ExecuTorch]: unexpected GraphHtpSettings option 66
Traceback (most recent call last):
  File "farm/builds/compile/flows/compiler.py", line 118, in lower
    program = to_edge_transform_and_lower_to_qnn(module, inputs, specs)
RuntimeError: Failed to finalize Qnn Graph with error: 1002
[ERROR] [Qnn ExecuTorch]: graph_prepare.cc:233::ERROR:could not create op: q::ScatterElements
"""


def measurement(metric: str, unit: str, *samples: float, exact: bool = False) -> Measurement:
    return Measurement(metric, unit, Direction.LOWER, samples, exact)


def numbers(rng: random.Random, *, scale: float = 1.0, sqnr: float = 30.0) -> tuple[Measurement, ...]:
    base = rng.uniform(2.5, 11) * 1e6 * scale
    return (
        measurement("latency", "ns", *(round(base * rng.uniform(0.97, 1.06)) for _ in range(5))),
        measurement("load_time", "ns", round(rng.uniform(0.7, 4) * 1e6 * scale)),
        measurement("htp_cycles", "cycles", rng.randrange(20_000, 4_000_000), exact=True),
        measurement("pte_size", "bytes", rng.randrange(14_000, 900_000), exact=True),
        measurement("partitions", "count", 1, exact=True),
        measurement("delegated_ops", "count", rng.randrange(1, 9), exact=True),
        measurement("fallback_ops", "count", 0, exact=True),
        Measurement("sqnr_fp32[0]", "dB", Direction.HIGHER, (sqnr,)),
        Measurement("cosine_fp32[0]", "1", Direction.HIGHER, (1 - 10 ** (-sqnr / 10) / 2,)),
        Measurement("sqnr_quantized[0]", "dB", Direction.HIGHER, (sqnr + 12,)),
    )


def comparisons(rng: random.Random, sqnr: float, violations: tuple[str, ...] = ()) -> tuple[Comparison, ...]:
    cosine = 1 - 10 ** (-sqnr / 10) / 2
    return (
        Comparison(0, "fp32", sqnr, cosine, 10 ** (-sqnr / 20) * 3, None, violations),
        Comparison(0, "quantized", sqnr + rng.uniform(6, 20), 1 - (1 - cosine) / 20, 10 ** (-sqnr / 20), None),
    )


def passed(rng: random.Random, job_id: str, device: str, started_ms: int = START_MS) -> Attempt:
    sqnr = rng.uniform(26, 48) if "8a8w" in job_id and "16a" not in job_id else rng.uniform(44, 82)
    return Attempt(
        job_id, Verdict.PASSED, Stage.DONE, "", device, started_ms, rng.uniform(0.12, 0.4),
        bundle_key=f"{rng.getrandbits(160):040x}", comparisons=comparisons(rng, sqnr), measurements=numbers(rng),
    )  # fmt: skip


def make_job(suite: str, case: str, soc: str, precision: str, *attempts: Attempt, **more: Any) -> JobView:
    return JobView(
        f"{suite}/{case}[{soc}-htp-{precision}]", suite, case, soc, "htp", precision, attempts,
        case_module=f".ops:{case.title().replace('_', '')}", decisive_attempt=len(attempts), **more,
    )  # fmt: skip


def job_id(case: str, soc: str, precision: str, suite: str = "quantized_ops") -> str:
    return f"{suite}/{case}[{soc}-htp-{precision}]"


def make_run(jobs: tuple[JobView, ...], devices: tuple[DeviceView, ...] = (), **more: Any) -> RunView:
    fields: dict[str, Any] = {
        "id": "example-7f3a",
        "command": "farm run --soc SM8650 --soc SM8750 --suite quantized_ops --suite models --virtual 2",
        "started_ms": START_MS,
        "finished_ms": START_MS + 143_200,
        "exit_code": 1,
        "user": "example",
        "host": "bench.example",
        "fingerprint": {
            "executorch": "1.5.1", "torch": "2.13.0", "qnn": "2.51.0", "runner": "sha256:9f1c52a7e0b4",
            "device kind": "virtual", "governor": "host", "farm": "0.1.0",
        },
    }  # fmt: skip
    return RunView(jobs=jobs, **{**fields, "devices": devices, **more})


def virtual_devices() -> tuple[DeviceView, ...]:
    return (
        DeviceView("virtual-SM8650-0", "SM8650", "virtual", "farm/virtual/SM8650:14/0.1.0/simulator 2.51", 51, 61.2),
        DeviceView("virtual-SM8750-0", "SM8750", "virtual", "farm/virtual/SM8750:15/0.1.0/simulator 2.51", 50, 58.9),
    )


def group_norm_elsewhere() -> tuple[CaseResult, ...]:
    """Return results of the case on two SoCs and in two precisions, in the example's run and in an older run."""
    rng = random.Random(5)
    found = []
    for soc, precision, verdict, run_id in (
        ("SM8450", "8a8w", Verdict.FAILED, "older-01"), ("SM8750", "8a8w", Verdict.PASSED, "example-7f3a"),
        ("SM8650", "16a8w", Verdict.PASSED, "example-7f3a"), ("SM8650", "fp16a8w", Verdict.INFRA, "older-01"),
    ):  # fmt: skip
        name, older = job_id("group_norm", soc, precision), verdict is not Verdict.PASSED
        changes: dict[str, Any] = {"measurements": (), "verdict": verdict}
        if older:
            changes |= {"reason": GROUP_NORM, "stage": Stage.NUMERICS, "started_ms": START_MS - 3 * 86_400_000}
        attempt = msgspec.structs.replace(passed(rng, name, f"virtual-{soc}-0"), **changes)
        version = "1" if older else "2"
        found.append(CaseResult(name, soc, "htp", precision, run_id, START_MS, "virtual", attempt, version))
    return tuple(found)


def special(rng: random.Random, case: str, soc: str, precision: str, device: str) -> JobView | None:
    """Return the jobs of the example that did not simply pass."""
    name, make = job_id(case, soc, precision), (case, soc, precision)

    def bad(stage: Stage, reason: str, second: int, verdict: Verdict = Verdict.FAILED, **more: Any) -> Attempt:
        facts = {"device": device, "started_ms": START_MS + second * 1000, **more}
        return Attempt(name, verdict, stage, reason, **facts)

    more: dict[str, Any] = {"build_seconds": 2.0}
    match make:
        case ("group_norm", "SM8650", "8a8w"):
            limits = ("sqnr 11.8 dB < 20 dB", "cosine 0.966965 < 0.99")
            attempts = [bad(
                Stage.NUMERICS, f"{GROUP_NORM}, cosine 0.966965 < 0.99", 61, seconds=0.31,
                bundle_key="4be0c2a19d55e3f0", comparisons=comparisons(rng, 11.8, limits), measurements=numbers(rng),
                log="[INFO] [Qnn ExecuTorch]: Running level=1 optimization.\n" * 4,
                notes=("2 operators ran on the CPU",),
            )]  # fmt: skip
            fallback = {"aten::native_group_norm": 1, "aten::view_copy": 1}
            more |= {"fallback_ops": fallback, "case_version": "2", "elsewhere": group_norm_elsewhere()}
        case ("index_select", "SM8750", "16a8w"):
            reason = "RuntimeError: Failed to finalize Qnn Graph with error: 1002"
            attempts = [bad(Stage.BUILD, reason, 44, device="", log=BUILD_LOG)]
        case ("linear_shared_weights", _, "8a8w"):
            attempts = [bad(
                Stage.NUMERICS, "output 0 against quantized: sqnr 3.1 dB < 30 dB", 70, seconds=0.2,
                bundle_key="77aa0012", known_issue="shared weights are quantized once per use: outputs drift apart",
                comparisons=comparisons(rng, 3.1, ("sqnr 3.1 dB < 20 dB",)), measurements=numbers(rng),
            )]  # fmt: skip
        case ("sdpa", "SM8750", "8a8w"):
            reason = "virtual-SM8750-0: the device went offline during the run"
            attempts = [bad(Stage.EXECUTE, reason, second, Verdict.INFRA, seconds=4.0) for second in (90, 96)]
        case ("softmax", "SM8650", "16a8w"):
            lost = bad(
                Stage.PUSH, "virtual-SM8650-0: push timed out after 10 s", 95, Verdict.INFRA, seconds=10.0,
                log="adb: error: failed to copy: timeout\n",
            )  # fmt: skip
            attempts = [lost, passed(rng, name, device)]
        case ("embedding", "SM8650", "8a8w"):
            note = "the known issue 'wrong scale of the table' no longer shows: remove it from the suite"
            attempts = [msgspec.structs.replace(passed(rng, name, device), notes=(note,))]
        case _:
            return None
    return make_job("quantized_ops", *make, *attempts, **more)


def example() -> RunView:
    """Return a run of 101 jobs. Example data."""
    rng = random.Random(7)
    jobs = []
    for soc in SOCS:
        device = f"virtual-{soc}-0"
        for case in OPERATORS:
            for precision in PRECISIONS:
                job = special(rng, case, soc, precision, device)
                name = job_id(case, soc, precision)
                cached = rng.random() < 0.3
                jobs.append(
                    job
                    or make_job(
                        "quantized_ops", case, soc, precision, passed(rng, name, device),
                        build_seconds=0.0 if cached else rng.uniform(1.7, 3.0), cached=cached,
                    )
                )  # fmt: skip
    name = job_id("resnet18", "SM8650", "8a8w", "models")
    model = msgspec.structs.replace(passed(rng, name, "virtual-SM8650-0"), measurements=numbers(rng, scale=240))
    jobs.append(make_job("models", "resnet18", "SM8650", "8a8w", model, build_seconds=12.4))
    return make_run(tuple(jobs), virtual_devices())


NODES = (
    ("Input OpId_2", 900), ("quantized_decomposed_quantize_per_tensor_default:OpId_16", 53_600),
    ("aten_permute_copy_default:OpId_18", 9_400), ("aten_convolution_default:OpId_26", 210_000),
    ("aten_relu_default:OpId_29", 82_000), ("aten_permute_copy_default_1:OpId_31", 16_500),
    ("quantized_decomposed_dequantize_per_tensor_default:OpId_32", 0), ("Output OpId_3", 10_400),
)  # fmt: skip


def operators(call: str = "QnnBackend[0]") -> tuple[OperatorProfile, ...]:
    """Return the profile of one delegate call and one kernel. Example data."""
    cycles = sum(value for _, value in NODES)
    nodes = [
        OperatorProfile(node, call, "cycles", 6, float(p50), p50 * 0.9, p50 * 1.4, p50 / cycles) for node, p50 in NODES
    ]
    return (
        OperatorProfile("DELEGATE_CALL", call, "ns", 6, 1_446_392.0, 1_244_463.0, 1_539_694.0, 0.99),
        *nodes,
        OperatorProfile("whole call: QNN (execute) time", call, "us", 6, 1394.0, 1177.0, 1484.0, 0.0),
        OperatorProfile("native_call_sin.out", "", "ns", 5, 14_677.0, 13_889.0, 16_140.0, 0.01),
    )


def layers() -> tuple[LayerComparison, ...]:
    """Return six layers with an error of the compiler in the fourth. Example data."""
    found = []
    names = ("convolution", "relu", "add", "convolution_1", "relu_1", "linear")
    for place, name in enumerate(names):
        operator = f"aten.{name.removesuffix('_1')}.default"
        broken = place >= 3
        found += [
            LayerComparison(f"aten_{name}_default", operator, LayerStep.QUANTIZATION, 0.0004, 38.0 - place, 0.9999),
            LayerComparison(
                f"aten_{name}_default", operator, LayerStep.COMPILER, 0.9 if broken else 1e-6,
                4.1 if broken else float("inf"), 0.71 if broken else 1.0, diverges=place == 3,
            ),
        ]  # fmt: skip
    return tuple(found)


def inside() -> RunView:
    """Return the example with profiles of some jobs, and one job compared layer by layer. Example data."""
    view = example()
    jobs = list(view.jobs)
    for index in (0, 4, 100):
        (attempt,) = jobs[index].attempts
        jobs[index] = msgspec.structs.replace(
            jobs[index], attempts=(msgspec.structs.replace(attempt, operators=operators()),)
        )
    (attempt,) = jobs[2].attempts
    reason = "aten_convolution_1_default diverges first: compiler"
    attempt = msgspec.structs.replace(
        attempt, verdict=Verdict.FAILED, stage=Stage.NUMERICS, reason=reason, layers=layers(),
        measurements=(measurement("dsp_heap_before", "bytes", 928_212), *attempt.measurements),
    )  # fmt: skip
    jobs[2] = msgspec.structs.replace(jobs[2], attempts=(attempt,))
    return msgspec.structs.replace(view, jobs=tuple(jobs))


HOSTILE = '<script>window.pwned=1</script><img src=x onerror="window.pwned=2">\'"&amp;]]>--></script>'
HIDDEN = "\x00\u202eevil\u2066\u200b\x1b[31mred\x1b[0m\x07\u2028"


def hostile() -> RunView:
    """Return a run in which every text tries to break out of the page."""
    evil = HOSTILE + HIDDEN
    attempt = Attempt(
        f"s/{evil}", Verdict.FAILED, Stage.NUMERICS, f"reason {evil}", f"serial {evil}", START_MS, float("nan"),
        f"key{evil}", "", (Comparison(0, evil, float("nan"), None, float("inf"), 0.5, (f"sqnr {evil}",)),),
        (
            Measurement(evil, evil, Direction.LOWER, (1.0, float("nan"))),
            Measurement("latency", "ns", Direction.LOWER, ()),
        ),
        f"log {evil} {{{{ 7*7 }}}}\n</pre><script>window.pwned=3</script>\ud800", (f"note {evil}",),
        (OperatorProfile(evil, evil, evil, 1, float("nan"), float("-inf"), float("inf"), float("nan")),
         OperatorProfile(f"whole call: {evil}", evil, evil, 2, 1e300, 0.0, 1e300, 7.0)),
        (LayerComparison(evil, evil, LayerStep.DEVICE, float("nan"), float("-inf"), None, diverges=True),),
    )  # fmt: skip
    known = msgspec.structs.replace(attempt, known_issue=f"known {evil}")
    lost = msgspec.structs.replace(attempt, verdict=Verdict.INFRA)
    fine = msgspec.structs.replace(attempt, verdict=Verdict.PASSED, reason="")
    elsewhere = tuple(
        CaseResult(evil, soc, f"be{evil}", f"q{evil}", run_id, 10**18, f"kind {evil}", attempt, evil)
        for soc, run_id in ((f"soc{evil}", evil), (f"other{evil}", f"run{evil}"))
    )
    jobs = tuple(
        JobView(
            f"suite{evil}/case{i}{evil}[x]", f"suite{evil}", f"case{i}{evil}", f"soc{evil}", f"be{evil}", f"p{evil}",
            attempts, fallback_ops={evil: 3}, case_module=evil, elsewhere=elsewhere, decisive_attempt=len(attempts),
            skipped=None if attempts else SkipReason(evil, 1, evil, evil),
        )
        for i, attempts in enumerate([(attempt,), (known,), (lost, lost), (fine,), ()])
    )  # fmt: skip
    device = DeviceView(f"serial {evil}", f"soc{evil}", f"kind {evil}", f"build {evil}")
    return make_run(
        jobs, (device,), id=evil, command=f"farm run {evil}", user=evil, host=evil, fingerprint={evil: evil},
        started_ms=10**18,
    )  # fmt: skip


def large(jobs: int = 2000) -> RunView:
    """Return a run as large as a nightly run: all jobs measured, a few per cent failed with long logs. Example data."""
    rng = random.Random(3)
    views = []
    socs = ("SM8550", "SM8650", "SM8750", "SM8850")
    precisions = ("8a8w", "16a8w", "16a4w", "fp16a8w")
    for i in range(jobs):
        soc, precision = socs[i % 4], precisions[i // 4 % 4]
        case = f"{OPERATORS[i // 16 % len(OPERATORS)]}_{i // (16 * len(OPERATORS))}"
        name = job_id(case, soc, precision)
        attempt = passed(rng, name, f"virtual-{soc}-0")
        if i % 40 == 0:
            attempt = msgspec.structs.replace(
                attempt, verdict=Verdict.FAILED, stage=Stage.NUMERICS, reason="output 0: sqnr 12.0 dB < 20 dB",
                comparisons=comparisons(rng, 12.0, ("sqnr 12.0 dB < 20 dB",)), log="one line of the log\n" * 20_000,
            )  # fmt: skip
        views.append(make_job("quantized_ops", case, soc, precision, attempt, build_seconds=rng.uniform(1.7, 3)))
    devices = tuple(DeviceView(f"virtual-{soc}-0", soc, "virtual", "simulator 2.51") for soc in socs)
    return make_run(tuple(views), devices)


@pytest.fixture(scope="session")
def example_run() -> RunView:
    return example()


@pytest.fixture(scope="session")
def inside_run() -> RunView:
    return inside()


@pytest.fixture(scope="session")
def hostile_run() -> RunView:
    return hostile()


def make_attempts(*verdicts: Verdict) -> tuple[Attempt, ...]:
    """Return attempts of one job."""
    return tuple(Attempt("s/c[x]", verdict, Stage.DONE, verdict.value) for verdict in verdicts)


def run_of(*attempts: tuple[Attempt, ...], **more: Any) -> RunView:
    """Return a run of one suite, a job for each tuple of attempts."""
    jobs = tuple(make_job("s", f"case{i}", "SM8650", "8a8w", *tries) for i, tries in enumerate(attempts))
    return make_run(jobs, virtual_devices(), **more)
