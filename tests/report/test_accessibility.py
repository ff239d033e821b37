"""What axe finds in a report, in the states that people have it in. axe-core comes with a development dependency."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
from chromium import look, start
from compare.made import everything
from report_context import context, with_stale
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from farm.report.html.compare import render_compare
from farm.report.html.page_of_run import write_html
from farm.results.attempt import Verdict
from farm.store.view import RunView

STATES = {
    "the first screen": "",
    "a job that passed": "#job=j0",
    "a failure": "#failures",
    "the matrix": "#matrix",
}
_RUN = """
const done = arguments[arguments.length - 1];
axe.run(document, {resultTypes: ["violations"]}).then((found) => done(found.violations.map(
  (one) => `${one.impact} ${one.id}: ${one.nodes.slice(0, 3).map((node) => `${node.target} ${node.failureSummary}`).join(" | ")}`)))
"""  # noqa: E501


@pytest.fixture(scope="module")
def axe() -> str:
    package = pytest.importorskip("selenium_axe_python", reason="pip install -e .[dev]")
    return files(package).joinpath("axe-core", "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def browser(axe: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    session = start(tmp_path_factory.mktemp("profile"))
    # As part of the browser, so that the page's own policy stays what it is.
    session.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": axe})
    yield session
    session.quit()


@pytest.fixture(scope="module")
def page(inside_run: RunView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One of each kind is enough, and axe takes long over a large page.
    odd = [job for job in inside_run.jobs[9:] if len(job.attempts) > 1 or job.attempts[0].verdict is not Verdict.PASSED]
    view = with_stale(msgspec.structs.replace(inside_run, jobs=(*inside_run.jobs[:9], *odd)))
    path = tmp_path_factory.mktemp("pages") / "report.html"
    write_html(view, path, context(view))
    return path


def violations(browser: WebDriver) -> list[str]:
    found: list[str] = browser.execute_async_script(_RUN)
    return [one for one in found if one.startswith(("serious", "critical"))]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("state", STATES)
def test_axe_finds_nothing_serious(browser: WebDriver, page: Path, state: str, scheme: str) -> None:
    look(browser, page, STATES[state], scheme=scheme)
    if "job=" in STATES[state]:
        WebDriverWait(browser, 20).until(lambda b: b.find_elements(By.CSS_SELECTOR, "#j0 .again"))
    assert violations(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_in_what_is_unfolded(browser: WebDriver, page: Path, scheme: str) -> None:
    look(browser, page, scheme=scheme, width=400)
    browser.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
    browser.find_element(By.TAG_NAME, "body").send_keys("?")
    assert browser.find_element(By.ID, "keys").is_displayed()
    assert violations(browser) == []
    browser.execute_script("document.getElementById('keys').close()")
    assert violations(browser) == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 400)])
def test_axe_finds_nothing_serious_in_a_comparison(browser: WebDriver, tmp_path: Path, scheme: str, width: int) -> None:
    page = tmp_path / "compare.html"
    page.write_text(render_compare(everything()))
    look(browser, page, scheme=scheme, width=width)
    browser.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true })")
    assert violations(browser) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
