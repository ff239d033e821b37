"""All backends, by name. A new one is a module beside this one, and a line here: docs/developers/recipes.md."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from farm.base.errors import UnknownNameError

if TYPE_CHECKING:
    from farm.base.backends.descriptor import Backend

_MODULES = (
    "htp",
    "lpai",
    "gpu",
    "xnnpack",
)

BACKENDS: dict[str, Backend] = {name: import_module(f"farm.base.backends.{name}").BACKEND for name in _MODULES}

DEFAULT_BACKEND = "htp"
"""Backend of a command that names none."""


def find_backend(name: str) -> Backend:
    """Return a backend by name. Raises UnknownNameError."""
    if name not in BACKENDS:
        raise UnknownNameError("backend", name, BACKENDS)
    return BACKENDS[name]


def cpu_backends() -> tuple[str, ...]:
    """Return the names of CPU backends, which every SoC has and every case runs on."""
    return tuple(name for name, backend in BACKENDS.items() if backend.on_cpu)


def runs_on_cpu(name: str) -> bool:
    """Return whether `name` is a CPU backend; a store may name unknown backends."""
    return name in cpu_backends()
