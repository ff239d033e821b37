"""Plugin of pytest (`-p models_without_cuda`): torchvision and torchaudio from PyPI beside a torch for processors.

Their packages on PyPI are built for CUDA, so that their native libraries do not load. The networks that ExecuTorch's
`backends/test/suite/models` exports are Python alone. The plugin declares the native operators that the import of
torchvision registers, and puts a stub in the place of torchaudio's loader. A native operator raises when it is called.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _declare_native_operators() -> None:
    package = importlib.util.find_spec("torchvision")
    if package is None or package.origin is None:
        return
    with contextlib.suppress(OSError):
        torch.ops.load_library(package.origin.replace("__init__.py", "_C.so"))
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _BOXES)
    _KEPT.append(library)


def _stub_native_loader() -> None:
    package = importlib.util.find_spec("torchaudio")
    if package is None or package.origin is None:
        return
    with contextlib.suppress(OSError):
        torch.ops.load_library(package.origin.replace("__init__.py", "lib/_torchaudio.abi3.so"))
        return
    stub: Any = ModuleType("torchaudio._extension")
    stub._IS_TORCHAUDIO_EXT_AVAILABLE = stub._IS_ALIGN_AVAILABLE = False
    stub._check_cuda_version = lambda: None
    stub.fail_if_no_align = lambda function: function
    sys.modules[stub.__name__] = stub


_KEPT: list[Any] = []
_declare_native_operators()
_stub_native_loader()
