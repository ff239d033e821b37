"""Origins of a program's nodes: module of the model and line of its code."""

from __future__ import annotations

from pathlib import Path

import msgspec

from farm.base.errors import BundleError

ORIGINS = "origins.json"
"""Name of the file with the origins in a bundle; missing if all are unknown."""


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """Origin of a node."""

    module: str
    """Path of the module in the model, `layers.3.conv`; empty for the model itself and if unknown."""
    source: str
    """Line of code, `models/text.py:42`, relative to the folder that contains the suite or to Python's search path;
    empty if unknown."""


class Origins(msgspec.Struct, frozen=True):
    """Known origins of a program's nodes."""

    calls: dict[int, dict[str, Origin]] = {}
    """Origins of delegated nodes, by the instruction of the delegate's call and the node's name `aten_relu_default`."""
    kernels: dict[int, Origin] = {}
    """Origins of operators on the CPU, by their instruction."""

    def __bool__(self) -> bool:
        return bool(self.kernels) or any(self.calls.values())


UNKNOWN = Origin("", "")
NO_ORIGINS = Origins()


def place_of(origin: Origin) -> str:
    """Return ` (module layers.3, models/text.py:42)`; "" for an unknown origin."""
    known = (f"module {origin.module}" if origin.module else "", origin.source)
    return f" ({', '.join(filter(None, known))})" if any(known) else ""


def read_origins(folder: Path) -> Origins:
    """Return the known origins of the bundle in `folder`. Raises BundleError for an unreadable file."""
    path = folder / ORIGINS
    try:
        return msgspec.json.decode(path.read_bytes(), type=Origins)
    except FileNotFoundError:
        return NO_ORIGINS
    except (OSError, msgspec.DecodeError) as error:
        raise BundleError(f"{path}: {error}: run 'farm setup cache prune --all --yes' and build again") from None


def write_origins(folder: Path, origins: Origins) -> None:
    """Write `origins` into the bundle in `folder`; no file if all are unknown."""
    if origins:
        (folder / ORIGINS).write_bytes(msgspec.json.encode(origins))
