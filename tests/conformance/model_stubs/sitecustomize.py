"""On PYTHONPATH: lets upstream's test modules be imported without the model packages that they name.

`executorch.backends.qualcomm.tests.test_qnn_delegate` imports torchvision, torchaudio, torchsr and timm for its tests
of whole models. PyPI's torchvision and torchaudio need a torch built for CUDA, and the models' weights a download;
the tests of operators and utilities touch none of them. A missing package of these becomes a stub, whose names
raise on their first use; an installed one is left alone.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

_MODEL_PACKAGES = ("torchvision", "torchaudio", "torchsr", "timm")


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> _StubName:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StubName(f"{self.__name__}.{name}")


class _StubName:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_arguments: object, **_options: object) -> NoReturn:
        raise ModuleNotFoundError(f"{self._name} is a stub: install {self._name.partition('.')[0]} for your torch")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self()


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder at the end of `sys.meta_path`, which gets requests for missing packages only."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        package = fullname.partition(".")[0]
        if package not in _MODEL_PACKAGES or not isinstance(sys.modules.get(package, _STUB), _StubModule):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to execute: names come when they are asked for."""


# Collections at Python's own thresholds are a quarter of the import of torch and ExecuTorch.
gc.set_threshold(100_000, 20, 20)
_STUB = _StubModule("stub")
sys.meta_path.append(_StubFinder())
