"""Run as JSON for programs: writer, with a summary beside the fields, and reader."""

from __future__ import annotations

import msgspec

from farm.base.text import json_document
from farm.report.model.cross_target import cross_targets
from farm.report.model.summary import summarize
from farm.store.records import RunView
from farm.store.values import jsonable


def render_json(view: RunView) -> str:
    """Return the run as JSON: the fields of RunView, and `summary` with verdict line, counts and outcomes by job.

    `worth` maps failed jobs to the targets on which their case is known to fail and pass. `stub` is the product name of
    a stub in place of QNN's libraries, and absent for a run without a stub.

    JSON has no infinity: non-finite numbers are the strings `inf`, `-inf` and `nan`, never null, which means "does not
    apply".
    """
    summary = summarize(view)
    document = jsonable(msgspec.to_builtins(view))
    document["summary"] = {
        "verdict_line": summary.verdict_line,
        "tone": summary.tone.value,
        "attention": summary.attention,
        "counts": {outcome.value: n for outcome, n in summary.counts.items()},
        "outcomes": {job.job.id: job.outcome.value for job in summary.jobs},
        "worth": {
            summary.jobs[index].job.id: cross.conclusion
            for index, cross in cross_targets(summary).items()
            if cross.conclusion
        },
    }
    if summary.stub:
        document["summary"]["stub"] = summary.stub
    return json_document(document, indent=1).decode()


def parse_json(text: str | bytes) -> RunView:
    """Return the run that `render_json` wrote. Raises msgspec.ValidationError for any other text."""
    return msgspec.json.decode(text, type=RunView, strict=False)
