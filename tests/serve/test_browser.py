"""Served pages in real headless Chromium: live progress, accessibility, and no violation of the policy."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote

import chromium
import msgspec
import pytest
from made_runs import take
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait
from shared_rows import shards, submit

from farm.base.config.settings import Config
from farm.devices.device import HealthEvent
from farm.results.attempt import Attempt, Stage, Verdict
from farm.serve.pages.all import PAGES as ALL_PAGES
from farm.store.accounts import Role
from farm.store.store import open_store

from .conftest import Filled, Server, running

JOB = "quantized_ops%2Fsoftmax%5BSM8650-htp-8a8w%5D"
PAGES = ("", "diff?a=latest~2&b=latest~1", "devices", "history?job=quantized_ops/conv2d", "runs/latest~1",
         "nowhere", "grid", "nightly", "nightly/{nightly_run}", "suites",
         "suites/quantized_ops", "hosts", "hosts/bench", "toolchains", "toolchains/-", "alerts")  # fmt: skip
# Looked at with the forms of a user who signed in.
PAGES_WITH_FORMS = ("runs", "queue", "devices/pixel-left", "alerts/1", f"jobs/{JOB}")
VIEWS = (("light", 1366), ("dark", 400))


def show(browser: WebDriver, url: str, *, scheme: str = "light", width: int = 1366) -> None:
    chromium.see(browser, scheme=scheme, width=width, height=768)
    browser.get(url)


def wait(browser: WebDriver, condition: Callable[[WebDriver], Any]) -> Any:
    return WebDriverWait(browser, 30, poll_frequency=0.05).until(condition)


def complaints(browser: WebDriver) -> list[str]:
    """Return the log of the browser, without answers other than 200, which these tests request on purpose."""
    found = [one["message"] for one in browser.get_log("browser") if one["level"] in ("SEVERE", "WARNING")]
    return [message for message in found if "Failed to load resource" not in message]


def find(browser: WebDriver, selector: str) -> Any:
    return browser.find_element(By.CSS_SELECTOR, selector)


Look = Callable[[str], None]


@pytest.fixture
def look(browser: WebDriver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Look]:
    """Return a function that asserts that a page with its forms unfolded has no flaw, light and wide, dark and narrow.

    At the end, nothing was written to the log of the browser.
    """

    def look(name: str) -> None:
        found = {}
        unfold = "document.querySelectorAll('details.action').forEach((one) => { one.open = arguments[0]; })"
        browser.execute_script(unfold, True)
        for scheme, width in VIEWS:
            chromium.see(browser, scheme=scheme, width=width, height=768)
            found[scheme, width] = flaws = chromium.violations(browser) + chromium.flaws(browser)
            picture = f"served-{name}-{scheme}-{width}"
            chromium.keep_screenshot(browser, tmp_path_factory.getbasetemp(), picture, flawed=bool(flaws))
        browser.execute_script(unfold, False)
        chromium.see(browser, width=1366, height=768)
        assert {view: flaws for view, flaws in found.items() if flaws} == {}, name
        assert browser.execute_script("return window.pwned") is None

    browser.get_log("browser")
    yield look
    assert complaints(browser) == []


def test_every_page_is_accessible_and_nothing_of_it_is_where_it_should_not_be(
    browser: WebDriver, server_of_unchanged: Server, unchanged: Filled, look: Look
) -> None:
    for path in PAGES:
        show(browser, f"{server_of_unchanged.url}/{path.format(nightly_run=unchanged.runs[3])}")
        look(path)


def test_every_page_is_looked_at() -> None:
    asked = [f"/{path.partition('?')[0]}" for path in (*PAGES, *PAGES_WITH_FORMS)]
    for page in ALL_PAGES:
        if page.facts.template:
            pattern = re.sub(r"\\{\w+:(str|path|int)\\}", ".+", re.escape(page.path))
            assert any(re.fullmatch(pattern, path) for path in asked), page.path


def test_a_run_moves_on_while_somebody_looks_and_keeps_the_focus(
    browser: WebDriver, server: Server, filled: Filled
) -> None:
    show(browser, f"{server.url}/runs")
    row = f'tr[data-run="{filled.live}"]'
    assert find(browser, f"{row} .js-progress-text").text == "1 of 8 jobs: 1 passed"
    box = find(browser, 'select[name="user"]')
    box.click()
    wait(browser, lambda b: find(b, "#live-note").text == "Live.")
    for job in filled.jobs[1:3]:
        filled.store.record_attempt(filled.live, Attempt(job.id, Verdict.FAILED, Stage.NUMERICS, "sqnr", ""))
    wait(browser, lambda b: find(b, f"{row} .js-progress-text").text == "3 of 8 jobs: 2 failed, 1 passed")
    assert browser.execute_script("return arguments[0].value", find(browser, f"{row} progress")) == 3
    filled.store.finish_run(filled.live, 1)
    wait(browser, lambda b: "has ended" in find(b, "#live").text)
    assert find(browser, f"{row} .js-ended").text == "✗ failed"
    assert find(browser, "#live").get_attribute("aria-live") == "polite"
    assert browser.switch_to.active_element == box
    assert complaints(browser) == []


def test_devices_change_hands_while_somebody_looks(browser: WebDriver, server: Server, filled: Filled) -> None:
    show(browser, f"{server.url}/devices/pixel-left")
    wait(browser, lambda b: find(b, "#live-note").text == "Live.")
    assert find(browser, ".js-held").text == "nobody"
    show(browser, f"{server.url}/devices")
    row = 'tr[data-device="R5CX1"]'
    wait(browser, lambda b: find(b, "#live-note").text == "Live.")
    take(filled.store, "R5CX1", "ada")
    wait(browser, lambda b: find(b, f"{row} .js-state").text == "leased")
    assert find(browser, f"{row} .js-held").text == "ada, farm run"
    filled.store.devices.record_health(HealthEvent("R5CX1", "infra", "suspect", "cable"))
    wait(browser, lambda b: "R5CX1 is suspect" in find(b, "#live").text)
    assert find(browser, f"{row} .js-health").text == "△ suspect"


def test_what_is_chosen_is_in_the_address_and_nothing_else(
    browser: WebDriver, server_of_unchanged: Server, unchanged: Filled
) -> None:
    show(browser, f"{server_of_unchanged.url}/runs")
    browser.execute_script("arguments[0].value = 'grace'", find(browser, 'select[name="user"]'))
    find(browser, "form.filters button").click()
    wait(browser, lambda b: b.current_url == f"{server_of_unchanged.url}/runs?user=grace")
    assert len(browser.find_elements(By.CSS_SELECTOR, "tr[data-run]")) == 2
    show(browser, f"{server_of_unchanged.url}/runs")
    find(browser, 'form[action="/diff"] button').click()
    wait(browser, lambda b: b.current_url == f"{server_of_unchanged.url}/diff?b={unchanged.live}&a={unchanged.runs[3]}")


def test_the_grid_is_used_by_keys_alone(browser: WebDriver, server_of_unchanged: Server, unchanged: Filled) -> None:
    show(browser, f"{server_of_unchanged.url}/grid")
    wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, "tbody .cells > a"))
    link = find(browser, "tbody th a")
    browser.execute_script("arguments[0].focus()", link)
    press = webdriver.ActionChains(browser)
    press.send_keys(Keys.TAB, Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_LEFT).perform()
    cell = browser.switch_to.active_element
    assert cell.get_attribute("class") == "failed"
    assert cell.get_attribute("aria-label").startswith("failed, 20")
    # The tab key stops once in each row.
    assert len(browser.find_elements(By.CSS_SELECTOR, 'tbody .cells > a[tabindex="0"]')) == 8
    cell.send_keys(Keys.ENTER)
    wait(browser, lambda b: f"?nightly_run={unchanged.runs[3]}" in b.current_url)
    assert "✗ failed" in find(browser, "h1").text
    assert complaints(browser) == []


def test_a_chart_names_run_and_samples_in_any_time_zone_and_a_table_has_the_numbers(
    browser: WebDriver, server_of_unchanged: Server, unchanged: Filled
) -> None:
    browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Tokyo"})
    show(browser, f"{server_of_unchanged.url}/alerts/1")
    wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, ".chart .xtick"))
    shown, stored = browser.execute_script(
        "const figure = document.querySelector('figure[data-plot]');"
        "const plot = JSON.parse(document.getElementById(figure.dataset.plot).textContent);"
        "return [figure.querySelector('.chart').calcdata[0][0].x, plot.series[0].points[0].time_ms];"
    )
    browser.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})
    assert shown == stored, "as in the tables"
    texts = browser.execute_script("return document.querySelector('.chart').data.map((one) => one.text).flat()")
    assert any(f"run {unchanged.runs[3]}" in text and "3 samples" in text for text in texts if text)
    assert any("alert 1" in text for text in texts if text)
    assert [find(browser, f".chart .{axis}title").text for axis in "xy"] == ["time (UTC)", "latency (ms)"]
    ink = "return getComputedStyle(document.querySelector('.chart .ytitle')).fill"
    before = browser.execute_script(ink)
    find(browser, "#theme").click()
    wait(browser, lambda b: b.execute_script(ink) != before)
    find(browser, "#theme").click()
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert unchanged.runs[3] in find(browser, "table").text
    assert complaints(browser) == []


def test_a_file_is_shown_in_the_page_of_its_job(browser: WebDriver, server_of_unchanged: Server) -> None:
    show(browser, f"{server_of_unchanged.url}/jobs/{JOB}?run=latest~1")
    find(browser, ".files-list summary").click()
    wait(browser, lambda b: b.find_elements(By.CSS_SELECTOR, ".files-list pre"))
    assert find(browser, ".files-list pre").text == "an etdump"


def test_the_report_of_a_run_is_the_file_with_a_way_home(browser: WebDriver, server_of_unchanged: Server) -> None:
    show(browser, f"{server_of_unchanged.url}/runs/latest~1/report#q=softmax")
    assert len([one for one in browser.find_elements(By.CSS_SELECTOR, "#jobs-table tbody") if one.is_displayed()]) == 2
    find(browser, "a.brand").click()
    wait(browser, lambda b: b.current_url == f"{server_of_unchanged.url}/")
    assert complaints(browser) == []


def sign_in(browser: WebDriver, server: Server, token: str, path: str) -> None:
    show(browser, f"{server.url}/login?next={quote(path, safe='')}")
    # A page gives its field the focus a moment after it is there.
    wait(browser, lambda b: b.switch_to.active_element.get_attribute("name") == "token")
    browser.switch_to.active_element.send_keys(token + "\n")
    wait(browser, lambda b: b.current_url == f"{server.url}{path}")


def press(browser: WebDriver, name: str, /, **fields: str) -> str:
    """Send the form of an action with keys alone, and return the text of the next page."""
    form = find(browser, f'form[action="/actions/{name}"]')
    inside = form.find_elements(By.XPATH, "ancestor::details[1]/summary")
    if inside:
        inside[0].send_keys(Keys.ENTER)
        wait(browser, lambda _: form.is_displayed())
    for field, text in fields.items():
        place = form.find_element(By.NAME, field)
        if place.get_attribute("type") == "datetime-local":
            # The order of its parts depends on the language of the browser.
            browser.execute_script("arguments[0].value = arguments[1]", place, text)
        elif place.tag_name == "select":
            place.send_keys(text)
        else:
            place.clear()
            place.send_keys(text)
    form.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
    wait(browser, lambda b: b.current_url.endswith(f"/actions/{name}"))
    output: str = find(browser, "main").text
    for link in browser.find_elements(By.LINK_TEXT, "Back"):
        link.send_keys(Keys.ENTER)
        wait(browser, lambda b: "/actions/" not in b.current_url)
    return output


def test_a_device_is_leased_later_given_back_and_taken_out_of_service_on_its_page(
    browser: WebDriver, server: Server, filled: Filled, started: list[list[str]], look: Look
) -> None:
    token, store = filled.store.accounts.add("root", Role.OPERATOR), filled.store
    later = datetime.now().astimezone().replace(second=0, microsecond=0) + timedelta(days=1)
    show(browser, f"{server.url}/login")
    look("login")
    sign_in(browser, server, token, "/devices/pixel-left")
    assert find(browser, ".who").text == "root, operator"
    output = press(browser, "lease", seconds="4 hours", from_time=f"{later:%Y-%m-%dT%H:%M}")
    assert "pixel-left (SM8650, hardware) is yours from" in output
    [lease] = store.leases.upcoming()
    assert (lease.reserved_for, lease.reserved_from_ms) == ("root", round(later.timestamp() * 1000))
    assert lease.reserved_until_ms - lease.reserved_from_ms == 4 * 3_600_000
    assert f"{later:%Y-%m-%d %H:%M}" in find(browser, "#reservations-h + div table").text
    look("device")
    for action, fields, says in (
        ("release", {}, "is given back"), ("lease", {}, "is yours until"),
        ("disable", {"note": "a new battery"}, "is out of service"), ("enable", {}, "is in service"),
        ("check", {}, "started"),
    ):  # fmt: skip
        assert says in press(browser, action, **fields)
    find(browser, 'form[action="/logout"] button').click()
    wait(browser, lambda b: b.current_url == f"{server.url}/login")
    assert started == [["root", "devices", "check", "--", "R5CX1"]]


def test_an_alert_is_assigned_and_accepted_and_a_job_runs_again_on_their_pages(
    browser: WebDriver, server: Server, filled: Filled, started: list[list[str]], look: Look
) -> None:
    token, store = filled.store.accounts.add("eve", Role.DEVELOPER), filled.store
    sign_in(browser, server, token, "/alerts/1")
    look("alert")
    press(browser, "assign", state="acknowledged", note="the new tiling")
    remark = store.alerts.remarks(["alert:1"])["alert:1"][-1]
    assert (remark.user, remark.owner, remark.state) == ("eve", "eve", "acknowledged")
    assert "eve" in find(browser, "dl.facts").text
    assert "accepted: " in press(browser, "accept", note="faster elsewhere")
    assert store.alerts.get(1).state == "accepted"
    assert not browser.find_elements(By.CSS_SELECTOR, 'form[action="/actions/accept"]')
    show(browser, f"{server.url}/jobs/{JOB}?run=latest~1")
    look("job")
    press(browser, "rerun")
    press(browser, "assign", note="mine")
    show(browser, f"{server.url}/runs")
    look("runs")
    press(browser, "run", suite="smoke", soc="SM8650", name="from the page")
    assert "expected names" in press(browser, "run", suite="/etc", soc="SM8650")
    assert browser.current_url == f"{server.url}/runs"
    assert store.alerts.remarks([f"job:{unquote(JOB)}"])[f"job:{unquote(JOB)}"][-1].note == "mine"
    assert started == [
        ["eve", "jobs", "rerun", f"--run={filled.runs[3]}", "--", unquote(JOB)],
        ["eve", "run", "--suite=smoke", "--soc=SM8650", "--name=from the page"],
    ]


def test_a_submitted_run_is_cancelled_on_its_page(
    browser: WebDriver, config: Config, new_store: Callable[[str], str], look: Look
) -> None:
    shared = msgspec.structs.replace(config, store_url=new_store("cancelled"))
    with open_store(shared.store_url) as store:
        token = store.accounts.add("eve", Role.DEVELOPER)
        own, other = (submit(store, shards(1), user) for user in ("eve", "ada"))
        with running(shared) as server:
            sign_in(browser, server, token, f"/runs/{other}")
            assert not browser.find_elements(By.CSS_SELECTOR, 'form[action="/actions/cancel"]')
            show(browser, f"{server.url}/runs/{own}")
            look("submitted")
            assert f"run {own} is cancelled" in press(browser, "cancel")
            assert browser.current_url == f"{server.url}/runs/{own}"
            show(browser, f"{server.url}/queue")
            look("queue")
            assert not browser.find_elements(By.CSS_SELECTOR, 'form[action="/actions/cancel"]')
        orders = {one.run_id: one.cancelled_by for one in map(store.cluster.order, (own, other)) if one is not None}
    assert orders == {own: "eve", other: ""}
