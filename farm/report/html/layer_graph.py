"""Layers of a program as a graph, coloured by the precision that each layer loses: SVG without external files.

All of its text is treated as hostile. Upstream draws with Graphviz's `dot`, a program that may be missing. Here a layer
is in the row below all layers that it reads. A line across rows passes them in a lane of its own, on the right; a
line across many rows, such as a mask that every block reads, is left out: its reader names it.
"""

from __future__ import annotations

import base64
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from xml.etree import ElementTree

from farm.base.text import one_line
from farm.builds.program.layers import INPUT, Gap, Layer, LayerStep
from farm.report.formats.layers_csv import kept_files
from farm.results.layers import ROUNDING_STEPS, Diagnosis
from farm.store.artifacts import ArtifactStore
from farm.store.records import ArtifactRecord

GRAPH_KIND = "layers.svg"
"""Kind of artifact with such a graph."""

MOST_ROWS = 12
"""Most rows that a line spans."""
WIDTH, HEIGHT = 296.0, 82.0
"""Size of a box; all sizes are in pixels."""
# From a box to the next in its row, from a row to the next, and from a lane to the next.
_PITCH, ROW_PITCH, _LANE = WIDTH + 20, HEIGHT + 30, 8.0
_CHARS = 38
_LINE = 15
_MARGIN, _TOP = 24, 48
_LEGEND_WIDTH = 720
# Greatest graph that a page includes: 300 layers take 250 KB.
_SHOWN_BYTES = 4 << 20
# Ends of the scale from red to green: the floor of a broken layer, and 8-bit layers without a problem.
_RED_DB, _GREEN_DB = 10.0, 40.0
_READ_BEFORE = 2
"""Layers before the named one in its picture."""
_UNKNOWN = "#e4e4e8"
_LEGEND = (
    ("40 dB and more, or valid", "hsl(120 55% 78%)"),
    ("25 dB", "hsl(60 75% 78%)"),
    ("10 dB and less, or not valid", "hsl(0 75% 78%)"),
    ("not compared", _UNKNOWN),
)


Point = tuple[float, float]


class LayerLayout(NamedTuple):
    """Positions of boxes and lines; all coordinates are at least 0."""

    boxes: dict[str, Point]
    """Upper left corners."""
    lines: list[list[Point]]
    """Lines from the bottom of a box to the top of a box that reads it."""
    named: dict[str, list[str]]
    """Sources too many rows above a box for a line, by box."""


