"""Times of programs that generate text, in the terminal, for a job and on the page."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import unescape
from pathlib import Path

import msgspec
import pytest
from chromium import flaws, keep_screenshot, look
from report_pages import in_full
from selenium.webdriver.chrome.webdriver import WebDriver

from farm.builds.bundles.bundle import Generation
from farm.report.html.page_of_run import render_html, write_html
from farm.report.model.generation import generation_charts, generation_of
from farm.report.model.summary import summarize
from farm.report.terminal.job import job_lines
from farm.report.terminal.run import render_summary
from farm.results.attempt import Attempt, Measurement, Stage, Verdict
from farm.results.generation_rates import rate_measurements
from farm.results.measurements import time_measurements
from farm.results.runner_report import Generated, Inference, RunnerReport
from farm.store.view import DeviceView, JobView, RunView
from farm.suites.figures import Direction

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


def run_of(*jobs: JobView, kind: str = "hardware", seconds: int | None = None) -> RunView:
    device = DeviceView("R5CT-1", "SM8650", kind, "build", len(jobs), 80.0)
    facts = {"qnn": "2.51.0"} | ({"seconds": str(seconds)} if seconds else {})
    start = 1_764_000_000_000
    command = f"farm run --seconds {seconds}" if seconds else "farm run"
    return RunView("run-1", command, start, start + 90_000, 0, "ada", "attic", facts, (device,), jobs)


@pytest.fixture(scope="module")
def phone() -> RunView:
    """A sustained run on hardware."""
    return run_of(story("llama_hybrid", "R5CT-1", rounds=40, hot=True), seconds=60)


@pytest.fixture(scope="module")
def simulated() -> RunView:
    """Ordinary run on a virtual device, with a job that generates text and a plain job."""
    latency = Measurement("latency", "ns", Direction.LOWER, (5e6,))
    attempt = Attempt(PLAIN, Verdict.PASSED, Stage.DONE, "", "R5CT-1", measurements=(latency,))
    plain = JobView(PLAIN, "smoke", "conv2d", "SM8650", "htp", "8a8w", (attempt,), decisive_attempt=1)
    return run_of(story("llama_kv", "R5CT-1"), plain, kind="virtual")


def shown(view: RunView) -> str:
    """Return the lines of 'farm show' about the first job."""
    return "\n".join(job_lines(summarize(view), summarize(view).jobs[0], (), {}))


def with_figures(*figures: Measurement, alone: bool = False) -> RunView:
    """Return a run with more figures of its job, or with these alone."""
    job = story("llama", "R5CT-1")
    [attempt] = job.attempts
    attempt = msgspec.structs.replace(attempt, measurements=figures if alone else (*attempt.measurements, *figures))
    return run_of(msgspec.structs.replace(job, attempts=(attempt,)))


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


def test_numbers_that_cannot_be_are_left_out() -> None:
    odd = [
        Measurement(metric, "", Direction.NONE, (value,))
        for metric, value in (("decode_rate", math.nan), ("first_token_time[x]", 1.0), ("first_token_time[²]", 1.0),
                              ("step_time[1-]", 1.0), ("latency", math.inf))
    ]  # fmt: skip
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", measurements=tuple(odd))
    found = generation_of(attempt, {"seconds": "9" * 99})
    assert found is not None
    assert (found.decode, found.prompts, found.positions, found.steps, found.seconds) == (None, (), (), None, None)
    assert generation_charts(found) == ()
    assert generation_of(Attempt("j", Verdict.PASSED, Stage.DONE, ""), {}) is None


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
