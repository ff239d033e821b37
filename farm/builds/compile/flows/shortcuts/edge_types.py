"""Types of the edge operators, parsed by libyaml. Imports torch.

ExecuTorch parses 140 kB of YAML in Python as it is imported: 0.7 s of the 5 s of processor time of a builder's imports.

Tried with ExecuTorch 1.5.1, whose file means the same in YAML 1.1 (PyYAML) and 1.2 (ruamel.yaml); another version is
not changed.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from farm.builds.compile.flows.shortcuts.tried import is_tried

if TYPE_CHECKING:
    from collections.abc import Iterator

_SAFE = ["safe"]


@contextmanager
def edge_types_by_libyaml() -> Iterator[None]:
    """Let ruamel.yaml parse texts with libyaml while the body imports ExecuTorch."""
    try:
        import yaml
        from ruamel.yaml import YAML

        loader, load = yaml.CSafeLoader, YAML.load
    except (ImportError, AttributeError):
        yield
        return
    if not is_tried():
        yield
        return

    def load_text(self: Any, stream: Any) -> Any:
        is_safe_text = isinstance(stream, str) and self.typ == _SAFE
        return yaml.load(stream, Loader=loader) if is_safe_text else load(self, stream)  # noqa: S506 - a safe loader

    with patch.object(YAML, "load", load_text):
        yield
