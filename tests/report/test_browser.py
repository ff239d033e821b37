"""The page in real headless Chromium, opened from file://, as a reader opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chromium import flaws, keep_screenshot, look, requested
from compare.made import everything
from report_context import context, with_skipped
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

import farm
from farm.dispatch.nightly.render import render_nightly_run
from farm.dispatch.nightly.templates import SAMPLE
from farm.report.html.compare import render_compare
from farm.report.html.page import render_diff
from farm.report.html.page_of_run import write_html
from farm.report.model.diff import diff_runs
from farm.serve.pages.all import PAGES
from farm.store.view import RunView

Open = Callable[..., WebDriver]


@pytest.fixture(scope="module")
def pages(
    tmp_path_factory: pytest.TempPathFactory,
    example_run: RunView,
    inside_run: RunView,
    hostile_run: RunView,
    large_run: RunView,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    views = {"example": example_run, "inside": inside_run, "hostile": hostile_run, "large": large_run}
    for name, view in views.items():
        found[name] = folder / f"{name}.html"
        write_html(view, found[name])
    found["known"] = folder / "known.html"
    known = with_skipped(example_run)
    write_html(known, found["known"], context(known))
    made = {
        "compare": render_compare(everything()),
        "nightly_run": render_nightly_run(
            SAMPLE, [msgspec.structs.replace(SAMPLE, id="20260228-020000-000000")], "x/", ""
        ),
        "diff": render_diff(diff_runs(example_run, inside_run), virtual=True),
    }
    for name, html in made.items():
        found[name] = folder / f"{name}.html"
        found[name].write_text(html, encoding="utf-8")
    return found


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


def shown_rows(browser: WebDriver) -> list[str]:
    script = """return [...document.querySelectorAll("#jobs-table tbody")].filter(b => b.checkVisibility())
                .map(b => b.querySelector("th a").textContent)"""
    found: list[str] = browser.execute_script(script)
    return found


def column(browser: WebDriver, key: str) -> list[str]:
    script = """const at = [...document.querySelectorAll("#jobs-table thead th")].findIndex(h => h.dataset.k === arguments[0]);
                return [...document.querySelectorAll("#jobs-table tbody")].filter(b => b.checkVisibility())
                .map(b => b.rows[0].cells[at].textContent)"""  # noqa: E501
    found: list[str] = browser.execute_script(script, key)
    return found


def wait(browser: WebDriver, condition: Callable[[WebDriver], Any]) -> None:
    WebDriverWait(browser, 20, poll_frequency=0.05).until(condition)


def head(browser: WebDriver, key: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, f"th[data-k={key}]")


def sort_by(browser: WebDriver, key: str) -> None:
    browser.execute_script("arguments[0].click()", head(browser, key).find_element(By.TAG_NAME, "button"))


def chip(browser: WebDriver, outcome: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, f".chip[data-o={outcome}]")


def test_it_opens_from_a_file_without_errors_or_requests(open_page: Open) -> None:
    browser = open_page("example")
    assert browser.find_element(By.TAG_NAME, "h1").text.startswith("96 passed, 2 failed")
    assert browser.find_element(By.CSS_SELECTOR, ".banner.virtual").is_displayed()
    assert len(shown_rows(browser)) == 101


def test_slash_searches_and_the_address_keeps_it(open_page: Open) -> None:
    browser = open_page("example")
    browser.find_element(By.TAG_NAME, "body").send_keys("/")
    search = browser.switch_to.active_element
    assert search.get_attribute("id") == "q"
    search.send_keys("conv2d SM8750")
    wait(browser, lambda b: len(shown_rows(b)) < 101)
    assert shown_rows(browser) == [
        f"quantized_ops/{case}[SM8750-htp-{precision}]"
        for case in ("conv2d", "conv2d_relu", "depthwise_conv2d")
        for precision in ("8a8w", "16a8w")
    ]
    assert browser.find_element(By.ID, "shown").text == "6 of 101 jobs"
    kept = browser.current_url.partition("#")[2]
    browser = open_page("example", f"#{kept}")
    assert len(shown_rows(browser)) == 6
    browser.find_element(By.ID, "q").send_keys(Keys.ESCAPE)
    assert len(shown_rows(browser)) == 101


def test_the_search_finds_reasons_and_says_when_there_is_nothing(open_page: Open) -> None:
    browser = open_page("example", "#q=went+offline")
    assert shown_rows(browser) == ["quantized_ops/sdpa[SM8750-htp-8a8w]"]
    search = browser.find_element(By.ID, "q")
    search.send_keys(" nonsense")
    wait(browser, lambda b: b.find_element(By.ID, "none").is_displayed())
    assert shown_rows(browser) == []


def test_numbers_sort_as_numbers_and_missing_ones_last(open_page: Open) -> None:
    browser = open_page("example")
    for key in ("htp_cycles", "pte", "latency", "sqnr_fp32"):
        for direction in ("ascending", "descending"):
            sort_by(browser, key)
            assert head(browser, key).get_attribute("aria-sort") == direction
            values = column(browser, key)
            numbers = [float(value.replace(",", "")) for value in values if value != "–"]  # noqa: RUF001
            assert numbers == sorted(numbers, reverse=direction == "descending")
            assert len(numbers) >= 98
            assert set(values[len(numbers) :]) == {"–"}  # noqa: RUF001
        sort_by(browser, key)
        assert head(browser, key).get_attribute("aria-sort") == "none"
        assert shown_rows(browser)[0] == "quantized_ops/add[SM8650-htp-8a8w]"


def test_verdicts_sort_by_what_needs_attention(open_page: Open) -> None:
    browser = open_page("example")
    sort_by(browser, "verdict")
    verdicts = [text.split(maxsplit=1)[1] for text in column(browser, "verdict")]
    assert verdicts[:6] == ["failed", "failed", "infra", "known issue", "known issue", "passed"]


def test_the_verdict_filter_and_reset(open_page: Open) -> None:
    browser = open_page("example")
    chip(browser, "failed").click()
    assert len(shown_rows(browser)) == 2
    chip(browser, "known").click()
    assert len(shown_rows(browser)) == 4
    assert chip(browser, "known").get_attribute("aria-pressed") == "true"
    assert "v=failed%2Cknown" in browser.current_url
    browser.find_element(By.CSS_SELECTOR, "#toolbar [type=reset]").click()
    wait(browser, lambda b: len(shown_rows(b)) == 101)
    assert "#" not in browser.current_url


@pytest.mark.parametrize("width", [1280, 400])
def test_a_failure_says_where_else_it_fails_and_leads_there(open_page: Open, width: int) -> None:
    browser = open_page("example", width=width)
    card = browser.find_element(By.XPATH, "//details[.//code[text()='quantized_ops/group_norm[SM8650-htp-8a8w]']]")
    answer = card.find_element(By.CSS_SELECTOR, ".elsewhere-line").text
    assert answer.endswith("Fails on V69, V75, passes on V79; passes here in 16a8w")
    table = card.find_element(By.CSS_SELECTOR, "table.elsewhere")
    assert table.is_displayed()
    verdicts = [row.text for row in table.find_elements(By.CSS_SELECTOR, "tbody .v")]
    assert verdicts == ["✗ failed", "✓ passed", "✓ passed", "△ infra"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    table.find_element(By.CSS_SELECTOR, "a.passed").click()
    assert browser.switch_to.active_element.text == "quantized_ops/group_norm[SM8750-htp-8a8w]"


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
                browser.find_element(By.ID, "theme").click()
            assert paper(browser) == chosen
            assert browser.execute_script("return localStorage.getItem('farm-theme')") == stored
            return paper(open_page("example", scheme="light")) == chosen

        # Chromium under load may lose a value stored just before the page was left: the reader chooses again.
        WebDriverWait(browser, 60).until(is_kept, f"{chosen} after the page is opened again")


def test_a_cell_of_the_matrix_leads_to_its_job(open_page: Open) -> None:
    browser = open_page("example")
    (cell,) = browser.find_elements(By.CSS_SELECTOR, ".matrix td.infra a")
    assert "infra" in cell.text
    cell.click()
    assert browser.switch_to.active_element.find_element(By.TAG_NAME, "code").text.startswith("quantized_ops/sdpa")
    passed = browser.find_element(By.CSS_SELECTOR, ".matrix td.passed a")
    passed.click()
    row = browser.switch_to.active_element
    assert row.get_attribute("aria-expanded") == "true"
    detail = browser.find_element(By.CSS_SELECTOR, "#jobs-table tbody.open .d")
    assert detail.is_displayed()
    wait(browser, lambda _: "Numerics" in detail.text)
    assert "farm jobs rerun" in detail.text
    row.click()
    assert row.get_attribute("aria-expanded") == "false"
    assert not detail.is_displayed()


def test_a_link_to_a_job_finds_it_even_when_it_is_filtered_away(open_page: Open) -> None:
    browser = open_page("example", "#v=failed&job=j0")
    assert browser.find_element(By.CSS_SELECTOR, "#j0 .d").is_displayed()


def test_hostile_text_is_shown_and_not_run(open_page: Open) -> None:
    browser = open_page("hostile")
    assert browser.execute_script("return typeof window.pwned") == "undefined"
    reason = browser.find_element(By.CSS_SELECTOR, ".card.failed .reason").text
    assert "<script>window.pwned=1</script>" in reason
    assert "\\u202eevil" in reason
    assert browser.execute_script("return document.images.length") == 0
    browser.get(f"{browser.current_url}#q=%3Cimg+src%3Dx+onerror%3Dalert(1)%3E&sort=-constructor&job=j0'")
    assert browser.execute_script("return typeof window.pwned") == "undefined"


@pytest.mark.parametrize("name", ["example", "inside", "hostile"])
def test_on_a_narrow_screen_tables_scroll_and_the_page_does_not(open_page: Open, name: str) -> None:
    browser = open_page(name, width=400)
    browser.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
    wide = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]


def test_a_large_run_is_small_and_works(open_page: Open, pages: dict[str, Path]) -> None:
    assert pages["large"].stat().st_size < 6_000_000
    browser = open_page("large")
    assert browser.find_element(By.ID, "shown").text == "2000 jobs"
    more = browser.find_element(By.CSS_SELECTOR, "#more button")
    assert "show all 2000" in more.text
    chip(browser, "failed").click()
    assert len(shown_rows(browser)) == 50
    sort_by(browser, "latency")
    numbers = [float(value.replace(",", "")) for value in column(browser, "latency")]
    assert numbers == sorted(numbers)


def test_colours_have_enough_contrast(open_page: Open) -> None:
    script = """
    const parse = (c) => c.match(/[\\d.]+/g).map(Number);
    const lum = (c) => { const [r, g, b] = parse(c).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
      return .2126 * r + .7152 * g + .0722 * b; };
    const ground = (e) => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
      if (parse(c).length === 3 || parse(c)[3] === 1) return c; } return "rgb(255, 255, 255)"; };
    document.querySelectorAll("details").forEach(one => { one.open = true });
    const bad = new Set();
    for (const e of document.querySelectorAll("body *")) {
      if (!e.checkVisibility() || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
      const [a, b] = [lum(getComputedStyle(e).color), lum(ground(e))].sort((x, y) => y - x);
      if ((a + .05) / (b + .05) < 4.5) bad.add(`${e.tagName}.${e.className} ${getComputedStyle(e).color} on ${ground(e)}`);
    }
    return [...bad]"""  # noqa: E501
    for scheme in ("light", "dark"):
        for name in ("example", "inside"):
            assert open_page(name, scheme=scheme).execute_script(script) == []


def test_a_link_in_the_table_unfolds_the_profile_with_bars_as_long_as_the_shares(open_page: Open) -> None:
    browser = open_page("inside")
    assert [one.get_attribute("open") for one in browser.find_elements(By.CSS_SELECTOR, "#profiles details")] == [
        None
    ] * 3
    browser.execute_script("document.querySelector('#jobs-table a[href=\"#p4\"]').click()")
    wait(browser, lambda b: b.find_element(By.ID, "p4").is_displayed())
    script = """return [...document.querySelectorAll("#p4 .nodes")[0].tBodies[0].rows].map(r => [r.cells[0].textContent,
        r.cells[5].textContent, r.querySelector(".part rect").getBoundingClientRect().width /
        r.querySelector(".part").getBoundingClientRect().width])"""
    rows = browser.execute_script(script)
    assert rows[0][0] == "aten_convolution_default:OpId_26"
    for _, share, width in rows:
        assert abs(float(share.removesuffix(" %")) / 100 - width) < 0.002


def test_the_first_divergence_is_marked(open_page: Open) -> None:
    browser = open_page("inside")
    (marked,) = browser.find_elements(By.CSS_SELECTOR, ".layers tr.violates")
    assert marked.find_element(By.TAG_NAME, "th").text == "aten_convolution_1_default"
    assert [cell.text for cell in marked.find_elements(By.CSS_SELECTOR, ".bad")] == ["✗ 4.1", "0.710000", "0.9"]
    assert "likely cause: compiler" in browser.find_element(By.CSS_SELECTOR, "#layers .reason").text


def test_the_first_screen_of_a_laptop_has_the_verdict_and_the_first_of_each_kind(open_page: Open) -> None:
    browser = open_page("known")
    metrics = {"width": 1366, "height": 768, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    groups = browser.find_elements(By.CSS_SELECTOR, ".triage section")
    assert [group.find_element(By.TAG_NAME, "h2").text for group in groups] == [
        "New failures 1", "Still failing 1", "Confirmed regressions 1", "Skipped 1", "Infrastructure trouble 2",
    ]  # fmt: skip
    for one in [browser.find_element(By.TAG_NAME, "h1"), *(group.find_element(By.TAG_NAME, "li") for group in groups)]:
        assert one.is_displayed()
        assert one.rect["y"] + one.rect["height"] <= 768
    groups[0].find_element(By.CSS_SELECTOR, "li a").click()
    assert browser.switch_to.active_element.text.startswith("✗ failed")


def test_the_page_of_a_job_that_passed_is_unpacked_with_all_that_is_known(open_page: Open) -> None:
    browser = open_page("known", "#job=j0")
    wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "#j0 .again"))
    page = browser.find_element(By.CSS_SELECTOR, "#j0 .d")
    captions = [one.text for one in page.find_elements(By.TAG_NAME, "figcaption")]
    assert captions[0].startswith("latency: p50 ")
    # A virtual device has no trend of times.
    assert captions[1].startswith("SQNR over 30 runs")
    (link,) = page.find_elements(By.CSS_SELECTOR, ".files a")
    assert link.get_attribute("href").endswith("/artifacts/ab/ab/" + "ab" * 32)
    commands = [one.text for one in page.find_elements(By.CSS_SELECTOR, ".command code")]
    assert [" ".join(command.split()[1:3]) for command in commands if " jobs " in command] == ["jobs rerun"] * 2
    assert [command.split()[1] for command in commands] == ["run", "jobs", "jobs", "history", "show"]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 1280


def test_keys_lead_to_failures_and_back_and_can_be_turned_off(open_page: Open) -> None:
    browser = open_page("example")
    body = browser.find_element(By.TAG_NAME, "body")
    body.send_keys("n")
    assert "group_norm" in browser.switch_to.active_element.text
    browser.switch_to.active_element.send_keys("n")
    assert "index_select" in browser.switch_to.active_element.text
    browser.switch_to.active_element.send_keys("p")
    assert "group_norm" in browser.switch_to.active_element.text
    browser.switch_to.active_element.send_keys("m")
    assert browser.switch_to.active_element.get_attribute("aria-label").startswith("Matrix of")
    cell = browser.find_element(By.CSS_SELECTOR, ".matrix td a")
    browser.execute_script("arguments[0].focus()", cell)
    cell.send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element.get_attribute("title").startswith("quantized_ops/add[SM8650-htp-16a8w]")
    body.send_keys("?")
    keys = browser.find_element(By.ID, "keys")
    assert keys.is_displayed()
    browser.find_element(By.ID, "keys-on").click()
    browser.find_element(By.ID, "keys-close").click()
    assert not keys.is_displayed()
    body.send_keys("/")
    assert browser.switch_to.active_element.get_attribute("id") != "q"
    browser.execute_script("localStorage.clear()")


def test_the_first_thing_that_tab_reaches_leads_past_the_bar(open_page: Open) -> None:
    browser = open_page("example")
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    skip = browser.switch_to.active_element
    assert skip.text == "Skip to the content"
    skip.send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "main"


def test_printed_it_is_the_first_screen_the_failures_and_the_matrix(open_page: Open) -> None:
    browser = open_page("known")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    shown = {
        one.get_attribute("id")
        for one in browser.find_elements(By.CSS_SELECTOR, "main > section")
        if one.is_displayed()
    }
    assert shown == {
        "failures", "regressions", "skipped", "known", "infra", "notes", "matrix", "devices", "fingerprint",
    }  # fmt: skip
    assert browser.find_element(By.CSS_SELECTOR, ".triage").is_displayed()
    for control in ("#theme", ".copy", "#toolbar", "#help", ".bar"):
        assert not browser.find_element(By.CSS_SELECTOR, control).is_displayed()
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_without_scripts_the_first_screen_the_failures_and_the_matrix_are_there(open_page: Open) -> None:
    browser = open_page("example")
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser = open_page("known")
        for selector in ("h1", ".triage li a", "#failures .card .again", ".matrix td a", "#jobs-table tbody .spark"):
            assert browser.find_element(By.CSS_SELECTOR, selector).is_displayed()
        assert not browser.find_element(By.ID, "toolbar").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


@pytest.mark.parametrize("width", [1280, pytest.param(400, marks=pytest.mark.whole)])
def test_nothing_of_a_page_is_where_it_should_not_be(
    browser: WebDriver, pages: dict[str, Path], width: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    browser.get_log("browser")
    unfold = "[...document.querySelectorAll('main details')].slice(0, 3).forEach(one => { one.open = true })"
    found = {}
    # The large run only repeats parts of the others.
    for name in pages.keys() - {"large"}:
        look(browser, pages[name], "#job=j0" if name == "known" else "", width=width)
        browser.execute_script(unfold)
        found[name] = flaws(browser)
        folder = tmp_path_factory.getbasetemp()
        keep_screenshot(browser, folder, f"report-{name}-{width}", flawed=bool(found[name]))
    assert {name: what for name, what in found.items() if what} == {}
    assert browser.get_log("browser") == []


def test_every_page_that_is_a_file_is_looked_at(pages: dict[str, Path]) -> None:
    templates = Path(farm.__file__).parent.parent / "reports"
    of_pages = {one.name.partition(".")[0] for one in templates.glob("*.j2") if '{% extends "' in one.read_text()}
    # tests/serve/test_browser.py looks at these pages.
    served = {page.facts.template.partition(".")[0] for page in PAGES if page.path != "/diff"}
    assert of_pages - served - {"page", "login", "error", "done"} == {"run", "compare", "nightly_run", "diff"}
    assert {"example", "compare", "nightly_run", "diff"} <= pages.keys()
