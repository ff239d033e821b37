"""Findings of axe in a report, in the states that users see. axe-core comes with a development dependency."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from chromium import look, see, violations
from compare.made import everything
from report_context import context, with_skipped
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from farm.report.html.compare import render_compare
from farm.report.html.page_of_run import write_html
from farm.results.attempt import Verdict
from farm.store.view import RunView

STATES = {
    "the first screen": "",
    "a failure": "#failures",
    "the matrix": "#matrix",
    "a job that passed": "#job=j0",
}


@pytest.fixture(scope="module")
def page(inside_run: RunView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A job of each kind is enough, and axe takes long for a large page.
    odd = [job for job in inside_run.jobs[9:] if len(job.attempts) > 1 or job.attempts[0].verdict is not Verdict.PASSED]
    view = with_skipped(msgspec.structs.replace(inside_run, jobs=(*inside_run.jobs[:9], *odd)))
    path = tmp_path_factory.mktemp("pages") / "report.html"
    write_html(view, path, context(view))
    return path


def both(browser: WebDriver, width: int) -> dict[str, list[str]]:
    """Return the findings of axe by colour scheme, where it has any."""
    found = {}
    for scheme in ("light", "dark"):
        see(browser, scheme=scheme, width=width)
        found[scheme] = violations(browser)
    return {scheme: findings for scheme, findings in found.items() if findings}


def test_axe_finds_nothing_serious(browser: WebDriver, page: Path) -> None:
    look(browser, page)
    found = {}
    for state, fragment in STATES.items():
        browser.execute_script("location.hash = arguments[0]", fragment)
        if "job=" in fragment:
            WebDriverWait(browser, 20, 0.05).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#j0 .again"))
        found[state] = both(browser, 1280)
    see(browser, width=400)
    browser.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
    found["unfolded"] = both(browser, 400)
    browser.find_element(By.TAG_NAME, "body").send_keys("?")
    assert browser.find_element(By.ID, "keys").is_displayed()
    found["unfolded, with the keys"] = both(browser, 400)
    assert {state: findings for state, findings in found.items() if findings} == {}


def test_axe_finds_nothing_serious_in_a_comparison(browser: WebDriver, tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    page.write_text(render_compare(everything()))
    look(browser, page)
    browser.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
    for scheme, width in (("light", 1280), ("dark", 400)):
        see(browser, scheme=scheme, width=width)
        assert violations(browser) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
