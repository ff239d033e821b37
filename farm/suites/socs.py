"""device_profiles/*.toml -> Soc: what a system on chip has, and which backends are legal on it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.backends.descriptor import QUANTIZED_PRECISIONS
from farm.backends.registry import BACKENDS, cpu_backends, find_backend
from farm.errors import ConfigError, IllegalTargetError, UnknownNameError
from farm.system.resources import data_folder
from farm.system.toml_tables import read_table

if TYPE_CHECKING:
    from farm.backends.descriptor import Backend

READY = "ready"
"""What a `.pte` file runs at that was compiled elsewhere, and did not say."""

_OF_BACKENDS = (precision for backend in BACKENDS.values() for precision in backend.precisions)
PRECISIONS = (*dict.fromkeys((*QUANTIZED_PRECISIONS, "fp16", "fp32", *_OF_BACKENDS)), READY)


class Soc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One system on chip. Source: ExecuTorch 1.5, qc_schema `_soc_info_table`, which a test compares."""

    name: str
    soc_id: int
    """`QcomChipset` value that the compiler and the runtime know it by."""
    htp_arch: int
    """Hexagon tensor processor architecture: 75 is V75."""
    vtcm_mb: int
    """Vector tightly coupled memory of the HTP, in MiB."""
    backends: tuple[str, ...]
    """Those of its profile, then those that run on the CPU, which no profile names."""
    lpai_version: int | None = None
    """Low-power AI hardware version; None where ExecuTorch knows none."""
    product: str = ""
    """What it is sold as, where that is public."""


def check_backend(soc: Soc, name: str) -> Backend:
    """Return a backend that `soc` has. Raises UnknownNameError, IllegalTargetError that says which it has."""
    backend = find_backend(name)
    if name not in soc.backends:
        raise IllegalTargetError(f"{soc.name} has no {name} backend: legal are {', '.join(soc.backends)}")
    return backend


def check_target(soc: Soc, backend: str, precision: str) -> None:
    """Raise IllegalTargetError, saying what is legal, unless `soc` has `backend` and it runs `precision`."""
    precisions = check_backend(soc, backend).precisions
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    if precision not in (*precisions, READY):
        others = [other for other in soc.backends if precision in BACKENDS[other].precisions]
        hint = f"; {precision} is for {', '.join(others)}" if others else ""
        raise IllegalTargetError(
            f"the {backend} backend does not run {precision}: legal are {', '.join(precisions)}{hint}"
        )


@functools.cache
def load_socs(folder: Path | None = None) -> dict[str, Soc]:
    """Return every profile by name, sorted. Raises ConfigError for a file that is not a profile."""
    folder = folder or data_folder("device_profiles")
    socs: dict[str, Soc] = {}
    for path in sorted(folder.glob("*.toml")):
        soc = read_table(path, Soc)
        if soc.name != path.stem:
            raise ConfigError(path, "name", f"is {soc.name!r}, expected {path.stem!r} as the file is called")
        for backend in soc.backends:
            if backend in cpu_backends():
                raise ConfigError(path, "backends", f"every SoC has {backend}: leave it out")
            if backend not in BACKENDS:
                raise ConfigError(path, "backends", f"{backend!r} is none of {', '.join(BACKENDS)}")
        socs[soc.name] = msgspec.structs.replace(soc, backends=(*soc.backends, *cpu_backends()))
    return socs


def is_soc(name: str) -> bool:
    """Return whether an SoC is called `name`, in any case."""
    return name.casefold() in {soc.casefold() for soc in load_socs()}


def find_soc(name: str) -> Soc:
    """Return the SoC called `name`, in any case. Raises UnknownNameError with the nearest name."""
    socs = load_socs()
    for soc in socs.values():
        if soc.name.casefold() == name.casefold():
            return soc
    raise UnknownNameError("SoC", name, socs, "(farm socs lists them)")
