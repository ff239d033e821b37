"""device_profiles/*.toml -> Soc: properties of a system on chip, and its legal backends."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from farm.base.backends.descriptor import QUANTIZED_PRECISIONS, Backend
from farm.base.backends.registry import BACKENDS, cpu_backends, find_backend
from farm.base.errors import ConfigError, IllegalTargetError, UnknownNameError
from farm.base.paths import data_folder
from farm.base.toml_tables import read_table

READY = "ready"
"""Precision of a `.pte` file that was compiled elsewhere and records none."""

_OF_BACKENDS = (precision for backend in BACKENDS.values() for precision in backend.precisions)
PRECISIONS = (*dict.fromkeys((*QUANTIZED_PRECISIONS, "fp16", "fp32", *_OF_BACKENDS)), READY)


SOC_NAME = re.compile(r"[A-Z0-9][A-Z0-9_]{1,31}")
"""Names of SoCs as devices report them."""

# A bin of a chip, as some builds report it: SM8650-AC. Longer names with a dash are of devices.
_BIN = re.compile(r"(.+)-[A-Z]{2}", re.IGNORECASE)

_like: Mapping[str, str] = MappingProxyType({})
"""`[soc.NAME] like` of the farm.toml that was loaded last: name to profile."""


class Soc(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """System on chip. Source: ExecuTorch 1.5, qc_schema `_soc_info_table`, which a test compares."""

    name: str
    soc_id: int
    """`QcomChipset` value that the compiler and the runtime know it by."""
    htp_arch: int
    """Hexagon tensor processor architecture: 75 is V75."""
    vtcm_mb: int
    """Vector tightly coupled memory of the HTP, in MiB."""
    backends: tuple[str, ...]
    """Backends of its profile, then CPU backends, which no profile names."""
    lpai_version: int | None = None
    """Low-power AI hardware version; None where ExecuTorch knows none."""
    product: str = ""
    """Public product name, if there is one."""
    also: tuple[str, ...] = ()
    """Other names that a table of ExecuTorch or QNN gives the same chip; farm.toml adds names by `[soc.NAME] like`."""


def check_backend(soc: Soc, name: str) -> Backend:
    """Return the backend `name` of `soc`. Raises UnknownNameError, or IllegalTargetError with its legal backends."""
    backend = find_backend(name)
    if name not in soc.backends:
        raise IllegalTargetError(f"{soc.name} has no {name} backend: legal are {', '.join(soc.backends)}")
    return backend


def check_target(soc: Soc, backend: str, precision: str) -> None:
    """Raise IllegalTargetError with the legal choices unless `soc` has `backend` and it runs `precision`."""
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
        for other in soc.also:
            if not SOC_NAME.fullmatch(other):
                raise ConfigError(path, "also", f"{other!r} is no name of an SoC: expected capitals, digits and '_'")
        socs[soc.name] = msgspec.structs.replace(soc, backends=(*soc.backends, *cpu_backends()))
    _require_distinct(socs, folder)
    return socs


def _require_distinct(socs: Mapping[str, Soc], folder: Path) -> None:
    """Raise ConfigError for a name that two profiles have."""
    owner = {name: name for name in socs}
    for soc in socs.values():
        for other in soc.also:
            if other in owner:
                raise ConfigError(folder / f"{soc.name}.toml", "also", f"{other} is a name of {owner[other]} as well")
            owner[other] = soc.name


def set_like(like: Mapping[str, str]) -> None:
    """Replace the names of `[soc]` in farm.toml: name to profile."""
    global _like  # noqa: PLW0603 - devices and requests are read in many places of one process
    _like = MappingProxyType(dict(like))


def profile_name(name: str) -> str:
    """Return the profile of the SoC called `name`, in any case; empty without one."""
    wanted, socs = name.upper(), load_socs()
    if wanted in socs:
        return wanted
    return next((soc.name for soc in socs.values() if wanted in soc.also), "") or _like.get(wanted, "")


def reported_profile(name: str) -> str:
    """Return the profile of a name as a device reports it; empty without one.

    `[soc.SM8650_AC]` of farm.toml has both spellings of a bin; without it `SM8650-AC` is the chip, SM8650.
    """
    whole = profile_name(name) or profile_name(name.replace("-", "_"))
    found = None if whole else _BIN.fullmatch(name)
    return profile_name(found[1]) if found else whole


def is_soc(name: str) -> bool:
    """Return whether an SoC is called `name`, in any case."""
    return bool(profile_name(name))


def find_soc(name: str) -> Soc:
    """Return the SoC called `name`, in any case. Raises UnknownNameError with the nearest name and farm.toml's line."""
    socs = load_socs()
    if profile := reported_profile(name):
        return socs[profile]
    hint = like_hint(name)
    raise UnknownNameError("SoC", name, socs, f"(farm devices socs lists them{f'; {hint}' if hint else ''})")


def like_hint(name: str) -> str:
    """Return what to write in farm.toml for a device that reports `name`; empty for a name like no profile's."""
    near = difflib.get_close_matches(name.upper(), load_socs(), n=1, cutoff=0.6)
    if not near or not SOC_NAME.fullmatch(name.upper()):
        return ""
    return f"""if the part is a {near[0]}, write in farm.toml: [soc.{name.upper()}] and below it like = "{near[0]}\""""


def no_profile(name: str) -> str:
    """Return why a device that reports `name` is not used, and the next step."""
    if not name:
        return "the device reports no SoC"
    step = (
        like_hint(name)
        or f"'farm devices socs' lists those it has; write in farm.toml: [soc.{name}] and like = \"PROFILE\""
    )
    return f"farm has no profile for {name}: {step}"
