"""What ExecuTorch's Qualcomm examples import and a compile does not need: torchtune, lm_eval and datasets.

They do not install beside the torch of ExecuTorch 1.5. Where one is missing, its names are placeholders while the
examples are imported, and nobody else in this process ever sees them.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_PACKAGES = frozenset({"torchtune", "lm_eval", "datasets"})
# What is called all the same, and where ExecuTorch has the same function: converting weights of Qwen 2.5.
_CALLED = {
    "torchtune.models.convert_weights.get_mapped_key": ("executorch.examples.models.checkpoint", "get_mapped_key")
}


class _StandIn(ModuleType):
    """A module in which every name is a class of that name, which is good for nothing but to be imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if place := _CALLED.get(f"{self.__name__}.{name}"):
            module, attribute = place
            return getattr(importlib.import_module(module), attribute)
        return type(name, (), {})


class _StandInFinder(MetaPathFinder, Loader):
    """Finds the packages where nothing else does: it is the last that is asked."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return where the module `name` comes from: here, for those packages."""
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty package."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Let the packages that are missing be imported while the body runs, and be as missing as before after it."""
    finder = _StandInFinder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]
