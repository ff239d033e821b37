"""Run over a stub of QNN's libraries: its numbers cannot be taken for numbers of Qualcomm's software or hardware."""

from __future__ import annotations

import json

import msgspec
import pytest
from report_pages import unpacked

from farm.report.formats.ctrf import render_ctrf
from farm.report.formats.github import run_markdown
from farm.report.formats.junit import render_junit
from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.page_of_run import render_html
from farm.report.model.diff import diff_runs
from farm.report.model.summary import summarize
from farm.report.terminal.diff import diff_lines
from farm.report.terminal.job import job_lines
from farm.report.terminal.run import render_summary
from farm.store.view import RunView


def over(view: RunView, product: str, kind: str = "hardware") -> RunView:
    """Return a run whose devices have this kind, with an SDK of this product."""
    devices = tuple(msgspec.structs.replace(one, kind=kind) for one in view.devices)
    facts = {**view.fingerprint, "device_kind": kind, **({"qnn_product": product} if product else {})}
    return msgspec.structs.replace(view, devices=devices, fingerprint=facts)


def texts(view: RunView) -> dict[str, str]:
    """Return what every renderer makes of a run."""
    summary = summarize(view)
    html = render_html(view)
    return {
        "page": html, "page of a job": unpacked(html)[0], "terminal": render_summary(view),
        "job": "\n".join(job_lines(summary, summary.jobs[0], [], {})),
        "github": run_markdown(view), "ctrf": render_ctrf(view), "junit": render_junit(view),
        "diff": "\n".join(diff_lines(diff_runs(view, view), 5)), "json": render_json(view),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["hardware", "virtual"])
def test_every_text_of_a_run_over_a_stub_has_the_label_and_no_other_run_has_it(example_run: RunView, kind: str) -> None:
    few = msgspec.structs.replace(example_run, jobs=example_run.jobs[:12])
    found = texts(over(few, "stub", kind))
    for where, text in found.items():
        assert "stub" in text.lower(), where
    assert "<strong>STUB.</strong>" in found["page"]
    assert "times are those of a stub of QNN, not comparable with hardware" in found["page of a job"]
    assert "STUB: " in found["terminal"]
    assert "STUB: " in found["job"]
    # Beside each device, and wherever a table has a time.
    assert found["page"].count('<span class="tag virtual">stub</span>') >= len(few.devices)
    assert "host time of a simulator" not in "".join(found.values())
    document = json.loads(found["json"])
    assert (document["summary"]["stub"], document["fingerprint"]["qnn_product"]) == ("stub", "stub")
    assert parse_json(found["json"]) == over(few, "stub", kind)
    for product in ("", "QAIRT"):
        for where, text in texts(over(few, product, kind)).items():
            assert "stub" not in text.lower(), where


def test_numbers_of_a_stub_are_not_compared_with_those_of_qualcomms_libraries(example_run: RunView) -> None:
    found = diff_runs(over(example_run, "stub"), over(example_run, "QAIRT"))
    measured = [job for job in found.jobs if job.not_compared]
    assert measured
    assert {job.not_compared for job in measured} == {"one of the two ran over a stub of QNN"}
    assert not [job for job in found.jobs if job.changes]
