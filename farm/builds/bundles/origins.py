"""Where the nodes of a program come from: which module of the model, and which line of its code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import BundleError

if TYPE_CHECKING:
    from pathlib import Path

ORIGINS = "origins.json"
"""The file of a bundle that has them; not there where nothing is known of any node."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """What a node was made of."""

    module: str
    """Its path in the model, `layers.3.conv`; empty for the model itself, and where it is not known."""
    source: str
    """`models/text.py:42`, from the folder that the suite lies in, or from where Python found it; empty where it is not
    known."""


class Origins(msgspec.Struct, frozen=True):
    """What is known of the nodes of a program."""

    calls: dict[int, dict[str, Origin]] = {}
    """By the instruction of a delegate's call and the name of the node in it, `aten_relu_default`."""
    kernels: dict[int, Origin] = {}
    """By the instruction of an operator on the CPU."""

    def __bool__(self) -> bool:
        return bool(self.kernels) or any(self.calls.values())


UNKNOWN = Origin("", "")
NO_ORIGINS = Origins()


def read_origins(folder: Path) -> Origins:
    """Return what the bundle in `folder` knows of its nodes. Raises BundleError where that cannot be read."""
    path = folder / ORIGINS
    try:
        return msgspec.json.decode(path.read_bytes(), type=Origins)
    except FileNotFoundError:
        return NO_ORIGINS
    except (OSError, msgspec.DecodeError) as error:
        raise BundleError(f"{path}: {error}: run 'farm setup cache prune --all --yes' and build again") from None


def write_origins(folder: Path, origins: Origins) -> None:
    """Write what is known into the bundle in `folder`; nothing where nothing is."""
    if origins:
        (folder / ORIGINS).write_bytes(msgspec.json.encode(origins))
