"""A ready program, run once and looked at: figures of its outputs, and how far they are from what was expected."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from farm.bundles.bundle import read_tensor
from farm.errors import UsageError
from farm.execution.raw import ETDUMP_FILE
from farm.replay.one_off import OneOffOutcome, OneOffRequest, run_one
from farm.results.attempt import Attempt, Comparison, Verdict
from farm.results.numerics import compare, worst
from farm.results.outputs import compared

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from farm.config.settings import Config
    from farm.execution.raw import RawResult
    from farm.replay.ready_program import ReadyProgram
    from farm.store.store import Store

EXPECTED = "expected"
"""What outputs are compared with, as the name of a reference."""

_SHOWN = 8


class OutputFigures(msgspec.Struct, frozen=True):
    """One output of one inference. None: it has no finite element."""

    sample: int
    output: int
    dtype: str
    shape: tuple[int, ...]
    least: float | None
    greatest: float | None
    mean: float | None
    std: float | None
    nan: int
    infinite: int
    first: tuple[float, ...]
    """Its first values, in C order."""


class ReadyOutcome(msgspec.Struct, frozen=True):
    """How it ended."""

    one: OneOffOutcome
    outputs: tuple[OutputFigures, ...]
    """Inference by inference; none where it did not run to its end."""


def run_ready(
    config: Config,
    store: Store,
    ready: ReadyProgram,
    request: OneOffRequest,
    folder: Path | None,
    say: Callable[[str], None],
) -> ReadyOutcome:
    """Run a ready program, record it, leave its outputs in `folder`, and return how it ended. Raises as `run_one`."""
    figures: list[OutputFigures] = []
    if folder is not None:
        _require_new(folder)

    def look(raw: RawResult, attempt: Attempt) -> Attempt:
        if attempt.verdict is not Verdict.PASSED:
            return attempt
        outputs = _outputs(ready, raw)
        figures.extend(_figures(sample, index, array) for (sample, index), array in outputs.items())
        if folder is not None:
            _save(folder, raw, outputs)
        return msgspec.structs.replace(attempt, comparisons=_comparisons(ready, outputs)) if ready.expected else attempt

    one = run_one(config, store, request, lambda _tools, _supervisor: ready.bundle(config), say, look)
    return ReadyOutcome(one, tuple(figures))


def _outputs(ready: ReadyProgram, raw: RawResult) -> dict[tuple[int, int], NDArray[np.generic]]:
    """Return the outputs by inference and index: judged to be there, and to have the size that the program says."""
    return {
        (sample, index): read_tensor(raw.output(sample, index), spec)
        for sample in range(len(ready.samples))
        for index, spec in enumerate(ready.outputs)
    }


def _figures(sample: int, index: int, array: NDArray[np.generic]) -> OutputFigures:
    values = array.astype(np.float64).ravel()
    finite = values[np.isfinite(values)]
    least, greatest, mean, std = (
        (float(function(finite)) if finite.size else None) for function in (np.min, np.max, np.mean, np.std)
    )
    nan = int(np.count_nonzero(np.isnan(values)))
    return OutputFigures(
        sample,
        index,
        array.dtype.name,
        array.shape,
        least,
        greatest,
        mean,
        std,
        nan,
        values.size - finite.size - nan,
        tuple(values[:_SHOWN].tolist()),
    )


def _comparisons(ready: ReadyProgram, outputs: dict[tuple[int, int], NDArray[np.generic]]) -> tuple[Comparison, ...]:
    found = []
    for index in range(len(ready.outputs)):
        figures = worst(
            compare(outputs[sample, index], expected[index]) for sample, expected in enumerate(ready.expected)
        )
        found.append(compared(index, EXPECTED, figures))
    return tuple(found)


def _require_new(folder: Path) -> None:
    """Raise UsageError unless `folder` is empty, or can be made; makes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} has something in it already: name another folder")
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None


def _save(folder: Path, raw: RawResult, outputs: dict[tuple[int, int], NDArray[np.generic]]) -> None:
    try:
        for (sample, index), array in outputs.items():
            shutil.copyfile(raw.output(sample, index), folder / f"output_{sample}_{index}.raw")
            np.save(folder / f"output_{sample}_{index}.npy", array, allow_pickle=False)
        if (raw.folder / ETDUMP_FILE).is_file():
            shutil.copyfile(raw.folder / ETDUMP_FILE, folder / ETDUMP_FILE)
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror}") from None
