"""Parts of this machine that some tests need."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

# Read before the tests take farm's variables out of the environment.
_REQUIRED = {name for name, value in os.environ.items() if name.startswith("FARM_REQUIRE_") and value == "1"}


def do_without(why: str, variable: str = "FARM_REQUIRE_PARTS") -> NoReturn:
    """Skip the test, or fail it where `variable` requires the part."""
    if variable in _REQUIRED:
        pytest.fail(f"{variable}=1, and {why}")
    pytest.skip(why)
