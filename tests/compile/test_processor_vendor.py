"""Vendor of the processor for versions of ExecuTorch that were not tried."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from farm.builds.compile.flows.shortcuts import processor_vendor


@pytest.mark.parametrize(
    ("function", "is_replaced"), [(lambda: "GenuineIntel", True), (lambda details: f"vendor of {details}", False)]
)
def test_a_function_with_parameters_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., str], is_replaced: bool
) -> None:
    module = ModuleType(processor_vendor._MODULE)
    setattr(module, processor_vendor._READ, function)
    monkeypatch.setitem(sys.modules, processor_vendor._MODULE, module)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    with processor_vendor.vendor_from_kernel():
        assert (getattr(module, processor_vendor._READ) is not function) == is_replaced
    assert getattr(module, processor_vendor._READ) is function
