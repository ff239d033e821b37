"""Reads of ExecuTorch that repeat, or that cost a process or a slow parser. Imports torch."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from farm.builds.compile.flows.shortcuts.tried import replaced

# Modules that a flow for QNN imports.
_OPTIONS = "executorch.backends.qualcomm.serialization.qc_schema_serialize"
_SETUP = "executorch.backends.qualcomm.utils.qnn_sdk_setup"
_PROCESSORS = Path("/proc/cpuinfo")
_VENDOR = re.compile(r"^vendor_id\s*: (\w+)$", re.MULTILINE)


def options_read_once() -> AbstractContextManager[None]:
    """Let ExecuTorch decode the options of a delegate once, and not with a process of `flatc` for each of six readers.

    An ExecuTorch with other functions stays unchanged.
    """
    found: dict[tuple[Any, ...], Any] = {}

    def once(decode: Callable[..., Any]) -> Callable[..., Any]:
        def decode_once(data: bytes, *schema: Any) -> Any:
            key = (bytes(data), *schema)
            if key not in found:
                found[key] = decode(data, *schema)
            # Readers modify the decoded options, so that each gets a copy.
            return copy.deepcopy(found[key])

        return decode_once

    return replaced(sys.modules.get(_OPTIONS), "_convert_to_object", once)


def vendor_from_kernel() -> AbstractContextManager[None]:
    """Let ExecuTorch read the vendor of the processor from /proc/cpuinfo.

    ExecuTorch 1.5.1 asks py-cpuinfo, which starts a Python process: 0.7 s of processor time in the first job of a
    builder. Without py-cpuinfo ExecuTorch goes on without the vendor, and so does this shortcut. An ExecuTorch with
    other functions, and a processor without a vendor there, as of Arm, stay as they are.
    """

    def from_kernel(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_vendor() -> Any:
            try:
                found = _VENDOR.search(_PROCESSORS.read_text(encoding="utf-8"))
            except OSError:
                found = None
            return found[1] if found else read()

        return read_vendor

    if importlib.util.find_spec("cpuinfo") is None:
        return nullcontext()
    return replaced(sys.modules.get(_SETUP), "_read_cpu_vendor", from_kernel)


def edge_types_by_libyaml() -> AbstractContextManager[None]:
    """Let ruamel.yaml parse texts with libyaml while the body imports ExecuTorch.

    ExecuTorch parses the types of edge operators as it is imported, 140 kB of YAML in Python: 0.7 s of the 5 s of
    processor time of a builder's imports. The file of ExecuTorch 1.5.1 means the same in YAML 1.1 (PyYAML) and 1.2
    (ruamel.yaml).
    """
    try:
        import yaml
        from ruamel.yaml import YAML

        loader = yaml.CSafeLoader
    except (ImportError, AttributeError):
        return nullcontext()

    def by_libyaml(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_text(self: Any, stream: Any) -> Any:
            is_safe_text = isinstance(stream, str) and self.typ == ["safe"]
            return yaml.load(stream, Loader=loader) if is_safe_text else load(self, stream)  # noqa: S506 - a safe loader

        return load_text

    return replaced(YAML, "load", by_libyaml, tried_only=True)
