"""Graph of layers as seen by a reader, also with three hundred layers and with hostile names."""

from __future__ import annotations

import base64
import math
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

from farm.builds.program.layers import INPUT, Gap, Layer, LayerStep, LayerTensor, Score
from farm.report.html.layer_graph import GRAPH_KIND, layer_graph, shown_graphs
from farm.report.html.layer_layout import MOST_ROWS, Sizes, lay_out
from farm.results.layers import diagnose
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord

SVG = "{http://www.w3.org/2000/svg}"
SIZES = Sizes(width=300, height=80, between=20, between_rows=30, lane=8)


def layer(name: str, *inputs: str, db: float = 41.0, operator: str = "aten.add.Tensor") -> Layer:
    gaps = {LayerStep.COMPILER: Gap(1e-5, db, 0.99, 20.0)}
    return Layer(name, operator, inputs, gaps, None, LayerTensor(1, None, 0, (1, 8), "uint8", 0.1, 3))


def drawn(layers: list[Layer]) -> ElementTree.Element:
    return ElementTree.fromstring(layer_graph(layers, diagnose(layers)))  # noqa: S314 - made right here


def rounded(*points: tuple[float, float]) -> tuple[tuple[float, float], ...]:
    return tuple((round(x, 3), y) for x, y in points)


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


def test_three_hundred_layers_stand_apart_in_a_column_that_fits_a_screen() -> None:
    reads = transformer(38)
    layout = lay_out(reads, SIZES)
    assert len(layout.boxes) > 300
    assert max(x for x, _ in layout.boxes.values()) + SIZES.width < 2000
    rows: dict[float, list[float]] = {}
    for x, y in layout.boxes.values():
        rows.setdefault(y, []).append(x)
    for xs in rows.values():
        assert all(abs(a - b) >= SIZES.width for a, b in combinations(xs, 2))
    assert layout == lay_out(reads, SIZES)


def test_every_layer_is_below_what_it_reads_and_connected_with_it_or_names_it() -> None:
    reads = transformer(20)
    layout = lay_out(reads, SIZES)
    lines = {rounded(line[0], line[-1]) for line in layout.lines}
    for name, sources in reads.items():
        x, y = layout.boxes[name]
        for source in sources:
            above_x, above_y = layout.boxes[source]
            assert above_y < y
            line = rounded((above_x + SIZES.width / 2, above_y + SIZES.height), (x + SIZES.width / 2, y))
            assert (line in lines) != (source in layout.named.get(name, []))
    # A line that would cross the whole graph is replaced by a name.
    assert layout.named["head19_0"] == ["mask"]
    longest = MOST_ROWS * (SIZES.height + SIZES.between_rows)
    assert all(last[1] - first[1] <= longest for first, last in lines)


def test_a_layer_that_diverges_is_seen_and_the_others_have_their_colour() -> None:
    valid = Gap(0.1, 3.0, 0.9, scores={"cos": Score(0.97, True)})
    layers = [
        Layer("x", INPUT, (), {}),
        layer("good", "x"),
        layer("wrong", "good", db=9.0),
        Layer("judged", "aten.relu.default", ("wrong",), {LayerStep.DEVICE: valid}),
        layer("equal", "judged", db=math.inf),
    ]
    root = drawn(layers)
    groups = [group for group in root.iter(f"{SVG}g") if group.find(f"{SVG}title") is not None]
    boxes = {group.findtext(f"{SVG}text"): group[1] for group in groups}
    hues = {name: box.get("fill", "") for name, box in boxes.items()}
    assert hues["good"] == hues["equal"] == hues["judged"]
    assert hues["wrong"].startswith("hsl(0 ")
    assert not hues["x"].startswith("hsl")
    assert [name for name, box in boxes.items() if box.get("stroke-width")] == ["wrong"]
    # Figures of a user's comparator are marked apart from farm's own figures, also with equal names.
    [tip] = [group.findtext(f"{SVG}title") for group in groups if group.findtext(f"{SVG}text") == "judged"]
    assert "cosine 0.9, MSE 0.1, metric cos 0.97" in (tip or "")
    words = " ".join(text.text or "" for text in root.iter(f"{SVG}text"))
    for shown in ("C 9.0 dB  ✗ compiler", "uint8 1x8 #0", "D cos 0.97", "not compared", "C equal"):
        assert shown.replace("  ", " ") in words


def test_names_are_text_whatever_is_in_them() -> None:
    name = "</text><script>alert('x')</script>&\x00\x1b[31m\u202e"
    layers = [layer(name, operator="<image href='javascript:x'/>"), layer("b", name)]
    root = drawn(layers)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg", "g", "rect", "text", "title", "polyline", "polygon",
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


def test_a_graph_without_layers_or_of_one_is_a_document() -> None:
    for layers in ([], [layer("alone")]):
        assert drawn(layers).tag == f"{SVG}svg"
