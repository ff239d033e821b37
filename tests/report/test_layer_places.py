"""Layers of a debug session on the page: module, line, and operators ahead of time beside those at run time."""

from __future__ import annotations

import re
from pathlib import Path

from farm.report.formats.layers_csv import CSV_KIND, LayerPlace, shown_places
from farm.report.html.context import ReportContext
from farm.report.html.page_of_run import render_html
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord
from farm.store.view import RunView

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
