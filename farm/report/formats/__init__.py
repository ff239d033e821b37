"""Formats of `farm data export` and `farm nightly`: each module here registers one (`docs/reference/exports.md`)."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from farm.store.records import RunView
    from farm.store.store import Store

_Render = TypeVar("_Render", bound="Callable[..., Any]")

DEFAULT = "jsonl"


class ExportFormat(msgspec.Struct, frozen=True):
    """Value of `farm data export --format`."""

    name: str
    suffix: str
    """End of the name of a file in this format."""
    about: str
    """Description for `farm data export --help` and docs/reference/exports.md."""
    render: Callable[..., Any]
    several_runs: bool
    """True when `render` takes the store and run ids and yields bytes; otherwise it takes a RunView and returns
    text."""

    def write(self, store: Store, run_ids: Sequence[str], view: RunView | None = None) -> Iterable[bytes]:
        """Return the runs in this format; `view` is the view of a single run, if the caller has read it already."""
        if self.several_runs:
            found: Iterable[bytes] = self.render(store, run_ids)
            return found
        text: str = self.render(view or store.runs.view(run_ids[0]))
        return [text.encode() if text.endswith("\n") else f"{text}\n".encode()]


_registered: dict[str, ExportFormat] = {}


def export_format(name: str, *, suffix: str, about: str, several_runs: bool = False) -> Callable[[_Render], _Render]:
    """Return the decorator that registers a function as the format `name`."""

    def register(render: _Render) -> _Render:
        _registered[name] = ExportFormat(name, suffix, about, render, several_runs)
        return render

    return register


@functools.cache
def export_formats() -> Mapping[str, ExportFormat]:
    """Return every format by its name, the default first."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return {name: _registered[name] for name in sorted(_registered, key=lambda name: (name != DEFAULT, name))}
