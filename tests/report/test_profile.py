"""Profiles, layers and times of generated text as a reader sees them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from html import unescape
from pathlib import Path

import msgspec
import pytest
from chromium import flaws, keep_screenshot, look
from report_pages import in_full
from selenium.webdriver.chrome.webdriver import WebDriver

from farm.builds.bundles.bundle import Generation
from farm.builds.program.layers import LayerStep
from farm.report.formats.layers_csv import CSV_KIND, LayerPlace, shown_places
from farm.report.html.page_of_run import ReportContext, render_html, write_html
from farm.report.model.sections import (
    ROW_LIMITS,
    SHOWN_JOBS,
    layer_table,
    operator_tables,
    row_limit,
)
from farm.report.model.summary import summarize
from farm.report.terminal.profile import change_lines, changes, job_changes, profile_lines
from farm.report.terminal.run import job_lines, render_summary
from farm.results.attempt import Attempt, LayerComparison, Measurement, OperatorProfile, Stage, Verdict
from farm.results.measurements import rate_measurements, time_measurements
from farm.results.runner_report import Generated, Inference, RunnerReport
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord, DeviceView, JobView, ProfileRecord, RunView
from farm.suites.figures import Direction

from .conftest import run_of

# Profiles and layers as a reader sees them: tables and places, also with hostile names.


def node(
    name: str, p50: float, unit: str = "cycles", share: float = 0.25, *, call: int = 0, spread: float = 0.1
) -> OperatorProfile:
    delegate = f"QnnBackend[{call}]"
    return OperatorProfile(name, delegate, unit, 6, p50, p50 * (1 - spread), p50 * (1 + spread), share)


def test_tables_are_by_unit_the_greatest_first_and_say_what_they_leave_out() -> None:
    rows = [node("a", 1), node("b", 60), node("c", 39), node("call", 5, "ns"), node("whole call: x", 1e9)]
    cycles, ns = operator_tables(rows, 2)
    assert ([row.node for row in cycles.rows], cycles.total, cycles.count) == (["b", "c"], 100, 3)
    assert (cycles.left_out, cycles.left_out_total, cycles.left_out_share) == (1, 1, 0.01)
    assert (ns.unit, ns.total, ns.left_out) == ("ns", 5, 0)
    assert operator_tables([node("whole call: x", 1)], 2) == ()


def compared(layer: str, step: LayerStep, *, diverges: bool = False) -> LayerComparison:
    return LayerComparison(layer, "aten.x.default", step, 0.1, 3.0, 0.5, diverges=diverges)


def test_the_first_divergence_is_that_of_the_first_layer_and_there_of_the_first_step() -> None:
    q, c = LayerStep.QUANTIZATION, LayerStep.COMPILER
    late_first = [compared("a", q), compared("a", c, diverges=True), compared("b", q, diverges=True), compared("b", c)]
    both = [compared("a", c, diverges=True), compared("a", q, diverges=True)]
    for layers, first in ((late_first, ("a", c)), (both, ("a", q)), ([compared("a", q)], None)):
        table = layer_table(layers)
        assert (table.first and (table.first.layer, table.first.step)) == first
    assert layer_table(late_first).steps == (q, c)
    # A layer without a step leaves its place empty.
    table = layer_table([compared("a", q), compared("b", LayerStep.DEVICE)])
    assert [[one is not None for one in row.steps] for row in table.rows] == [[True, False], [False, True]]


def test_a_page_has_profiles_and_heap_counters_where_there_are_some(example_run: RunView, inside_run: RunView) -> None:
    assert "profiles-h" not in render_html(example_run)
    html = unescape(render_html(inside_run))
    for text in (
        "382,800 cycles in 8 rows", "in 5 of 6 inferences", "QNN (execute) time in QnnBackend[0]",
        "host time of a simulator: not comparable with hardware", "dsp_heap_before", "928,212 bytes",
    ):  # fmt: skip
        assert text in html


def test_a_large_run_of_profiles_stays_small_and_says_what_is_missing() -> None:
    assert row_limit(1) == ROW_LIMITS[1]
    assert ROW_LIMITS[0] < row_limit(300) == row_limit(100_000) <= ROW_LIMITS[1]
    operators = tuple(node(f"aten_convolution_default_{n}:OpId_{n}", 1000.0 - n, share=0.005) for n in range(60))
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", "virtual-SM8650-0", operators=operators)
    html = render_html(run_of(*[(attempt,)] * (SHOWN_JOBS + 7)))
    assert "7 more are not here" in unescape(html)
    assert html.count('class="card inside') == SHOWN_JOBS
    assert len(html) < 6_000_000


EVIL = "<script>window.pwned=1</script>"


def test_each_layer_has_its_place_and_operators(inside_run: RunView) -> None:
    job, layer = next((job.id, job.decisive.layers[0].layer) for job in inside_run.jobs if job.decisive.layers)
    place = LayerPlace("body.conv", f"net.py:7 {EVIL}", "aten.conv2d.default", f"{layer}@0")
    html = render_html(inside_run, ReportContext(places={job: {layer: place}}))
    [row] = [row for row in re.findall(r"<tr.*?</tr>", html, re.DOTALL) if f"{layer}@0" in row]
    for text in ("<td>1</td>", "body.conv", "net.py:7 &lt;script&gt;", "aten.conv2d.default"):
        assert text in row
    assert EVIL not in html
    assert "ahead of time" in html
    assert "ahead of time" not in render_html(inside_run)


def test_places_are_read_of_files_that_are_here_and_not_too_large(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    text = b"layer,module,source,exported,ran\nconv,body,net.py:7,aten.conv2d.default,conv@0\n"
    kept, older = store.put(text), store.put(b"layer,operator\nconv,aten\n")
    records = {
        "j": [ArtifactRecord(kept, len(text), CSV_KIND)],
        "older": [ArtifactRecord(older, 9, CSV_KIND)],
        "gone": [ArtifactRecord("0" * 64, 9, CSV_KIND)],
        "large": [ArtifactRecord(kept, 1 << 30, CSV_KIND)],
    }
    assert shown_places(records, store) == {
        "j": {"conv": LayerPlace("body", "net.py:7", "aten.conv2d.default", "conv@0")}, "older": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "paired"),
    [
        (
            [node("a", 1), node("a", 2), node("b", 3), node("a", 4, call=1), node("a", 5, "us")],
            [node("b", 30), node("a", 10), node("a", 20), node("a", 40, call=1), node("a", 50, "us")],
            [("b", 3, 30), ("a", 1, 10), ("a", 2, 20), ("a", 4, 40), ("a", 5, 50)],
        ),
        # A node with another number of QNN is the same node.
        (
            [node("aten_relu_default:OpId_29", 10), node("Input OpId_2", 1), node("kept:OpId_7", 5)],
            [node("aten_relu_default:OpId_31", 20), node("Input OpId_4", 2), node("kept:OpId_7", 6)],
            [("aten_relu_default:OpId_31", 10, 20), ("Input OpId_4", 1, 2), ("kept:OpId_7", 5, 6)],
        ),
        ([node("x", 1), node("y", 2)], [node("y", 2), node("z", 3)], [("y", 2, 2), ("z", None, 3), ("x", 1, None)]),
    ],
)
def test_nodes_are_paired_by_name_and_the_nth_with_the_nth(
    before: list[OperatorProfile], after: list[OperatorProfile], paired: list[tuple[str, float | None, float | None]]
) -> None:
    found = changes(before, after)
    assert [(one.node, one.before and one.before.p50, one.after and one.after.p50) for one in found] == paired


def test_ranges_that_overlap_are_not_told_apart() -> None:
    for before, after, distinct, ratio in ((100, 115, False, 1.15), (100, 150, True, 1.5), (0, 7, True, None)):
        (change,) = changes([node("a", before)], [node("a", after)])
        assert (change.is_distinct, change.ratio) == (distinct, ratio)


LONG = node("quantized_decomposed_quantize_per_tensor_default:OpId_" + "1" * 60, 9e12)
ROWS = [node("small", 1.0), LONG, node("DELEGATE_CALL", 5e9, "ns"), node("whole call: QNN (execute) time", 12.0, "us")]


@pytest.mark.parametrize("width", [80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = profile_lines(ROWS, 20, width) + change_lines(changes(ROWS, ROWS[1:]), 20, width)
    assert max(map(len, lines)) <= width
    assert any("OpId_" in line or "…1111" in line for line in lines)


def test_a_table_is_sorted_by_share_and_says_what_it_leaves_out() -> None:
    lines = profile_lines([node(f"n{n}", n) for n in range(1, 7)], 2)
    assert [line.split()[0] for line in lines] == ["node", "n6", "n5", "4", "all"]
    assert lines[3].split() == ["4", "more", "10", "47.6%"]
    assert lines[-1].split() == ["all", "6", "21"]
    lines = profile_lines([*ROWS, node("\x1b[31mred\u202e", 1)], 20)
    assert "  totals of whole calls, from the delegate" in lines[-2], "which are in no sum"
    assert lines[-1].split() == ["QNN", "(execute)", "time", "QnnBackend[0]", "12", "us"]
    assert "\x1b" not in "".join(lines)


def record(**changes: object) -> ProfileRecord:
    facts: dict[str, object] = {
        "job_id": "s/c[x]", "backend": "htp", "run_id": "before", "time_ms": 1, "facts": {"qnn": "2.50", "farm": "1"},
        "case_version": "v", "device": "phone-1", "device_kind": "hardware", "verdict": "passed",
        "operators": (node("a", 1),), "artifacts": (),
    }  # fmt: skip
    return ProfileRecord(**{**facts, **changes})  # type: ignore[arg-type]


def test_what_else_is_different_is_told() -> None:
    after = record(run_id="after", facts={"qnn": "2.51", "torch": "2"}, case_version="w", device="phone-2")
    (one,) = job_changes([record(), record(job_id="other")], [after, record(job_id="new")])
    assert not one.refused
    assert one.differences == (
        "farm: 1 -> –",  # noqa: RUF001
        "qnn: 2.50 -> 2.51",
        "torch: – -> 2",  # noqa: RUF001
        "device: phone-1 -> phone-2",
        "the case has changed: another test is measured",
    )
    assert job_changes([record()], [record()])[0].differences == ()


BURST, BALANCED = (f"s/c[SM8650-htp-8a8w-htp_performance_mode={mode}-use_dlbc=true]" for mode in ("burst", "balanced"))


def test_the_only_job_of_a_case_and_target_is_compared_whatever_its_options() -> None:
    (one,) = job_changes([record(job_id=BURST)], [record(job_id=BALANCED)])
    assert (one.before_job, one.job_id, one.refused) == (BURST, BALANCED, "")
    (one,) = job_changes([record(job_id="s/c[SM8650-htp-8a8w]")], [record(job_id=BURST)])
    assert (one.before_job, one.job_id) == ("s/c[SM8650-htp-8a8w]", BURST)


def test_jobs_with_other_options_are_not_paired_where_it_could_be_another() -> None:
    both = [record(job_id=BURST), record(job_id=BALANCED)]
    plain = record(job_id="s/c[SM8650-htp-8a8w]")
    assert job_changes(both, [plain]) == []
    assert job_changes([plain], both) == []
    (same,) = job_changes(both, [plain, record(job_id=BURST)])
    assert same.before_job == same.job_id == BURST
    assert job_changes([plain], [record(job_id="s/c[SM8650-htp-16a4w-use_dlbc=true]")]) == []
    assert job_changes([plain], [record(job_id="s/d[SM8650-htp-8a8w-use_dlbc=true]")]) == []


def test_what_cannot_be_compared_is_refused() -> None:
    for changed, reason in (
        ({"device_kind": "virtual"}, "before on hardware device, after on virtual device"),
        ({"operators": ()}, "kept files of it, but no rows"),
        ({"operators": (node("a", 1, "us"),)}, "no unit in common"),
    ):
        (one,) = job_changes([record()], [record(**changed)])
        assert one.refused
        assert reason in one.refused
        assert one.nodes == ()


# Times of programs that generate text, in the terminal, for a job and on the page.


PROMPTS = (5, 40, 96)
PLAIN = "conv2d"


def generated(line: int, step_us: float, steps: int = 16) -> Generated:
    """A prompt whose steps get slower with their position, by a fifth over the context."""
    prompt = PROMPTS[line]
    each = tuple(int(1000 * step_us * (1 + (prompt + n) / 640)) for n in range(steps))
    first = int(1000 * (9_000 + 310 * prompt))
    whole = first + sum(each) + 4_500 * steps
    return Generated(line, prompt, tuple(range(steps + 1)), (first - 2_000,), each, first, whole)


def story(name: str, device: str, *, rounds: int = 1, hot: bool = False) -> JobView:
    """Return a job; with several rounds, its rate fell by a fifth as the device got warm."""
    made = [
        generated(line, 13_000 * (1 + 0.2 * min(1.0, 1.5 * number / rounds)))
        for number in range(rounds)
        for line in range(len(PROMPTS))
    ]
    loads = {"kv_forward": 21_300_000, "prefill_forward": 34_800_000}
    inferences = tuple(Inference(one.line, one.steps_ns) for one in made[: len(PROMPTS)])
    report = RunnerReport(
        1, True, 0, inferences=inferences, generated=tuple(made), method_loads_ns=loads, load_ns=61_000_000,
        peak_memory_bytes=512 << 20,
    )  # fmt: skip
    what = Generation("hybrid", 128, 32, 1, 2, 256, 16, 17, prompt_tokens=PROMPTS)
    measured = (*time_measurements(report), *rate_measurements(what, report))
    if hot:
        warm = tuple(31.0 + 7.5 * (1 - math.exp(-n / 4)) for n in range(14))
        measured += (Measurement("temperature", "C", Direction.NONE, (*warm, warm[-1] - 0.4)),)
    job = f"llm_tiny/{name}[SM8650-htp-16a8w]"
    attempt = Attempt(job, Verdict.PASSED, Stage.DONE, "", device, 1_764_000_000_000, 71.2, measurements=measured)
    return JobView(job, "llm_tiny", name, "SM8650", "htp", "16a8w", (attempt,), decisive_attempt=1)


def generating_run(*jobs: JobView, kind: str = "hardware", seconds: int | None = None) -> RunView:
    device = DeviceView("R5CT-1", "SM8650", kind, "build", len(jobs), 80.0)
    facts = {"qnn": "2.51.0"} | ({"seconds": str(seconds)} if seconds else {})
    start = 1_764_000_000_000
    command = f"farm run --seconds {seconds}" if seconds else "farm run"
    return RunView("run-1", command, start, start + 90_000, 0, "ada", "attic", facts, (device,), jobs)


@pytest.fixture(scope="module")
def phone() -> RunView:
    """A sustained run on hardware."""
    return generating_run(story("llama_hybrid", "R5CT-1", rounds=40, hot=True), seconds=60)


@pytest.fixture(scope="module")
def simulated() -> RunView:
    """Ordinary run on a virtual device, with a job that generates text and a plain job."""
    latency = Measurement("latency", "ns", Direction.LOWER, (5e6,))
    attempt = Attempt(PLAIN, Verdict.PASSED, Stage.DONE, "", "R5CT-1", measurements=(latency,))
    plain = JobView(PLAIN, "smoke", "conv2d", "SM8650", "htp", "8a8w", (attempt,), decisive_attempt=1)
    return generating_run(story("llama_kv", "R5CT-1"), plain, kind="virtual")


def shown(view: RunView) -> str:
    """Return the lines of 'farm show' about the first job."""
    return "\n".join(job_lines(summarize(view), summarize(view).jobs[0], (), {}))


def with_figures(*figures: Measurement, alone: bool = False) -> RunView:
    """Return a run with more figures of its job, or with these alone."""
    job = story("llama", "R5CT-1")
    [attempt] = job.attempts
    attempt = msgspec.structs.replace(attempt, measurements=figures if alone else (*attempt.measurements, *figures))
    return generating_run(msgspec.structs.replace(job, attempts=(attempt,)))


def require_all(words: Iterable[str], text: str) -> None:
    assert [one for one in words if one not in text] == []


def test_a_run_says_in_its_last_lines_what_generating_took(phone: RunView, simulated: RunView) -> None:
    text = " ".join(render_summary(phone, 100).split())
    rates = "decode 71.6 tokens/s; prefill 1,869 tokens/s"
    assert f"generated: llm_tiny/llama_hybrid[SM8650-htp-16a8w]: {rates}" in text
    lines = render_summary(simulated, 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert "generated, simulated: llm_tiny/llama_kv[SM8650-htp-16a8w]:" in lines
    assert "conv2d" not in "".join(lines)


def test_a_job_is_shown_with_its_curves(phone: RunView, simulated: RunView) -> None:
    text = shown(phone)
    require_all((
        "  generation\n", "first token ▁▄█ 10.55 to 38.76 ms, prompts of 5, 40, 96 tokens", "ms, positions 0 to 111",
        "decode rate █", "tokens/s, over 60 s", "temperature ▁", "kv_forward loaded in 21.30 ms", "31.0 to 38.2 C",
        "run it again:\n  farm run --soc SM8650 --suite llm_tiny --seconds 60 -k",
    ), text)  # fmt: skip
    require_all((
        "first token 10.55 ms after 5 tokens, 21.40 ms after 40, 38.76 ms after 96", "512 MiB of memory at most",
        "step p50 13.96, p90 15.17, p99 15.25 ms", "rate -15.2 % after 60 s",
    ), " ".join(text.split()))  # fmt: skip
    text = shown(simulated)
    assert "  generation, simulated: host time of a simulator\n" in text
    assert "--seconds" not in text
    assert "over" not in text.partition("generation")[2].partition("loaded")[0]


def test_a_page_has_rates_and_curves_of_what_generates_alone(phone: RunView, simulated: RunView) -> None:
    html = unescape(render_html(phone))
    require_all((
        '<a href="#generation">Generation <b>1</b></a>', "-15.2 % after 60 s", "<span>0 s</span><span>60 s</span>",
        '<a class="tag" href="#g0">rates</a>', "<figcaption>time to first token, by tokens of the prompt",
        "<figcaption>decode rate, over time", "<figcaption>temperature, over time",
    ), html)  # fmt: skip
    assert "simulated" not in html
    html = unescape(in_full(render_html(simulated)))
    assert html.count('<span class="tag virtual">simulated</span>') == 2, "in the table, and at its curves"
    assert "simulated: host time of a simulator, not comparable with hardware" in html
    assert "temperature, over time" not in html
    assert 'id="g1"' not in html
    assert "generation-h" not in render_html(msgspec.structs.replace(simulated, jobs=simulated.jobs[1:]))


def test_how_near_it_came_is_that_of_the_worst_prompt_and_output() -> None:
    higher = Direction.HIGHER
    view = with_figures(
        Measurement("sqnr_quantized[0]", "dB", higher, (73.3, 74.6)),
        Measurement("sqnr_quantized[1]", "dB", higher, (74.0, 60.25)),
        Measurement("worst_position_quantized[0]", "dB", higher, (68.7, 69.3)),
        Measurement("sqnr_fp32[0]", "dB", higher, (47.4, math.nan)),
        Measurement("prefill_quantized[0]", "dB", higher, (math.inf, math.inf)),
        Measurement("perplexity_ratio_quantized[0]", "1", Direction.LOWER, (1.0, 1.00404)),
        Measurement("same_tokens_quantized", "1", higher, (1.0, 1.0)),
        Measurement("same_tokens_fp32", "1", higher, (0.125, 1.0)),
        Measurement("margin_fp32[0]", "1", higher, (1.0, 0.99679)),
    )
    require_all((
        "60.2 dB to the quantized module, 68.7 dB at the worst position 47.4 dB to FP32 prefill equal to decode",
        "tokens 100.0 % as the quantized module, 56.2 % as FP32 least margin 0.997",
    ), " ".join(shown(view).split()))  # fmt: skip
    numbers = '<td class="n">60.2</td><td class="n">68.7</td><td class="n">47.4</td>'
    require_all((numbers, "1.004040", "0.996790", "∞"), unescape(render_html(view)))


def test_a_text_and_a_task_that_were_told_stand_beside_those_of_references() -> None:
    lower, higher = Direction.LOWER, Direction.HIGHER
    view = with_figures(
        Measurement("perplexity[0]", "tokens", lower, (261.4,)),
        Measurement("perplexity_quantized[0]", "tokens", lower, (261.5,)),
        Measurement("greedy_share[0]", "1", higher, (0.01,)),
        Measurement("sqnr_quantized[0]", "dB", higher, (91.9, 95.0)),
        Measurement("accuracy[acc]", "1", higher, (0.375,)),
        Measurement("accuracy_quantized[acc]", "1", higher, (0.5,)),
        Measurement("accuracy_fp32[acc]", "1", higher, (0.25,)),
        Measurement("questions", "count", Direction.NONE, (8.0,)),
        Measurement("accuracy[acc_norm]", "1", higher, (math.nan,)),
        Measurement("prefill_rate", "tokens/s", higher, (100.0,)),
        # A single token after a prompt has no step.
        Measurement("latency", "ns", lower, (1e6, 2e6)),
        alone=True,
    )
    text = " ".join(render_summary(view, 100).split())
    expected = "perplexity 261.4 (the quantized module 261.5); acc 3 (the quantized module 4, FP32 2) of 8 right"
    assert expected in text
    assert "step p50" not in text
    require_all(expected.split("; "), unescape(render_html(view)))


def test_what_a_device_calls_its_methods_is_text() -> None:
    evil = "<img src=x onerror=alert(1)>"
    report = RunnerReport(1, True, 0, generated=(generated(0, 9_000),), method_loads_ns={evil: 5, "m" * 65: 5})
    what = Generation("kv", 128, 0, 1, 2, 256, 16, 17, prompt_tokens=(5,))
    figures = rate_measurements(what, report)
    assert [one.metric for one in figures if "load" in one.metric] == [f"method_load_time[{evil}]"]
    view = with_figures(*figures, alone=True)
    page = in_full(render_html(view))
    assert "&lt;img src=x" in page
    assert "<img" not in page
    assert f"{evil} loaded in" in shown(view)
    many = msgspec.structs.replace(report, method_loads_ns={f"method {n}": 5 for n in range(1000)})
    assert sum("load" in one.metric for one in rate_measurements(what, many)) == 16


@pytest.mark.whole
@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1366)])
def test_the_section_fits_a_phone_and_a_screen(
    browser: WebDriver, phone: RunView, simulated: RunView, tmp_path: Path, scheme: str, width: int
) -> None:
    for view, name in ((phone, "phone"), (simulated, "virtual")):
        page = tmp_path / f"{name}.html"
        write_html(view, page)
        look(browser, page, "#generation", scheme=scheme, width=width)
        browser.execute_script("document.querySelectorAll('#generation details').forEach(one => one.open = true)")
        keep_screenshot(browser, tmp_path, f"generation-{name}-{scheme}-{width}")
        assert not flaws(browser)
