"""Vendor of the processor, read from the kernel. Torch-free.

ExecuTorch 1.5.1 asks py-cpuinfo, which starts a Python process: 0.7 s of processor time in the first job of a builder.
Without py-cpuinfo ExecuTorch goes on without the vendor, and so does this shortcut.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULE = "executorch.backends.qualcomm.utils.qnn_sdk_setup"
_READ = "_read_cpu_vendor"
_PROCESSORS = Path("/proc/cpuinfo")
_VENDOR = re.compile(r"^vendor_id\s*: (\w+)$", re.MULTILINE)


@contextmanager
def vendor_from_kernel() -> Iterator[None]:
    """Let ExecuTorch read the vendor from /proc/cpuinfo while the body runs.

    An ExecuTorch with other functions, and a processor without a vendor there, as of Arm, stay as they are.
    """
    # A flow for QNN has imported the module.
    module = sys.modules.get(_MODULE)
    read: Any = getattr(module, _READ, None)
    is_known = callable(read) and not inspect.signature(read).parameters
    if not is_known or importlib.util.find_spec("cpuinfo") is None:
        yield
        return

    def read_vendor() -> Any:
        try:
            found = _VENDOR.search(_PROCESSORS.read_text(encoding="utf-8"))
        except OSError:
            found = None
        return found[1] if found else read()

    with patch.object(module, _READ, read_vendor):
        yield
