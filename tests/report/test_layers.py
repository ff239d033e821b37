"""Profiles and layers as a reader sees them: tables, places and the graph, also with hostile names."""

from __future__ import annotations

import base64
import math
import re
from html import unescape
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

from farm.builds.program.layers import INPUT, Gap, Layer, LayerStep, LayerTensor, Score
from farm.report.formats.layers_csv import CSV_KIND, LayerPlace, shown_places
from farm.report.formats.run_json import parse_json, render_json
from farm.report.html.layer_graph import (
    GRAPH_KIND,
    HEIGHT,
    MOST_ROWS,
    ROW_PITCH,
    WIDTH,
    lay_out,
    layer_graph,
    shown_graphs,
)  # fmt: skip
from farm.report.html.page_of_run import ReportContext, render_html
from farm.report.model.profile_tables import ROW_LIMITS, SHOWN_JOBS, layer_table, operator_tables, row_limit
from farm.results.attempt import Attempt, LayerComparison, OperatorProfile, Stage, Verdict
from farm.results.layers import diagnose
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord
from farm.store.view import RunView

from .conftest import run_of


def node(name: str, p50: float, unit: str = "cycles", share: float = 0.0) -> OperatorProfile:
    return OperatorProfile(name, "QnnBackend[0]", unit, 3, p50, p50, p50, share)


def test_tables_are_by_unit_the_greatest_first_and_say_what_they_leave_out() -> None:
    rows = [node("a", 1), node("b", 60), node("c", 39), node("call", 5, "ns"), node("whole call: x", 1e9)]
    cycles, ns = operator_tables(rows, 2)
    assert ([row.node for row in cycles.rows], cycles.total, cycles.count) == (["b", "c"], 100, 3)
    assert (cycles.left_out, cycles.left_out_total, cycles.left_out_share) == (1, 1, 0.01)
    assert (ns.unit, ns.total, ns.left_out) == ("ns", 5, 0)
    assert operator_tables([node("whole call: x", 1)], 2) == ()


def compared(layer: str, step: LayerStep, *, diverges: bool = False) -> LayerComparison:
    return LayerComparison(layer, "aten.x.default", step, 0.1, 3.0, 0.5, diverges=diverges)


def test_the_first_divergence_is_that_of_the_first_layer_and_there_of_the_first_step() -> None:
    q, c = LayerStep.QUANTIZATION, LayerStep.COMPILER
    late_first = [compared("a", q), compared("a", c, diverges=True), compared("b", q, diverges=True), compared("b", c)]
    both = [compared("a", c, diverges=True), compared("a", q, diverges=True)]
    for layers, first in ((late_first, ("a", c)), (both, ("a", q)), ([compared("a", q)], None)):
        table = layer_table(layers)
        assert (table.first and (table.first.layer, table.first.step)) == first
    assert layer_table(late_first).steps == (q, c)
    # A layer without a step leaves its place empty.
    table = layer_table([compared("a", q), compared("b", LayerStep.DEVICE)])
    assert [[one is not None for one in row.steps] for row in table.rows] == [[True, False], [False, True]]


def test_a_page_has_profiles_and_heap_counters_where_there_are_some(example_run: RunView, inside_run: RunView) -> None:
    assert "profiles-h" not in render_html(example_run)
    html = unescape(render_html(inside_run))
    for text in (
        "382,800 cycles in 8 rows", "in 5 of 6 inferences", "QNN (execute) time in QnnBackend[0]",
        "host time of a simulator: not comparable with hardware", "dsp_heap_before", "928,212 bytes",
    ):  # fmt: skip
        assert text in html


def test_profiles_and_layers_come_back_from_json(inside_run: RunView, hostile_run: RunView) -> None:
    assert parse_json(render_json(inside_run)) == inside_run
    back = parse_json(render_json(hostile_run))
    (row, _) = back.jobs[0].attempts[0].operators
    assert math.isnan(row.p50)
    assert row.least == -math.inf


def test_a_large_run_of_profiles_stays_small_and_says_what_is_missing() -> None:
    assert row_limit(1) == ROW_LIMITS[1]
    assert ROW_LIMITS[0] < row_limit(300) == row_limit(100_000) <= ROW_LIMITS[1]
    operators = tuple(node(f"aten_convolution_default_{n}:OpId_{n}", 1000.0 - n, share=0.005) for n in range(60))
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "", "virtual-SM8650-0", operators=operators)
    html = render_html(run_of(*[(attempt,)] * (SHOWN_JOBS + 7)))
    assert "7 more are not here" in unescape(html)
    assert html.count('class="card inside') == SHOWN_JOBS
    assert len(html) < 6_000_000


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


SVG = "{http://www.w3.org/2000/svg}"


def layer(name: str, *inputs: str, db: float = 41.0, operator: str = "aten.add.Tensor") -> Layer:
    gaps = {LayerStep.COMPILER: Gap(1e-5, db, 0.99, 20.0)}
    return Layer(name, operator, inputs, gaps, None, LayerTensor(1, None, 0, (1, 8), "uint8", 0.1, 3))


