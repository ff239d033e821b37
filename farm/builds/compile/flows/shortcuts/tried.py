"""Replacement of a function by a shortcut, and the toolchain that shortcuts were tried with. Imports torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

TRIED = {"executorch": ("1.5.1",), "torch": ("2.13.0",), "torchao": ("0.18.0",)}
"""Releases by package. A development version, such as 2.13.0a0+git1234567, is none of them."""
# Builds for CPU and GPU have the same Python code; another suffix is a commit.
_BUILD = re.compile(r"\+(cpu|cu\d+)$")


@cache
def installed() -> dict[str, str]:
    """Return the versions of the packages of `TRIED` in this process; "" for a missing package, or for a checkout."""
    return {**{name: _version(name) for name in TRIED}, "torch": str(torch.__version__)}


def _version(name: str) -> str:
    # A checkout may precede an installed package, whose version is not the checkout's.
    spec = importlib.util.find_spec(name)
    folders = {os.path.realpath(folder) for folder in (spec and spec.submodule_search_locations) or ()}
    try:
        installed_one = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    return installed_one.version if folders == {os.path.realpath(str(installed_one.locate_file(name)))} else ""


def is_tried() -> bool:
    """Return whether shortcuts were tried with the packages of this process."""
    return all(_BUILD.sub("", version) in TRIED[name] for name, version in installed().items())


@contextmanager
def replaced(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], *, tried_only: bool = False
) -> Iterator[None]:
    """Replace the function `name` of `owner` by `make(function)` while the body runs.

    The function stays if `owner` lacks `name`, and with `tried_only` if another toolchain is installed.
    """
    function = getattr(owner, name, None)
    if not callable(function) or (tried_only and not is_tried()):
        yield
        return
    with patch.object(owner, name, make(function)):
        yield
