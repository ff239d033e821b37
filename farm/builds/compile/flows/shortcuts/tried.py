"""Toolchain that shortcuts were tried with. Imports torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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


def is_tried(versions: Mapping[str, str] | None = None) -> bool:
    """Return whether shortcuts were tried with `versions`, or with the packages of this process."""
    versions = installed() if versions is None else versions
    return all(_BUILD.sub("", versions.get(name, "")) in releases for name, releases in TRIED.items())


def has_parameters(function: Callable[..., Any], *names: str) -> bool:
    """Return whether `function` takes the parameters `names`, in this order and no others."""
    return tuple(inspect.signature(function).parameters) == names
