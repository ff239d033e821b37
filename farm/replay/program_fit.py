"""Fit of a program before a device is used: SoC, QNN, skel, operators on the CPU, error, size, VTCM."""

from __future__ import annotations

import mmap
import re
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from farm.base.backends.registry import find_backend
from farm.base.socs import Soc, find_soc
from farm.builds.program.pte import Method, Value, qnn_payloads
from farm.builds.runtime.device_files import Places, android_places, device_parts
from farm.builds.runtime.parts import FileFault, RuntimePart, find_fault
from farm.builds.runtime.qnn_sdk import release_of
from farm.replay.properties import CheckLine, Level
from farm.report.model import format as fmt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.results.numerics import Figures
    from farm.suites.suite import Target

# QNN writes its build id into each context.
_BUILD_ID = re.compile(rb"v(\d{1,3}\.\d{1,4}\.\d{1,4})\.\d{6,}")
_ID_BYTES = 1 << 16
# The DSP addresses 4 GB: farm/results/known_troubles.py.
_MOST_CONTEXT_BYTES = 4 << 30
# An error of a tenth of the signal's amplitude.
_LEAST_SQNR_DB = 20.0
_NAMED_OPERATORS = 6


class FitOf(StrEnum):
    """Checked part of the fit, in the order of the lines."""

    SOC = "SoC"
    QNN = "QNN"
    SKEL = "skel"
    FILES = "files"
    CPU = "on the CPU"
    ERROR = "error"
    SIZE = "size"
    VTCM = "VTCM"


FitLine = CheckLine[FitOf]
"""Line of the fit of a program."""


class Contexts(NamedTuple):
    """Compiled parts of a program for QNN."""

    sizes: tuple[int, ...]
    """Size of each part in bytes."""
    qnn: str
    """QNN that compiled them, `2.51.0`; empty if unknown."""


