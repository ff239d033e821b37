"""Pages in real headless Chromium, opened from file:// as a reader opens them, and findings of axe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chromium import flaws, keep_screenshot, look, requested, see, violations
from compare.made import everything
from report_pages import context, hostile_context, with_skipped
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

import farm
from farm.dispatch.nightly.render import SAMPLE, render_nightly_run
from farm.report.html.page import render_compare, render_diff
from farm.report.html.page_of_run import render_html
from farm.report.model.diff import diff_runs
from farm.results.attempt import Verdict
from farm.serve.pages.all import PAGES
from farm.store.records import RunView

from .conftest import large

Open = Callable[..., WebDriver]
UNFOLD = "document.querySelectorAll('details').forEach(one => { one.open = true })"


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory, example_run: RunView, inside_run: RunView, hostile_run: RunView
) -> dict[str, Path]:
    known, night = with_skipped(example_run), msgspec.structs.replace(SAMPLE, id="20260228-020000-000000")
    # A job of each kind is enough, and axe takes long for a large page.
    odd = [job for job in inside_run.jobs[9:] if len(job.attempts) > 1 or job.attempts[0].verdict is not Verdict.PASSED]
    few = with_skipped(msgspec.structs.replace(inside_run, jobs=(*inside_run.jobs[:9], *odd)))
    made = {
        "example": render_html(example_run),
        "inside": render_html(inside_run),
        "hostile": render_html(hostile_run, hostile_context(hostile_run)),
        "large": render_html(large()),
        "known": render_html(known, context(known)),
        "few": render_html(few, context(few)),
        "compare": render_compare(everything()),
        "nightly_run": render_nightly_run(SAMPLE, [night], "x/", ""),
        "diff": render_diff(diff_runs(example_run, inside_run), virtual=True),
    }
    folder = tmp_path_factory.mktemp("pages")
    for name, html in made.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in made}


@pytest.fixture
def open_page(browser: WebDriver, pages: dict[str, Path]) -> Iterator[Open]:
    """Return a function that opens a page; at the end, nothing was asked from the network and no error was logged."""
    for kind in ("browser", "performance"):
        browser.get_log(kind)

    def show(name: str, fragment: str = "", *, scheme: str = "light", width: int = 1280) -> WebDriver:
        look(browser, pages[name], fragment, scheme=scheme, width=width)
        return browser

    yield show
    assert browser.get_log("browser") == []
    assert {url for url in requested(browser) if not url.startswith(("data:", "about:"))} <= {
        page.as_uri() for page in pages.values()
    }


def column(browser: WebDriver, key: str) -> list[str]:
    """Return the shown cells of the table of jobs, by the key of their column."""
    script = """const at = [...document.querySelectorAll("#jobs-table thead th")]
                .findIndex(h => h.dataset.k === arguments[0]);
                return [...document.querySelectorAll("#jobs-table tbody")].filter(b => b.checkVisibility())
                .map(b => b.rows[0].cells[at]).map(c => (c.querySelector("a") ?? c).textContent)"""
    found: list[str] = browser.execute_script(script, key)
    return found


def numbers_of(browser: WebDriver, key: str) -> tuple[list[float], set[str]]:
    """Return the numbers of a column, and the texts below its numbers."""
    values = column(browser, key)
    numbers = [float(value.replace(",", "")) for value in values if value != "–"]  # noqa: RUF001
    return numbers, set(values[len(numbers) :])


def find(browser: WebDriver, selector: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, selector)


def active(browser: WebDriver) -> Any:
    return browser.switch_to.active_element


def press(browser: WebDriver, key: str) -> None:
    find(browser, "body").send_keys(key)


def wait(browser: WebDriver, condition: Callable[[WebDriver], Any]) -> None:
    WebDriverWait(browser, 20, poll_frequency=0.05).until(condition)


def sort_by(browser: WebDriver, key: str) -> str:
    """Click the head of a column, and return the direction in which it is sorted now."""
    head = find(browser, f"th[data-k={key}]")
    browser.execute_script("arguments[0].click()", head.find_element(By.TAG_NAME, "button"))
    return str(head.get_attribute("aria-sort"))


def test_it_opens_from_a_file_without_errors_or_requests_and_tab_leads_past_its_bar(open_page: Open) -> None:
    browser = open_page("example")
    assert find(browser, "h1").text.startswith("96 passed, 2 failed")
    assert find(browser, ".banner.virtual").is_displayed()
    assert len(column(browser, "job")) == 101
    press(browser, Keys.TAB)
    assert active(browser).text == "Skip to the content"
    active(browser).send_keys(Keys.ENTER)
    assert active(browser).get_attribute("id") == "main"


def test_slash_searches_names_and_reasons_and_the_address_keeps_it(open_page: Open) -> None:
    browser = open_page("example")
    press(browser, "/")
    assert active(browser).get_attribute("id") == "q"
    active(browser).send_keys("conv2d SM8750")
    wait(browser, lambda b: len(column(b, "job")) < 101)
    assert column(browser, "job") == [
        f"quantized_ops/{case}[SM8750-htp-{precision}]"
        for case in ("conv2d", "conv2d_relu", "depthwise_conv2d")
        for precision in ("8a8w", "16a8w")
    ]
    assert find(browser, "#shown").text == "6 of 101 jobs"
    browser = open_page("example", f"#{browser.current_url.partition('#')[2]}")
    assert len(column(browser, "job")) == 6
    find(browser, "#q").send_keys(Keys.ESCAPE)
    assert len(column(browser, "job")) == 101
    browser = open_page("example", "#q=went+offline")
    assert column(browser, "job") == ["quantized_ops/sdpa[SM8750-htp-8a8w]"]
    find(browser, "#q").send_keys(" nonsense")
    wait(browser, lambda b: find(b, "#none").is_displayed())
    assert column(browser, "job") == []


def test_numbers_sort_as_numbers_with_missing_ones_last_and_verdicts_by_urgency(open_page: Open) -> None:
    browser = open_page("example")
    for direction in ("ascending", "descending"):
        assert sort_by(browser, "sqnr_fp32") == direction
        numbers, below = numbers_of(browser, "sqnr_fp32")
        assert numbers == sorted(numbers, reverse=direction == "descending")
        assert len(numbers) >= 98
        assert below == {"–"}  # noqa: RUF001
    assert sort_by(browser, "sqnr_fp32") == "none"
    assert column(browser, "job")[0] == "quantized_ops/add[SM8650-htp-8a8w]"
    sort_by(browser, "verdict")
    verdicts = [text.split(maxsplit=1)[1] for text in column(browser, "verdict")]
    assert verdicts[:6] == ["failed", "failed", "infra", "known issue", "known issue", "passed"]


def test_the_verdict_filter_and_reset(open_page: Open) -> None:
    browser = open_page("example")
    for outcome, shown in (("failed", 2), ("known", 4)):
        find(browser, f".chip[data-o={outcome}]").click()
        assert len(column(browser, "job")) == shown
    assert find(browser, ".chip[data-o=known]").get_attribute("aria-pressed") == "true"
    assert "v=failed%2Cknown" in browser.current_url
    find(browser, "#toolbar [type=reset]").click()
    wait(browser, lambda b: len(column(b, "job")) == 101)
    assert "#" not in browser.current_url
    browser = open_page("example", "#v=failed&job=j0")
    assert find(browser, "#j0 .d").is_displayed(), "a link finds a job that is filtered away"


def test_a_failure_says_where_else_it_fails_and_leads_there(open_page: Open) -> None:
    browser = open_page("example", width=400)
    card = browser.find_element(By.XPATH, "//details[.//code[text()='quantized_ops/group_norm[SM8650-htp-8a8w]']]")
    assert card.find_element(By.CSS_SELECTOR, ".elsewhere-line").text.endswith(
        "Fails on V69, V75, passes on V79; passes here in 16a8w"
    )
    verdicts = [row.text for row in card.find_elements(By.CSS_SELECTOR, "table.elsewhere tbody .v")]
    assert verdicts == ["✗ failed", "✓ passed", "✓ passed", "△ infra"]
    card.find_element(By.CSS_SELECTOR, "table.elsewhere a.passed").click()
    assert active(browser).text == "quantized_ops/group_norm[SM8750-htp-8a8w]"


def test_the_toggle_switches_the_theme_and_the_system_decides_at_first(open_page: Open) -> None:
    def paper(browser: WebDriver) -> str:
        color: str = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        return color

    dark = paper(open_page("example", scheme="dark"))
    browser = open_page("example", scheme="light")
    light = paper(browser)
    assert light != dark
    for chosen, stored in ((dark, "dark"), (light, None)):

        def is_kept(browser: WebDriver, chosen: str = chosen, stored: str | None = stored) -> bool:
            if paper(browser) != chosen:
                find(browser, "#theme").click()
            assert paper(browser) == chosen
            assert browser.execute_script("return localStorage.getItem('farm-theme')") == stored
            return paper(open_page("example", scheme="light")) == chosen

        # Chromium under load may lose a value stored just before the page was left: the reader chooses again.
        WebDriverWait(browser, 60).until(is_kept, f"{chosen} after the page is opened again")


def test_a_cell_of_the_matrix_leads_to_its_job(open_page: Open) -> None:
    browser = open_page("example")
    find(browser, ".matrix td.infra a").click()
    assert active(browser).find_element(By.TAG_NAME, "code").text.startswith("quantized_ops/sdpa")
    find(browser, ".matrix td.passed a").click()
    row, detail = active(browser), find(browser, "#jobs-table tbody.open .d")
    assert (row.get_attribute("aria-expanded"), detail.is_displayed()) == ("true", True)
    wait(browser, lambda _: "Numerics" in detail.text)
    row.click()
    assert (row.get_attribute("aria-expanded"), detail.is_displayed()) == ("false", False)


def test_hostile_text_is_shown_and_not_run(open_page: Open) -> None:
    browser = open_page("hostile")
    assert browser.execute_script("return typeof window.pwned") == "undefined"
    reason = find(browser, ".card.failed .reason").text
    assert "<script>window.pwned=1</script>" in reason
    assert "\\u202eevil" in reason
    assert browser.execute_script("return document.images.length") == 0
    browser.get(f"{browser.current_url}#q=%3Cimg+src%3Dx+onerror%3Dalert(1)%3E&sort=-constructor&job=j0'")
    assert browser.execute_script("return typeof window.pwned") == "undefined"


def test_a_large_run_is_small_and_works(open_page: Open, pages: dict[str, Path]) -> None:
    assert pages["large"].stat().st_size < 6_000_000
    assert "characters cut here" in pages["large"].read_text(), "a long log is cut"
    browser = open_page("large")
    assert find(browser, "#shown").text == "2000 jobs"
    assert "show all 2000" in find(browser, "#more button").text
    find(browser, ".chip[data-o=failed]").click()
    assert len(column(browser, "job")) == 50
    sort_by(browser, "latency")
    numbers, _ = numbers_of(browser, "latency")
    assert numbers == sorted(numbers)


def test_a_link_unfolds_the_profile_with_bars_as_long_as_the_shares_and_a_divergence_is_marked(
    open_page: Open,
) -> None:
    browser = open_page("inside")
    folded = browser.find_elements(By.CSS_SELECTOR, "#profiles details")
    assert [one.get_attribute("open") for one in folded] == [None] * 3
    browser.execute_script("document.querySelector('#jobs-table a[href=\"#p4\"]').click()")
    wait(browser, lambda b: find(b, "#p4").is_displayed())
    rows = browser.execute_script("""
        return [...document.querySelectorAll("#p4 .nodes")[0].tBodies[0].rows].map(r => [r.cells[0].textContent,
        r.cells[5].textContent, r.querySelector(".part rect").getBoundingClientRect().width /
        r.querySelector(".part").getBoundingClientRect().width])""")
    assert rows[0][0] == "aten_convolution_default:OpId_26"
    for _, share, width in rows:
        assert abs(float(share.removesuffix(" %")) / 100 - width) < 0.002
    (marked,) = browser.find_elements(By.CSS_SELECTOR, ".layers tr.violates")
    assert marked.find_element(By.TAG_NAME, "th").text == "aten_convolution_1_default"
    assert [cell.text for cell in marked.find_elements(By.CSS_SELECTOR, ".bad")] == ["✗ 4.1", "0.710000", "0.9"]
    assert "likely cause: compiler" in find(browser, "#layers .reason").text


def test_the_first_screen_of_a_laptop_has_the_verdict_and_the_first_of_each_kind(open_page: Open) -> None:
    browser = open_page("known")
    see(browser, width=1366, height=768)
    groups = browser.find_elements(By.CSS_SELECTOR, ".triage section")
    assert [group.find_element(By.TAG_NAME, "h2").text for group in groups] == [
        "New failures 1", "Still failing 1", "Confirmed regressions 1", "Skipped 1", "Infrastructure trouble 2",
    ]  # fmt: skip
    for one in [find(browser, "h1"), *(group.find_element(By.TAG_NAME, "li") for group in groups)]:
        assert one.is_displayed()
        assert one.rect["y"] + one.rect["height"] <= 768
    groups[0].find_element(By.CSS_SELECTOR, "li a").click()
    assert active(browser).text.startswith("✗ failed")


def test_the_page_of_a_job_that_passed_is_unpacked_with_all_that_is_known(open_page: Open) -> None:
    browser = open_page("known", "#job=j0")
    wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#j0 .again"))
    page = find(browser, "#j0 .d")
    latency, trend = [one.text for one in page.find_elements(By.TAG_NAME, "figcaption")]
    assert latency.startswith("latency: p50 ")
    assert trend.startswith("SQNR over 30 runs"), "a virtual device has no trend of times"
    (link,) = page.find_elements(By.CSS_SELECTOR, ".files a")
    assert link.get_attribute("href").endswith("/artifacts/ab/ab/" + "ab" * 32)
    commands = [one.text.split()[1] for one in page.find_elements(By.CSS_SELECTOR, ".command code")]
    assert commands == ["run", "jobs", "jobs", "history", "show"]


def test_keys_lead_to_failures_and_back_and_can_be_turned_off(open_page: Open) -> None:
    browser = open_page("example")
    for key, case in (("n", "group_norm"), ("n", "index_select"), ("p", "group_norm")):
        active(browser).send_keys(key)
        assert case in active(browser).text
    active(browser).send_keys("m")
    assert active(browser).get_attribute("aria-label").startswith("Matrix of")
    cell = find(browser, ".matrix td a")
    browser.execute_script("arguments[0].focus()", cell)
    cell.send_keys(Keys.ARROW_RIGHT)
    assert active(browser).get_attribute("title").startswith("quantized_ops/add[SM8650-htp-16a8w]")
    press(browser, "?")
    assert find(browser, "#keys").is_displayed()
    find(browser, "#keys-on").click()
    find(browser, "#keys-close").click()
    assert not find(browser, "#keys").is_displayed()
    press(browser, "/")
    assert active(browser).get_attribute("id") != "q"
    browser.execute_script("localStorage.clear()")


def test_printed_it_is_the_first_screen_the_failures_and_the_matrix(open_page: Open) -> None:
    browser = open_page("known")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    sections = browser.find_elements(By.CSS_SELECTOR, "main > section")
    assert {one.get_attribute("id") for one in sections if one.is_displayed()} == {
        "failures", "regressions", "skipped", "known", "infra", "notes", "matrix", "devices", "fingerprint",
    }  # fmt: skip
    assert find(browser, ".triage").is_displayed()
    for control in ("#theme", ".copy", "#toolbar", "#help", ".bar"):
        assert not find(browser, control).is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_without_scripts_the_first_screen_the_failures_and_the_matrix_are_there(open_page: Open) -> None:
    browser = open_page("example")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser = open_page("known")
        for selector in ("h1", ".triage li a", "#failures .card .again", ".matrix td a", "#jobs-table tbody .spark"):
            assert find(browser, selector).is_displayed()
        assert not find(browser, "#toolbar").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_of_a_page_is_where_it_should_not_be(
    open_page: Open, pages: dict[str, Path], width: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = {}
    # The large run only repeats parts of the others.
    for name in pages.keys() - {"large", "few"}:
        browser = open_page(name, "#job=j0" if name == "known" else "", width=width)
        browser.execute_script(
            "[...document.querySelectorAll('main details')].slice(0, 3).forEach(o => { o.open = true })"
        )
        found[name] = flaws(browser)
        picture = f"report-{name}-{width}"
        keep_screenshot(browser, tmp_path_factory.getbasetemp(), picture, flawed=bool(found[name]))
    assert {name: what for name, what in found.items() if what} == {}


def test_every_page_that_is_a_file_is_looked_at(pages: dict[str, Path]) -> None:
    templates = Path(farm.__file__).parent.parent / "reports"
    of_pages = {one.name.partition(".")[0] for one in templates.glob("*.j2") if '{% extends "' in one.read_text()}
    # tests/serve/test_browser.py looks at these pages.
    served = {page.facts.template.partition(".")[0] for page in PAGES if page.path != "/diff"}
    assert of_pages - served - {"page", "login", "error", "done", "run"} == {"compare", "nightly_run", "diff"}
    assert {"compare", "nightly_run", "diff"} <= pages.keys()


def test_axe_finds_nothing_serious(open_page: Open) -> None:
    found = {}

    def examine(state: str, scheme: str, width: int) -> None:
        see(browser, scheme=scheme, width=width)
        found[state, scheme] = violations(browser)

    browser = open_page("compare")
    browser.execute_script(UNFOLD)
    examine("comparison", "light", 1280)
    examine("comparison", "dark", 400)
    browser = open_page("few")
    examine("the first screen", "light", 1280)
    browser.execute_script("location.hash = '#job=j0'")
    wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#j0 .again"))
    browser.execute_script(UNFOLD)
    for scheme in ("dark", "light"):
        examine("unfolded", scheme, 400)
    press(browser, "?")
    assert find(browser, "#keys").is_displayed()
    for scheme in ("dark", "light"):
        examine("the keys", scheme, 400)
    assert {state: findings for state, findings in found.items() if findings} == {}
