"""Log of a compilation -> QNN's line with the reason of the failure. Pure and torch-free."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from farm.builds.bundles.origins import UNKNOWN, Origin, place_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# ExecuTorch raises these after QNN has failed; the exception itself has no reason.
_EMPTY = re.compile(r"(?:AssertionError|RuntimeError): .{0,200}(?:Qnn|QNN)|(?:AssertionError|RuntimeError)\Z")
_IN_REFUSAL = re.compile(r"\((?P<empty>Failed to generate Qnn context binary\.?)\)\Z")
# torchao's error about the values of a module during its calibration.
_OF_NUMBERS = re.compile(r"min \S{1,40} should be less than max \S{1,40}")
# QNN's errors, as ExecuTorch's logger and QNN's own tools write them.
_ERROR = re.compile(
    r"(?:\[ ?ERROR ?\]\s*(?:\[Qnn ExecuTorch\]:)?\s*(?:QnnDsp)?\s*(?:<E>)?|QnnDsp\s*<E>)\s*"
    r"(?:[\w./-]{1,100}:\d{1,6}:{1,2}ERROR:)?\s*(?P<text>.*\S)"
)
_UNREADABLE = re.compile(r"\[Qnn ExecuTorch\]:\s*(?P<text>Failed to interpret QNN context binary\. Error code \d{1,6})")
# ExecuTorch starts to build the graph of a partition: nodes that QNN refused before it only stay on the CPU.
_BUILDS = re.compile(r"qnn_preprocess\.py:\d{1,5}\] (?:Processing Method|Visiting: )|Caching: Caching is in SAVE MODE")
_REFUSED = re.compile(r"Failed to validate op (?P<node>\w{1,200}) with error")
# Lines that follow from an error above them, or come in every log.
_FOLLOWS = re.compile(
    r"unexpected GraphHtpSettings option|Failed to append node|Failed to construct common node|Failed to add node|"
    r"Fail to compile QNN graph|QnnBackend_validateOpConfig failed|Requested I/O datatype set|"
    r"Supported I/O datatype sets|Please refer to the |graph prepare failed \d|graphMainFinalizePostPrepare|"
    r"Failed to finalize |Graph prepare failed|Could not prepare op|preparation failed with err|"
    r"has improper OutputDef|[Cc]ontext binary (?:size|info)|serialized binary|size of graph binary|"
    r"Fail to get context binary|was not finalized|  Input \d"
)
_NODE = re.compile(
    r"in the node '(?P<in>[^']{1,200})'|\"(?P<made>[^\"]{1,200})\" generated:|\bop (?P<op>aten_\w{1,200})"
)
# The (de)quantization of a weight for an operator on the CPU remains alone in a partition, and QNN refuses it there.
_OF_A_WEIGHT = re.compile(r"\bOp (?:Deq|Q)uantize\b|dequantize_per_|quantize_per_")
_BAD_SCALE = "bad scale"
_NO_INDEX = re.compile(r"^\[4294967295\] ")
_TAIL = re.compile(r"\. There is a mismatch for the combination of inputs and outputs\.?$")


class QnnError(NamedTuple):
    """Line of an error with its node."""

    text: str
    node: str
    """Name in the edge graph; empty for a line without a node."""


def explained(reason: str, log: str, origins: Mapping[str, Origin], values: Sequence[str] = ()) -> str:
    """Return the reason of a compiler's failure, QNN's own if `reason` has none; `log` is the compiler's output.

    `origins` belong to the nodes of its graphs. `values` describe numbers in the graphs that are infinite or NaN.
    """
    if inner := _IN_REFUSAL.search(reason):
        # The refusal of a module quotes the error of its flow.
        within = explained(f"AssertionError: {inner['empty']}", log, origins, values)
        return f"{reason[: inner.start()]}({within})" if within.startswith("QNN: ") else reason
    if not _EMPTY.match(reason):
        return "; ".join((reason, *values)) if _OF_NUMBERS.search(reason) else reason
    failed, refused = _read(log.splitlines())
    parts = []
    if refused and (failed is None or _OF_A_WEIGHT.search(f"{failed.text} {failed.node}")):
        parts.append(_shown(refused[0], origins))
    if failed is not None:
        parts.append(_shown(failed, origins))
    if not parts:
        return "; ".join((reason, *values))
    if failed is not None and _BAD_SCALE in failed.text:
        parts += values
    return f"QNN: {'; '.join(parts)}"


def _read(lines: Iterable[str]) -> tuple[QnnError | None, list[QnnError]]:
    """Return the error that ended the compilation, and the refusals of nodes before it."""
    refused: list[QnnError] = []
    first: QnnError | None = None
    cause = unreadable = ""
    for line in lines:
        if _BUILDS.search(line):
            first, cause = None, ""
            continue
        if found := _UNREADABLE.search(line):
            unreadable = found["text"]
            continue
        if not (error := _ERROR.search(line)):
            continue
        text = _TAIL.sub("", _NO_INDEX.sub("", error["text"]))
        if node := _REFUSED.search(text):
            refused.append(QnnError(cause or text, node["node"]))
            first, cause = None, ""
        elif not _FOLLOWS.search(text):
            cause = cause or text
            first = first or QnnError(text, "")
            # Some errors name their node in a line below.
            first = first._replace(node=first.node or _node_of(text))
    if first is None and unreadable:
        first = QnnError(unreadable, "")
    return first, refused


def _node_of(text: str) -> str:
    found = _NODE.search(text)
    return next((node for node in found.groups() if node), "") if found else ""


def _shown(error: QnnError, origins: Mapping[str, Origin]) -> str:
    text = error.text.rstrip(".")
    if error.node and error.node not in text:
        text = f"{text}, in {error.node}"
    return f"{text}{place_of(origins.get(error.node, UNKNOWN))}"
