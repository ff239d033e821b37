"""RunView -> JUnit XML for CI systems."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence

import msgspec

from farm.base.grouping import grouped
from farm.base.text import one_line, without_colours
from farm.report.formats import export_format
from farm.report.model.format import local_time, short_log
from farm.report.model.summary import JobSummary, Outcome, RunSummary, summarize
from farm.store.records import RunView

LOG_LIMIT = 20_000
"""Most characters of a log in a test case."""

_ERRORS = {Outcome.INFRA, Outcome.NOT_RUN}

# Characters that XML 1.0 does not allow, section 2.2.
_NOT_XML = "[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"


@export_format("junit", suffix="junit.xml", about="JUnit XML, for CI systems: the same as --junitxml")
def render_junit(view: RunView) -> str:
    """Return JUnit XML: one test suite per suite, one test case per job, in the order of the run.

    A failure is `failure`; trouble with the farm or a device, and a job that was not run, are `error`. Known issues and
    skipped jobs are `skipped` with the reason. Times are wall time on the device, in s.
    """
    summary = summarize(view)
    root = ET.Element("testsuites", {"name": _attribute(f"farm run {view.id}"), **_totals(summary.jobs)})
    for name, jobs in grouped((job.job.suite, job) for job in summary.jobs).items():
        suite = ET.SubElement(root, "testsuite", {"name": _attribute(name), **_totals(jobs)})
        suite.set("hostname", _attribute(view.host))
        started = local_time(view.started_ms)
        if started is not None:
            suite.set("timestamp", started.isoformat(timespec="seconds"))
        _properties(suite, _run_facts(summary))
        for job in jobs:
            _test_case(suite, job)
    ET.indent(root)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{ET.tostring(root, encoding="unicode")}\n'


def _test_case(suite: ET.Element, job: JobSummary) -> None:
    view = job.job
    name = view.id.removeprefix(f"{view.suite}/")
    about = {"classname": _attribute(view.suite), "name": _attribute(name), "time": f"{job.seconds:.3f}"}
    case = ET.SubElement(suite, "testcase", about)
    facts = {"soc": view.soc, "backend": view.backend, "precision": view.precision}
    facts |= {"device": job.device, "device_kind": job.kind} if job.device else {}
    facts |= {key: f"{value:g}" for key, value in msgspec.structs.asdict(job.numbers).items() if value is not None}
    _properties(case, facts)
    attempt, message = job.attempt, _attribute(job.reason)
    if job.outcome is Outcome.FAILED or job.outcome in _ERRORS:
        facts = {"message": message, "type": attempt.stage.value if attempt else ""}
        ET.SubElement(case, "failure" if job.outcome is Outcome.FAILED else "error", facts).text = _details(job)
    elif job.outcome is Outcome.KNOWN and attempt is not None:
        known = f"known issue: {attempt.known_issue}"
        ET.SubElement(case, "skipped", {"message": _attribute(known)}).text = _details(job)
    elif job.outcome is Outcome.SKIPPED:
        facts = {"message": f"SKIPPED: {message}", "type": "skipped"} if job.skipped else {"message": message}
        ET.SubElement(case, "skipped", facts)
    if attempt and attempt.log and job.outcome in {Outcome.FAILED, Outcome.KNOWN, Outcome.INFRA}:
        ET.SubElement(case, "system-out").text = xml_text(short_log(attempt.log, LOG_LIMIT))


def _details(job: JobSummary) -> str:
    lines = [job.reason]
    if job.attempt is not None:
        lines += [
            f"{comparison.label} against {comparison.reference}: {violation}"
            for comparison in job.attempt.comparisons
            for violation in comparison.violations
        ]
    if job.retried:
        lines += [
            f"attempt {number}: {attempt.verdict.value} at {attempt.stage.value} on {attempt.device or 'no device'}"
            f"{': ' if attempt.reason else ''}{attempt.reason}"
            for number, attempt in enumerate(job.job.attempts, start=1)
        ]
    lines.append(f"run it again: {job.rerun}")
    return xml_text("\n".join(lines))


def _totals(jobs: Sequence[JobSummary]) -> dict[str, str]:
    skipped = {Outcome.KNOWN, Outcome.SKIPPED}
    return {
        "tests": str(len(jobs)),
        "failures": str(sum(job.outcome is Outcome.FAILED for job in jobs)),
        "errors": str(sum(job.outcome in _ERRORS for job in jobs)),
        "skipped": str(sum(job.outcome in skipped for job in jobs)),
        "time": f"{sum(job.seconds for job in jobs):.3f}",
    }


def _run_facts(summary: RunSummary) -> dict[str, str]:
    kinds = sorted({device.kind for device in summary.view.devices})
    return {
        "command": summary.view.command,
        "verdict": summary.verdict_line,
        "device_kinds": ", ".join(kinds),
        **{f"fingerprint.{key}": value for key, value in summary.view.fingerprint.items()},
    }


def _properties(parent: ET.Element, facts: dict[str, str]) -> None:
    properties = ET.SubElement(parent, "properties")
    for name, value in facts.items():
        ET.SubElement(properties, "property", {"name": _attribute(name), "value": _attribute(value)})


def xml_text(text: str) -> str:
    """Return `text` without the characters that XML 1.0 does not allow, and without terminal colours."""
    return re.sub(_NOT_XML, "", without_colours(text))


def _attribute(text: str) -> str:
    return one_line(xml_text(text))