def read_contexts(path: Path) -> Contexts:
    """Return the compiled parts of a `.pte` that `read_pte` has accepted."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        # Only slices of a mapped file are read.
        places = qnn_payloads(data)
        sizes = tuple(end - start for start, end in places)
        versions = (_BUILD_ID.search(data, start, min(end, start + _ID_BYTES)) for start, end in places)
        found = next((one[1].decode() for one in versions if one), "")
    return Contexts(sizes, found)


def fit_of(
    config: Config,
    target: Target,
    method: Method,
    path: Path,
    *,
    simulator_qnn: str,
    error: Sequence[Figures] | None,
    is_compared: bool,
) -> tuple[FitLine, ...]:
    """Return the fit of a program that `check_runnable` has accepted.

    `simulator_qnn` is QNN's version for a virtual device, empty for an attached device. `error` has the figures of each
    output of the quantized module against FP32, None without a module; `is_compared` is True if outputs are compared
    after the execution.
    """
    soc, backend = find_soc(target.soc), find_backend(target.backend)
    contexts = read_contexts(path)
    lines = [_soc_line(soc, target, method)]
    if backend.on_cpu:
        lines += () if simulator_qnn else file_lines(_parts(soc, target, android_places(config)))
    elif simulator_qnn:
        lines += [qnn_line(contexts.qnn, simulator_qnn), FitLine(FitOf.SKEL, Level.OK, "none: QNN's simulator runs it")]
    else:
        places = android_places(config)
        lines += [qnn_line(contexts.qnn, places.qnn.version), *file_lines(_parts(soc, target, places))]
    lines += [cpu_line(method, on_cpu=backend.on_cpu), error_line(error, is_compared=is_compared)]
    lines += [size_line(path.stat().st_size, contexts)]
    if target.backend == "htp":
        lines.append(vtcm_line(soc, (*method.inputs, *method.outputs)))
    return tuple(lines)


def _parts(soc: Soc, target: Target, places: Places) -> Sequence[RuntimePart]:
    return device_parts(soc, target.backend, places, target.mode)


def _soc_line(soc: Soc, target: Target, method: Method) -> FitLine:
    compiled = any(one.qnn is not None for one in method.delegates)
    how = f"compiled for it ({target.backend})" if compiled else "no part for QNN: any SoC's CPU runs it"
    return FitLine(FitOf.SOC, Level.OK, f"{soc.name}, HTP V{soc.htp_arch}: {how}")


def qnn_line(compiled: str, runtime: str) -> FitLine:
    """Return the line of the version of QNN: a runtime loads no program of a newer QNN."""
    by = f"compiled by QNN {compiled}" if compiled else "compiled by an unknown QNN"
    if not runtime:
        return FitLine(
            FitOf.QNN,
            Level.WARNING,
            f"{by}, the runtime's version is unknown",
            "docs/guides/runtime.md names its files",
        )
    ours, theirs = release_of(runtime), release_of(compiled)
    runtime = _BUILD_ID.sub(rb"\1", runtime.encode()).decode()
    if ours and theirs and theirs > ours:
        step = "compile it with that version, or use a newer SDK (QNN_SDK_ROOT)"
        return FitLine(FitOf.QNN, Level.ERROR, f"{by}, newer than the runtime's {runtime}", step)
    return FitLine(FitOf.QNN, Level.OK, f"{by}, the runtime has {runtime}")


def file_lines(parts: Sequence[RuntimePart]) -> Iterator[FitLine]:
    """Yield the lines of the files for an attached Android device; files with one repair share a line."""
    faults = {part.name: fault for part in parts if (fault := find_fault(part))}
    skels = [part for part in parts if part.name.endswith("Skel.so")]
    for skel in skels:
        if fault := faults.pop(skel.name, None):
            yield FitLine(FitOf.SKEL, Level.WARNING, _named(skel.name, fault), fault.repair)
        else:
            yield FitLine(FitOf.SKEL, Level.OK, f"{skel.name}, for this HTP")
    by_repair: dict[str, list[str]] = {}
    for name, fault in faults.items():
        by_repair.setdefault(fault.repair, []).append(_named(name, fault))
    for repair, problems in by_repair.items():
        yield FitLine(FitOf.FILES, Level.WARNING, ", ".join(problems), repair)
    if not faults:
        yield FitLine(FitOf.FILES, Level.OK, f"{len(parts) - len(skels)} for Android, complete")


def _named(name: str, fault: FileFault) -> str:
    return fault.problem if fault.problem.startswith(name) else f"{name} {fault.problem}"


def cpu_line(method: Method, *, on_cpu: bool) -> FitLine:
    """Return the line of the operators that no delegate took."""
    left = sorted(method.cpu_operators.items(), key=lambda one: (-one[1], one[0]))
    if not left:
        return FitLine(FitOf.CPU, Level.OK, "no operator" if not on_cpu else "all, by the delegate")
    names = ", ".join(f"{name} {count}" for name, count in left[:_NAMED_OPERATORS])
    more = f" and {len(left) - _NAMED_OPERATORS} other kinds" if len(left) > _NAMED_OPERATORS else ""
    if on_cpu:
        return FitLine(FitOf.CPU, Level.OK, f"{names}{more}")
    parts = len(method.delegates)
    step = "each border copies tensors; docs/reference/operators.md lists the operators of QNN"
    return FitLine(FitOf.CPU, Level.WARNING, f"{names}{more}, beside {parts} delegated parts", step)


def error_line(error: Sequence[Figures] | None, *, is_compared: bool) -> FitLine:
    """Return the line of the expected error against FP32."""
    if error is None:
        known = "compared with the expected outputs after the execution" if is_compared else "unknown"
        step = "" if is_compared else "--expect FP32 outputs, or run the module, as net.py:Net"
        return FitLine(FitOf.ERROR, Level.OK if is_compared else Level.WARNING, known, step)
    if not error:
        return FitLine(FitOf.ERROR, Level.OK, "not computed: floating point is compared after the execution")
    values = [one.sqnr_db for one in error]
    shown = ", ".join(f"output {index} SQNR {fmt.decibel(value)} dB" for index, value in enumerate(values))
    text = f"{shown} against FP32, by the quantized module on the CPU"
    if any(value is not None and value < _LEAST_SQNR_DB for value in values):
        return FitLine(FitOf.ERROR, Level.WARNING, text, "another --precision, or real inputs to calibrate with")
    return FitLine(FitOf.ERROR, Level.OK, text)


def size_line(pte_bytes: int, contexts: Contexts) -> FitLine:
    """Return the line of the sizes of the file and of its greatest context."""
    text = f"{fmt.size(pte_bytes)}"
    if contexts.sizes:
        text += f", {len(contexts.sizes)} for QNN, the greatest {fmt.size(max(contexts.sizes))}"
        if max(contexts.sizes) > _MOST_CONTEXT_BYTES:
            return FitLine(FitOf.SIZE, Level.ERROR, text, "the DSP addresses 4 GB: split the program")
    return FitLine(FitOf.SIZE, Level.OK, text)


def vtcm_line(soc: Soc, values: Sequence[Value]) -> FitLine:
    """Return the line of the VTCM: the inputs and outputs that do not fit into it as a whole.

    A context does not show farm the tensors inside of it, so that a program with small inputs may spill too.
    """
    room = soc.vtcm_mb << 20
    text = f"{soc.vtcm_mb} MB"
    if large := [value for value in values if value.is_tensor and value.nbytes > room]:
        greatest = max(large, key=lambda value: value.nbytes)
        step = "HTP works on it in pieces through DDR; smaller tensors are faster"
        return FitLine(FitOf.VTCM, Level.WARNING, f"{text}, less than {greatest} ({fmt.size(greatest.nbytes)})", step)
    return FitLine(FitOf.VTCM, Level.OK, f"{text}, more than each input and output")
