"""Case -> torch module and inputs, the same on every machine. Imports torch."""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import math
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from farm.builds.compile.flows.flow import Example
from farm.suites.suite import FORWARD, Case, InputSpec

# Distance of the seeds of two samples, so that no two inputs of a case share a seed with small seeds in its manifest.
_SAMPLE_STRIDE = 1000


def make_module(case: Case) -> torch.nn.Module:
    """Return the module of `case` in eval mode, its weights drawn from the case's seed.

    Raises ConfigError if the factory is missing or makes no torch.nn.Module, or if a file cannot be read; the
    constructor's exceptions pass through.
    """
    if case.program:
        # A file that torch.export did not write may raise any exception.
        with _refusing(case, "program", f"{case.program} is no program of torch.export that this torch can read"):
            return torch.export.load(Path(case.folder, case.program)).module()
    module_name, _, class_name = case.module.partition(":")
    with _refusing(case, "module", "cannot be imported", (ImportError, OSError)):
        python_module = importlib.import_module(import_name(module_name, case.folder))
    factory = getattr(python_module, class_name, None)
    if factory is None:
        raise case.error("module", f"{module_name} has no {class_name}")
    torch.manual_seed(case.seed)
    made = factory(*case.args, **case.kwargs)
    if not isinstance(made, torch.nn.Module):
        raise case.error("module", f"makes a {type(made).__name__}, expected a torch.nn.Module")
    if case.checkpoint:
        with _refusing(case, "checkpoint", f"{case.checkpoint} does not fit the module"):
            made.load_state_dict(load_tensors(Path(case.folder, case.checkpoint)))
    return made.eval()


def make_method(case: Case, module: torch.nn.Module, name: str) -> torch.nn.Module:
    """Return a module whose `forward` is the method `name` of the module of `case`, with its weights, or a submodule.

    Raises ConfigError for a name that is neither.
    """
    if name == FORWARD:
        return module
    found = getattr(module, name, None)
    if isinstance(found, torch.nn.Module):
        return found
    method = getattr(type(module), name, None)
    if not inspect.isfunction(method):
        raise case.error("method", f"{case.module} has no method or submodule {name!r}")
    # torch.export traces the `forward` of a class, with the names of weights in it: the method needs its own class.
    other = copy.copy(module)
    other.__class__ = type(f"{type(module).__name__}_{name}", (type(module),), {FORWARD: method})
    return other


def load_tensors(path: Path) -> Any:
    """Return the tensors in a file of torch or safetensors, by name. Raises any exception for a broken file."""
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    # Only tensors and plain containers are accepted, as other objects in a pickle could run code. Files of torch 1.6
    # and later are ZIP archives, which are mapped and read piece by piece.
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


@contextmanager
def _refusing(case: Case, key: str, problem: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Raise ConfigError for an error of these `kinds` in the body."""
    try:
        yield
    except kinds as error:
        raise case.error(key, f"{problem}: {error}") from error


def import_name(name: str, folder: str) -> str:
    """Return the name by which Python imports `name`; `.model` is a file in the suite's `folder`."""
    if name.startswith(".."):
        return f"{_package(str(Path(folder).parent))}{name[1:]}"
    return f"{_package(folder)}{name}" if name.startswith(".") else name


def _package(folder: str) -> str:
    """Make the folder of a suite a package and return its name: its files import each other by `from .other`.

    Every folder has its own package name, as two suites may both have an operators.py.
    """
    name = f"farm_suite_{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    return name


def make_inputs(case: Case, sample: int) -> tuple[torch.Tensor, ...]:
    """Return the inputs of one sample, in the order, shapes and dtypes of the manifest.

    Raises ConfigError for a file that does not fit.
    """
    return tuple(
        _read_array(case, spec.files[sample], spec)
        if spec.files
        else _tensor(spec, spec.shape or (), spec.seed + _SAMPLE_STRIDE * sample + index)
        for index, spec in enumerate(case.inputs)
    )


def make_example(case: Case, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Example:
    """Return the inputs for the export of the module of `case`: `inputs`, or the greatest ones for dynamic sizes."""
    if not any(spec.dynamic for spec in case.inputs):
        return Example(inputs, None)
    dims: dict[str, Any] = {}
    greatest, dynamic = [], []
    for index, spec in enumerate(case.inputs):
        shape = list(spec.shape or ())
        names = {}
        for size in spec.dynamic:
            shape[size.dim] = size.greatest
            name = size.name or f"size_{index}_{size.dim}"
            names[size.dim] = dims.setdefault(name, torch.export.Dim(name, min=size.least, max=size.greatest))
        greatest.append(_tensor(spec, tuple(shape), spec.seed + index))
        dynamic.append(names)
    parameters = inspect.signature(module.forward).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        # ExecuTorch exports the exported program again, and torch.export then expects another structure of `*inputs`.
        problem = "dynamic sizes need a module whose forward names its inputs one by one, not *inputs"
        raise case.error("inputs", problem)
    return Example(tuple(greatest), tuple(dynamic))


def read_expected(case: Case) -> list[tuple[torch.Tensor, ...]]:
    """Return the expected outputs from files, by sample. Raises ConfigError for a file that is no array."""
    return [tuple(_read_array(case, file) for file in files) for files in case.expected]


def _read_array(case: Case, file: str, spec: InputSpec | None = None) -> torch.Tensor:
    import numpy as np

    with _refusing(case, "", f"{file} is no array of numpy's", (OSError, ValueError, TypeError)):
        tensor = torch.from_numpy(np.load(Path(case.folder, file), allow_pickle=False))
    if spec and spec.shape is not None and tuple(tensor.shape) != spec.shape:
        raise case.error("inputs", f"{file} has the shape {list(tensor.shape)}, expected {list(spec.shape)}")
    return tensor


def _tensor(spec: InputSpec, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    made: Any
    match spec.distribution:
        case "normal":
            made = torch.randn(shape, generator=generator) * spec.scale
        case "uniform":
            made = torch.rand(shape, generator=generator) * (spec.high - spec.low) + spec.low
        case "integers":
            made = torch.randint(int(spec.low), int(spec.high), shape, generator=generator)
        case "arange":
            made = torch.arange(count).reshape(shape)
        case "linspace":
            made = torch.linspace(spec.low, spec.high, count).reshape(shape)
        case "constant":
            made = torch.full(shape, spec.low)
    if spec.dtype == "bool" and spec.distribution in ("normal", "uniform"):
        return torch.as_tensor(made > 0)
    return torch.as_tensor(made).to(getattr(torch, spec.dtype))
