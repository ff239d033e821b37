"""Placeholders for packages that ExecuTorch's Qualcomm examples import and no compile needs.

torchtune, lm_eval and datasets do not install beside the torch of ExecuTorch 1.5. The names of a missing package are
placeholders while the examples are imported, and no other import of this process finds them.
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
# Functions of these packages that a compile calls (weights of Qwen 2.5) -> the equal function of ExecuTorch.
_CALLED = {
    "torchtune.models.convert_weights.get_mapped_key": ("executorch.examples.models.checkpoint", "get_mapped_key")
}


class _StandIn(ModuleType):
    """Module in which every name is an empty class of that name, for imports only."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if place := _CALLED.get(f"{self.__name__}.{name}"):
            module, attribute = place
            return getattr(importlib.import_module(module), attribute)
        return type(name, (), {})


class _StandInFinder(MetaPathFinder, Loader):
    """Finder of placeholders for the packages, after all other finders of the path."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec of a placeholder for a module `name` of the packages, else None."""
        del path, target
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in _PACKAGES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty package."""
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module empty."""


@contextmanager
def stand_ins() -> Iterator[None]:
    """Provide placeholders for missing packages while the body runs, and remove them afterwards."""
    finder = _StandInFinder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _StandIn)]:
            del sys.modules[name]