def drawn(layers: list[Layer]) -> ElementTree.Element:
    return ElementTree.fromstring(layer_graph(layers, diagnose(layers)))  # noqa: S314 - made right here


def transformer(blocks: int) -> dict[str, list[str]]:
    """Blocks with a way around them, heads beside each other, and a mask that all of them read."""
    reads: dict[str, list[str]] = {"mask": [], "x0": []}
    for block in range(blocks):
        heads = [f"head{block}_{number}" for number in range(4)]
        reads[f"norm{block}"] = [f"x{block}"]
        reads |= {head: [f"norm{block}", "mask"] for head in heads}
        reads[f"cat{block}"] = heads
        reads[f"mlp{block}"] = [f"cat{block}"]
        reads[f"x{block + 1}"] = [f"mlp{block}", f"x{block}"]
    return reads


def test_three_hundred_layers_stand_apart_each_below_what_it_reads_and_connected_with_it_or_names_it() -> None:
    reads = transformer(38)
    layout = lay_out(reads)
    assert len(layout.boxes) > 300
    assert layout == lay_out(reads)
    assert max(x for x, _ in layout.boxes.values()) + WIDTH < 2000, "it fits a screen"
    for (x, y), (other, other_y) in combinations(layout.boxes.values(), 2):
        assert y != other_y or abs(x - other) >= WIDTH
    lines = {tuple((round(x, 3), y) for x, y in (line[0], line[-1])) for line in layout.lines}
    for name, sources in reads.items():
        x, y = layout.boxes[name]
        for source in sources:
            above_x, above_y = layout.boxes[source]
            assert above_y < y
            begin = (round(above_x + WIDTH / 2, 3), above_y + HEIGHT)
            assert ((begin, (round(x + WIDTH / 2, 3), y)) in lines) != (source in layout.named.get(name, []))
    for line in layout.lines:
        for x, y in line[1:-1]:
            assert all(x > box_x + WIDTH for box_x, box_y in layout.boxes.values() if box_y <= y <= box_y + HEIGHT)
    # A line that would cross the whole graph is replaced by a name.
    assert layout.named["head37_0"] == ["mask"]
    longest = MOST_ROWS * ROW_PITCH
    assert all(last[1] - first[1] <= longest for first, last in lines)


def test_a_layer_that_diverges_is_seen_and_the_others_have_their_colour() -> None:
    valid = Gap(0.1, 3.0, 0.9, scores={"cos": Score(0.97, True)})
    layers = [
        Layer("x", INPUT, (), {}), layer("good", "x"), layer("wrong", "good", db=9.0),
        Layer("judged", "aten.relu.default", ("wrong",), {LayerStep.DEVICE: valid}),
        layer("equal", "judged", db=math.inf),
    ]  # fmt: skip
    root = drawn(layers)
    groups = {
        group.findtext(f"{SVG}text"): group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None
    }
    hues = {name: group[1].get("fill", "") for name, group in groups.items()}
    assert hues["good"] == hues["equal"] == hues["judged"]
    assert hues["wrong"].startswith("hsl(0 ")
    assert not hues["x"].startswith("hsl")
    assert [name for name, group in groups.items() if group[1].get("stroke-width")] == ["wrong"]
    # Figures of a user's comparator are marked apart from farm's own figures, also with equal names.
    assert "cosine 0.9, MSE 0.1, metric cos 0.97" in (groups["judged"].findtext(f"{SVG}title") or "")
    words = " ".join(" ".join(text.text or "" for text in root.iter(f"{SVG}text")).split())
    for shown in ("C 9.0 dB ✗ compiler", "uint8 1x8 #0", "D cos 0.97", "not compared", "C equal"):
        assert shown in words
    for few in ([], [layer("alone")]):
        assert drawn(few).tag == f"{SVG}svg"


def test_names_are_text_whatever_is_in_them() -> None:
    name = "</text><script>alert('x')</script>&\x00\x1b[31m\u202e"
    layers = [layer(name, operator="<image href='javascript:x'/>"), layer("b", name)]
    root = drawn(layers)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg", "g", "rect", "text", "title", "polyline", "polygon", "marker",
    }  # fmt: skip
    assert any("<script>" in (text.text or "") for text in root.iter(f"{SVG}text"))


def test_a_page_shows_a_graph_as_an_image_which_runs_no_script(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    hostile = b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>"
    kept = ArtifactRecord(store.put(hostile), len(hostile), GRAPH_KIND)
    elsewhere = ArtifactRecord("0" * 64, 10, GRAPH_KIND)
    other = ArtifactRecord(store.put(b"cycles"), 6, "etdump")
    shown = shown_graphs({"job": [other, kept], "gone": [elsewhere]}, store)
    assert shown == {"job": "data:image/svg+xml;base64," + base64.b64encode(hostile).decode()}
