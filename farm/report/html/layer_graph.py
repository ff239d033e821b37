"""Layers of a program as a graph, coloured by the precision that each layer loses: SVG without external files.

All of its text is treated as hostile.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from farm.base.text import one_line
from farm.builds.program.layers import INPUT, Gap, Layer, LayerStep
from farm.report.html.layer_layout import Point, Sizes, lay_out
from farm.results.layers import ROUNDING_STEPS, Diagnosis

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from xml.etree import ElementTree

    from farm.store.artifacts import ArtifactStore
    from farm.store.records import ArtifactRecord

GRAPH_KIND = "layers.svg"
"""Kind of artifact with such a graph."""

_SIZES = Sizes(width=296, height=82, between=20, between_rows=30, lane=8)
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


def layer_graph(layers: Sequence[Layer], diagnosis: Diagnosis) -> bytes:
    """Return the graph of `layers`, in the order of execution, as an SVG document."""
    names = {layer.name for layer in layers}
    layout = lay_out({layer.name: [name for name in layer.inputs if name in names] for layer in layers}, _SIZES)
    boxes = layout.boxes.values()
    width = max([_LEGEND_WIDTH, *(x + _SIZES.width for x, _ in boxes)]) + 2 * _MARGIN
    height = max((y + _SIZES.height for _, y in boxes), default=0.0) + _TOP + _MARGIN
    root = _element(None, "svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}")
    root.attrib |= {"width": f"{width:.0f}", "height": f"{height:.0f}", "font-family": "ui-monospace, monospace"}
    root.attrib |= {"font-size": "12", "fill": "#1a1a1f"}
    _element(root, "rect", width="100%", height="100%", fill="#ffffff")
    _legend(root)
    graph = _element(root, "g", transform=f"translate({_MARGIN} {_TOP})")
    edges = _element(graph, "g", fill="none", stroke="#8a8a94")
    for points in layout.lines:
        _element(edges, "polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points))
        _arrow(edges, *points[-2:])
    for layer in layers:
        diverging = [step for step, found in diagnosis.steps.items() if found.layer == layer.name]
        _layer(graph, layer, layout.boxes[layer.name], layout.named.get(layer.name, []), diverging)
    from xml.etree import ElementTree

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
    found = {}
    for job_id, records in artifacts.items():
        for record in records:
            path = store.find(record.sha256) if record.kind == GRAPH_KIND and record.size <= _SHOWN_BYTES else None
            if path is not None and path.stat().st_size <= _SHOWN_BYTES:
                found[job_id] = image_address(path.read_bytes())
    return found


def _layer(
    graph: ElementTree.Element, layer: Layer, place: Point, named: Sequence[str], diverging: Sequence[LayerStep]
) -> None:
    x, y = place
    group = _element(graph, "g", transform=f"translate({x:.1f} {y:.1f})")
    _element(group, "title").text = _everything(layer)
    box = _element(group, "rect", width=f"{_SIZES.width}", height=f"{_SIZES.height}", rx="5", fill=_colour(layer))
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


def _arrow(parent: ElementTree.Element, before: Point, at: Point) -> None:
    x, y = at[0] - before[0], at[1] - before[1]
    length = (x * x + y * y) ** 0.5 or 1.0
    x, y = 7 * x / length, 7 * y / length
    corners = (at, (at[0] - x - y / 2, at[1] - y + x / 2), (at[0] - x + y / 2, at[1] - y - x / 2))
    _element(parent, "polygon", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in corners), fill="#8a8a94", stroke="none")


def _element(parent: ElementTree.Element | None, tag: str, **attributes: Any) -> ElementTree.Element:
    from xml.etree import ElementTree

    if parent is None:
        return ElementTree.Element(tag, attributes)
    return ElementTree.SubElement(parent, tag, attributes)
