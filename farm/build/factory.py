"""Case -> torch module and inputs, the same on every machine. Imports torch."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from farm.errors import ConfigError

if TYPE_CHECKING:
    from farm.suites import Case, InputSpec

# Apart enough that no two inputs of a case share a seed, whatever small seeds its manifest gives.
_SAMPLE_STRIDE = 1000


def make_module(case: Case) -> torch.nn.Module:
    """Return the module of `case` in eval mode, its weights drawn from the case's seed.

    Raises ConfigError when the factory is not there or is not a torch.nn.Module; what the constructor raises
    passes through.
    """
    module_name, _, class_name = case.module.partition(":")
    python_module = _import(case, module_name)
    factory = getattr(python_module, class_name, None)
    if factory is None:
        raise ConfigError(_manifest(case), f"case.{case.name}.module", f"{module_name} has no {class_name}")
    torch.manual_seed(case.seed)
    made = factory(*case.args, **case.kwargs)
    if not isinstance(made, torch.nn.Module):
        kind = type(made).__name__
        raise ConfigError(_manifest(case), f"case.{case.name}.module", f"makes a {kind}, expected a torch.nn.Module")
    return made.eval()


def _manifest(case: Case) -> Path:
    return Path(case.folder) / "suite.toml"


def _import(case: Case, name: str) -> ModuleType:
    try:
        return importlib.import_module(name if not name.startswith(".") else f"{_package(case.folder)}{name}")
    except (ImportError, OSError) as error:
        raise ConfigError(_manifest(case), f"case.{case.name}.module", f"cannot be imported: {error}") from error


def _package(folder: str) -> str:
    """Make the folder of a suite a package and return its name: its files import each other by `from .other`.

    The name is its own for every folder, as two suites may both have an operators.py.
    """
    name = f"farm_suite_{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    return name


def make_inputs(case: Case, sample: int) -> tuple[torch.Tensor, ...]:
    """Return the inputs of one sample, in the order, shapes and dtypes of the manifest."""
    return tuple(_tensor(spec, spec.seed + _SAMPLE_STRIDE * sample + index) for index, spec in enumerate(case.inputs))


def _tensor(spec: InputSpec, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = spec.shape
    count = 1
    for size in shape:
        count *= size
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
