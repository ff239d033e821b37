"""Input tensors of a program: read from files of the user and checked, or random without files."""

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
# Types drawn from their whole range: quantized tensors. Wider integers are mostly indices, for which 0 and 1 are safe.
_SMALL_INTEGERS = ("uint8", "int8", "uint16", "int16")


def read_list(path: Path) -> list[Path]:
    """Return the files named in an input list, whose names are relative to the list and quoted as in a shell.

    Raises ConfigError for an unreadable list.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [path.parent / name for line in lines for name in shlex.split(line)]
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
    except ValueError as error:
        raise ConfigError(path, "", f"is no list of files: {error}") from None


def read_samples(files: Sequence[Path], values: Sequence[Value], what: str) -> Samples:
    """Return the tensors in `files`, grouped by inference: one for each of `values`. `what` is `input` or `output`.

    Raises UsageError if the number of files is no multiple of `values`, ConfigError for a wrong type or shape.
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
    """Return a random tensor of greatest shape for each of `values`, equal for equal seeds on every machine."""
    return tuple(_random(value, np.random.default_rng([seed, index])) for index, value in enumerate(values))


def distribution(value: Value) -> str:
    """Return the distribution from which `random_sample` draws `value`, in words."""
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
        # For example a path with a null character.
        raise ConfigError(path, "", str(error)) from None
    if tensor.dtype.name != value.dtype or not _fits(tensor.shape, value):
        raise ConfigError(path, "", f"is {tensor.dtype.name}{list(tensor.shape)}, {place} is {value}")
    return np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("=")).reshape(tensor.shape)


def _read_npy(path: Path) -> Array:
    try:
        # Map the file: a header with a false huge size must not allocate memory.
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
