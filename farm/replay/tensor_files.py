"""Files that a user names -> tensors of a program, checked; or random ones where there are no files."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import numpy as np

from farm.base.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from farm.builds.program.pte import Value

    Array = NDArray[np.generic]
    Samples = tuple[tuple[Array, ...], ...]

_NPY = ".npy"
# Whole ranges make sense of quantized tensors. Larger integers are mostly indices, and 0 and 1 are mostly there.
_SMALL_INTEGERS = ("uint8", "int8", "uint16", "int16")


def read_list(path: Path) -> list[Path]:
    """Return the files of an input list, line after line: names beside the list, quoted as in a shell.

    Raises ConfigError for a list that cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [path.parent / name for line in lines for name in shlex.split(line)]
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    except ValueError as error:
        raise ConfigError(path, "", f"is no list of files: {error}") from None


def read_samples(files: Sequence[Path], values: Sequence[Value], what: str) -> Samples:
    """Return the tensors in `files`, as many for each inference as there are `values`; `what` is `input` or `output`.

    Raises UsageError for another number of files, ConfigError for a tensor that does not fit the program.
    """
    if not values or len(files) % len(values):
        wanted = ", ".join(map(str, values)) or f"no {what}"
        raise UsageError(f"{len(files)} {what} files for a program with {wanted}: {len(values)} for every inference")
    samples = []
    for start in range(0, len(files), len(values)):
        sample = tuple(
            _read(path, value, f"{what} {index}")
            for index, (path, value) in enumerate(zip(files[start:], values, strict=False))
        )
        samples.append(sample)
        for index, (tensor, first) in enumerate(zip(sample, samples[0], strict=True)):
            if tensor.shape != first.shape:
                problem = f"is {list(tensor.shape)}, the first inference has {list(first.shape)}: one shape for all"
                raise ConfigError(files[start + index], "", problem)
    return tuple(samples)


def random_sample(values: Sequence[Value], seed: int) -> tuple[Array, ...]:
    """Return one tensor for each of `values`, at its greatest shape: the same for the same seed on every machine."""
    return tuple(_random(value, np.random.default_rng([seed, index])) for index, value in enumerate(values))


def distribution(value: Value) -> str:
    """Say what `random_sample` draws from for `value`."""
    if value.dtype.startswith("float"):
        return "normal"
    return f"any {value.dtype}" if value.dtype in _SMALL_INTEGERS else "0 or 1"


def _random(value: Value, generator: np.random.Generator) -> Array:
    dtype = np.dtype(value.dtype)
    if dtype.kind == "f":
        return np.asarray(generator.standard_normal(value.shape)).astype(dtype)
    if value.dtype in _SMALL_INTEGERS:
        limits = np.iinfo(dtype)
        return np.asarray(generator.integers(limits.min, limits.max, value.shape, endpoint=True)).astype(dtype)
    return np.asarray(generator.integers(0, 2, value.shape)).astype(dtype)


def _read(path: Path, value: Value, place: str) -> Array:
    try:
        tensor = _read_npy(path) if path.suffix == _NPY else _read_raw(path, value, place)
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    except ValueError as error:
        # As of a name with a null character.
        raise ConfigError(path, "", str(error)) from None
    if tensor.dtype.name != value.dtype or not _fits(tensor.shape, value):
        raise ConfigError(path, "", f"is {tensor.dtype.name}{list(tensor.shape)}, {place} is {value}")
    return np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("=")).reshape(tensor.shape)


def _read_npy(path: Path) -> Array:
    try:
        # Mapped, so that a header that claims more than there is takes no memory.
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, SyntaxError, OverflowError) as error:
        raise ConfigError(path, "", f"is no .npy file of numbers: {error}") from None
    if not isinstance(array, np.ndarray):
        raise ConfigError(path, "", "is no .npy file of one array")
    return array


def _read_raw(path: Path, value: Value, place: str) -> Array:
    size = path.stat().st_size
    if size != value.nbytes:
        raise ConfigError(path, "", f"has {size} bytes, {place} is {value} and has {value.nbytes}")
    return np.fromfile(path, np.dtype(value.dtype)).reshape(value.shape)


def _fits(shape: tuple[int, ...], value: Value) -> bool:
    if not value.dynamic or len(shape) != len(value.shape):
        return shape == value.shape
    return all(size <= bound for size, bound in zip(shape, value.shape, strict=True))
