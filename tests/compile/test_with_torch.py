"""Tests of the modules `torch_*.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch_modules

# Weights of many architectures of transformers.
WHOLE = ("torch_decoders",)
FUNCTIONS = [
    pytest.param(module.stem, name, marks=[pytest.mark.whole] if module.stem in WHOLE else [])
    for module in sorted(Path(__file__).parent.glob("torch_*.py"))
    for name in torch_modules.functions_of(module)
]


@pytest.mark.parametrize(("module", "name"), FUNCTIONS)
def test_with_torch(module: str, name: str, filled_by: Callable[..., Path]) -> None:
    folder = filled_by(Path(torch_modules.__file__), Path(__file__).with_name(f"{module}.py"))
    failure = json.loads((folder / torch_modules.FAILURES).read_text())[name]
    assert not failure, failure