def lay_out(reads: Mapping[str, Sequence[str]]) -> LayerLayout:
    """Return the positions of the boxes of `reads`; each box may read only earlier ones."""
    rank = _ranks(reads)
    near = {name: [one for one in sources if rank[name] - rank[one] <= MOST_ROWS] for name, sources in reads.items()}
    rows: list[list[str]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for name, row in rank.items():
        rows[row].append(name)
    middles: dict[str, float] = {}
    for names in rows:
        # A box is below the mean of its sources, as far as its neighbours allow it.
        wanted = {name: statistics.fmean([middles[one] for one in near[name]] or [0.0]) for name in names}
        names.sort(key=wanted.__getitem__)
        first = statistics.fmean(wanted.values()) - _PITCH * (len(names) - 1) / 2
        middles |= {name: first + _PITCH * place for place, name in enumerate(names)}
    left = min(middles.values(), default=0.0) - WIDTH / 2
    middles = {name: middle - left for name, middle in middles.items()}
    ends = [middles[names[-1]] + WIDTH / 2 for names in rows]
    lines = []
    for name, sources in near.items():
        for source in sources:
            above, below = rank[source], rank[name]
            line = [(middles[source], above * ROW_PITCH + HEIGHT)]
            if passed := ends[above + 1 : below]:
                lane = max(passed) + _LANE
                ends[above + 1 : below] = [lane] * len(passed)
                line += [(lane, (above + 1) * ROW_PITCH), (lane, (below - 1) * ROW_PITCH + HEIGHT)]
            lines.append([*line, (middles[name], below * ROW_PITCH)])
    named = {name: far for name, sources in reads.items() if (far := [one for one in sources if one not in near[name]])}
    boxes = {name: (middle - WIDTH / 2, rank[name] * ROW_PITCH) for name, middle in middles.items()}
    return LayerLayout(boxes, lines, named)


def _ranks(reads: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the row of each box: below all its sources; an input is directly above the first box that reads it."""
    rank: dict[str, int] = {}
    for name, sources in reads.items():
        rank[name] = max((rank[source] + 1 for source in sources), default=0)
    first_reader: dict[str, int] = {}
    for name, sources in reads.items():
        for source in sources:
            first_reader[source] = min(rank[name], first_reader.get(source, rank[name]))
    for name, sources in reads.items():
        if not sources and name in first_reader:
            rank[name] = first_reader[name] - 1
    return rank


def layer_graph(layers: Sequence[Layer], diagnosis: Diagnosis) -> bytes:
    """Return the graph of `layers`, in the order of execution, as an SVG document."""
    names = {layer.name for layer in layers}
    layout = lay_out({layer.name: [name for name in layer.inputs if name in names] for layer in layers})
    boxes, corners = layout.boxes.values(), [point for line in layout.lines for point in line]
    width = max([_LEGEND_WIDTH, *(x + WIDTH for x, _ in boxes), *(x for x, _ in corners)]) + 2 * _MARGIN
    height = max((y + HEIGHT for _, y in boxes), default=0.0) + _TOP + _MARGIN
    root = _element(None, "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}")
    root.attrib |= {"width": f"{width:.0f}", "height": f"{height:.0f}", "font-family": "ui-monospace, monospace"}
    root.attrib |= {"font-size": "12", "fill": "#1a1a1f"}
    _element(root, "rect", width="100%", height="100%", fill="#ffffff")
    _legend(root)
    graph = _element(root, "g", transform=f"translate({_MARGIN} {_TOP})")
    arrow = _element(root, "marker", id="arrow", orient="auto", refX="7", refY="3.5", markerWidth="7", markerHeight="7")
    _element(arrow, "polygon", points="0,0 7,3.5 0,7", fill="#8a8a94")
    edges = _element(graph, "g", fill="none", stroke="#8a8a94")
    for points in layout.lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        _element(edges, "polyline", points=path).set("marker-end", "url(#arrow)")
    for layer in layers:
        diverging = [step for step, found in diagnosis.steps.items() if found.layer == layer.name]
        _layer(graph, layer, layout.boxes[layer.name], layout.named.get(layer.name, []), diverging)
    document: bytes = ElementTree.tostring(root, encoding="utf-8")
    return document


def layers_around(layers: Sequence[Layer], name: str) -> tuple[Layer, ...]:
    """Return the layer `name` with two layers before it and its readers, in the order of execution. Pure."""
    by_name = {layer.name: layer for layer in layers}
    read = {name}
    for _ in range(_READ_BEFORE):
        read |= {one for own in read if own in by_name for one in by_name[own].inputs}
    return tuple(layer for layer in layers if layer.name in read or name in layer.inputs)


def image_address(svg: bytes) -> str:
    """Return a graph as the address of an image, which runs no script."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def shown_graphs(artifacts: Mapping[str, Iterable[ArtifactRecord]], store: ArtifactStore) -> dict[str, str]:
    """Return the graphs among `artifacts` by job id, as addresses of images: as such they run no script.

    Graphs on other machines and graphs over 4 MiB are left out.
    """
    return {job_id: image_address(svg) for job_id, svg in kept_files(artifacts, store, GRAPH_KIND, _SHOWN_BYTES)}


def _layer(
    graph: ElementTree.Element, layer: Layer, place: Point, named: Sequence[str], diverging: Sequence[LayerStep]
) -> None:
    x, y = place
    group = _element(graph, "g", transform=f"translate({x:.1f} {y:.1f})")
    _element(group, "title").text = _everything(layer)
    box = _element(group, "rect", width=f"{WIDTH:.0f}", height=f"{HEIGHT:.0f}", rx="5", fill=_colour(layer))
    box.attrib |= {"stroke": "#b00020", "stroke-width": "3"} if diverging else {"stroke": "#8a8a94"}
    tensor = layer.tensor
    shape = "x".join(str(size) for size in tensor.shape)
    where = "" if layer.operator == INPUT else " CPU" if tensor.partition is None else f" #{tensor.partition}"
    figures = "  ".join(f"{step[0].upper()} {_figure(layer.gaps[step])}" for step in LayerStep if step in layer.gaps)
    if diverging:
        figures = f"{figures}  ✗ {' '.join(diverging)}"
    far = f"from {', '.join(named)}" if named else ""
    rows = (layer.name, layer.operator, f"{tensor.dtype} {shape}{where}".strip(), figures or "not compared", far)
    for number, text in enumerate(rows):
        line = _element(group, "text", x="8", y=str(_LINE * number + 14))
        line.text = one_line(text, _CHARS)
        if number == 0:
            line.set("font-weight", "bold")


def _figure(gap: Gap) -> str:
    for name, score in gap.scores.items():
        return f"{name[:10]} {score.value:.6g}{'!' if score.valid is False else ''}"
    if gap.problem:
        return "not comparable"
    return "-" if gap.sqnr_db is None else "equal" if gap.sqnr_db == float("inf") else f"{gap.sqnr_db:.1f} dB"


def _everything(layer: Layer) -> str:
    """Return the tooltip of a layer."""
    tensor = layer.tensor
    lines = [layer.name, f"reads {', '.join(layer.inputs) or 'nothing'}", f"debug handle {tensor.handle}"]
    if tensor.scale is not None:
        lines.append(f"scale {tensor.scale:.6g}, zero point {tensor.zero_point}")
    for step, gap in layer.gaps.items():
        scores = "".join(f", metric {name} {score.value:.6g}" for name, score in gap.scores.items())
        figures = f"{step}: SQNR {gap.sqnr_db} dB, cosine {gap.cosine}, MSE {gap.mse}"
        lines.append(f"{figures}{scores} {gap.problem}".rstrip())
    return "\n".join(one_line(line, 400) for line in lines)


def _colour(layer: Layer) -> str:
    good = [_goodness(gap) for gap in layer.gaps.values()]
    known = [one for one in good if one is not None]
    return f"hsl({120 * min(known):.0f} 65% 78%)" if known else _UNKNOWN


def _goodness(gap: Gap) -> float | None:
    """Return a colour value from 0 for a broken layer to 1 for a layer without a problem; None without a comparison."""
    judged = [score.valid for score in gap.scores.values() if score.valid is not None]
    if judged:
        return float(all(judged))
    if gap.steps is not None and gap.steps <= ROUNDING_STEPS and not gap.problem:
        return 1.0
    if gap.sqnr_db is None:
        return None
    return min(1.0, max(0.0, (gap.sqnr_db - _RED_DB) / (_GREEN_DB - _RED_DB)))


def _legend(root: ElementTree.Element) -> None:
    x = float(_MARGIN)
    for text, colour in _LEGEND:
        _element(root, "rect", x=f"{x:.0f}", y="12", width="14", height="14", fill=colour, stroke="#8a8a94")
        _element(root, "text", x=f"{x + 20:.0f}", y="23").text = text
        x += 44 + 7.3 * len(text)


def _element(parent: ElementTree.Element | None, tag: str, **attributes: Any) -> ElementTree.Element:
    return ElementTree.Element(tag, attributes) if parent is None else ElementTree.SubElement(parent, tag, attributes)
