"""Compiling under watch: a failure has QNN's own reason, and a process that a signal ends leaves its node. Torch-free.

The node at work is in a file beside the log of its process, which outlives a process ended by a signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from farm.base.backends.registry import runs_on_cpu
from farm.base.text import one_line
from farm.builds.bundles.bundle import UNKNOWN, Origin, place_of
from farm.builds.compile.protocol import failure_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from farm.builds.compile.graph_watch import GraphWatch
    from farm.suites.suite import Job


# Log of a compilation -> QNN's line with the reason of the failure. Pure.


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


_MOST_BYTES = 400


def watched_failure_of(job: Job, log: Path, act: Callable[[], object]) -> tuple[str, bool]:
    """Compile `job` by `act`, and return the result of `failure_of`; `log` is the file of this process's output."""
    with noting_node(log) as note:
        watch = _watch(job, note)
        reason, infra = failure_of(act if watch is None else watch.watching()(act))
        if not reason or infra or watch is None:
            return reason, infra
        sys.stderr.flush()
        printed = log.read_text(encoding="utf-8", errors="replace")
        return explained(reason, printed, watch.origins, watch.odd_values), infra


def _watch(job: Job, note: Callable[[str], None]) -> GraphWatch | None:
    """Return the watch of a job's graphs for QNN; None for a job without QNN, or in another version of ExecuTorch."""
    if runs_on_cpu(job.target.backend) or job.case.pte:
        return None
    # After a failed import the compilation fails at the same import, with its own message.
    with contextlib.suppress(ImportError, AttributeError):
        from farm.builds.compile.graph_watch import GraphWatch

        return GraphWatch(job.case, note)
    return None


@contextlib.contextmanager
def noting_node(log: Path) -> Iterator[Callable[[str], None]]:
    """Yield a function that notes the node at work; the file is removed after the body, and stays after a kill."""
    path = _beside(log)
    file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o644)

    def note(node: str) -> None:
        # A graph has thousands of nodes: each is one system call. On a full disk the job fails with the right cause
        # when it writes its bundle.
        with contextlib.suppress(OSError):
            os.pwrite(file, node.encode(errors="replace")[:_MOST_BYTES] + b"\n", 0)

    try:
        yield note
    finally:
        os.close(file)
        path.unlink(missing_ok=True)


def take_node(log: Path) -> str:
    """Return the last node of a compiler that ended without a reply, and add it to the log; "" for an unknown node."""
    path = _beside(log)
    try:
        with path.open("rb") as file:
            node = one_line(file.readline(_MOST_BYTES + 1).decode(errors="replace"))
        path.unlink()
        if node:
            with log.open("ab") as file:
                file.write(f"\nfarm: the compiler was at {node}\n".encode())
    except OSError:
        return ""
    return node


def _beside(log: Path) -> Path:
    return log.with_name(f"{log.name}.at")
