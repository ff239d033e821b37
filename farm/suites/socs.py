"""device_profiles/*.toml -> Soc: what a system on chip has, and which backends are legal on it."""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from farm.errors import ConfigError, IllegalTargetError, UnknownNameError
from farm.system.resources import data_folder

# ExecuTorch 1.5, backends/qualcomm/quantizer: QuantDtype, and fp16 for what is not quantized.
QUANTIZED_PRECISIONS = ("8a8w", "8a4w", "16a16w", "16a8w", "16a4w", "16a4w_block", "16a2w", "fp16a8w")
READY = "ready"
"""What a `.pte` file runs at that was compiled elsewhere, and did not say."""

PRECISIONS = (*QUANTIZED_PRECISIONS, "fp16", "fp32", READY)

CPU_BACKENDS = ("xnnpack",)
"""What every SoC has, and every case runs on whatever its manifest says: a baseline by the processor alone."""

# ExecuTorch 1.5: HTP runs all quantized ones, LPAI only quantized graphs, GPU only floating point. XNNPACK could run
# 8a8w too, but its quantizer knows few operators, and what it leaves alone would be floating point under another name.
BACKEND_PRECISIONS: dict[str, tuple[str, ...]] = {
    "htp": (*QUANTIZED_PRECISIONS, "fp16"),
    "lpai": QUANTIZED_PRECISIONS,
    "gpu": ("fp16", "fp32"),
    "xnnpack": ("fp32",),
}


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
    """Those of its profile, then CPU_BACKENDS, which no profile names."""
    lpai_version: int | None = None
    """Low-power AI hardware version; None where ExecuTorch knows none."""
    product: str = ""
    """What it is sold as, where that is public."""


def check_target(soc: Soc, backend: str, precision: str) -> None:
    """Raise IllegalTargetError, saying what is legal, unless `soc` has `backend` and it runs `precision`."""
    if backend not in BACKEND_PRECISIONS:
        raise UnknownNameError("backend", backend, BACKEND_PRECISIONS)
    if backend not in soc.backends:
        raise IllegalTargetError(f"{soc.name} has no {backend} backend: legal are {', '.join(soc.backends)}")
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    if precision not in (*BACKEND_PRECISIONS[backend], READY):
        legal = ", ".join(BACKEND_PRECISIONS[backend])
        others = [other for other in soc.backends if precision in BACKEND_PRECISIONS[other]]
        hint = f"; {precision} is for {', '.join(others)}" if others else ""
        raise IllegalTargetError(f"the {backend} backend does not run {precision}: legal are {legal}{hint}")


@functools.cache
def load_socs(folder: Path | None = None) -> dict[str, Soc]:
    """Return every profile by name, sorted. Raises ConfigError for a file that is not a profile."""
    folder = folder or data_folder("device_profiles")
    socs: dict[str, Soc] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            soc = msgspec.toml.decode(path.read_bytes(), type=Soc)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise ConfigError(path, "", str(error)) from None
        if soc.name != path.stem:
            raise ConfigError(path, "name", f"is {soc.name!r}, expected {path.stem!r} as the file is called")
        for backend in soc.backends:
            if backend in CPU_BACKENDS:
                raise ConfigError(path, "backends", f"every SoC has {backend}: leave it out")
            if backend not in BACKEND_PRECISIONS:
                raise ConfigError(path, "backends", f"{backend!r} is none of {', '.join(BACKEND_PRECISIONS)}")
        socs[soc.name] = msgspec.structs.replace(soc, backends=(*soc.backends, *CPU_BACKENDS))
    return socs


def is_soc(name: str) -> bool:
    """Tell whether an SoC is called `name`, in any case."""
    return name.casefold() in {soc.casefold() for soc in load_socs()}


def find_soc(name: str) -> Soc:
    """Return the SoC called `name`, in any case. Raises UnknownNameError with the nearest name."""
    socs = load_socs()
    for soc in socs.values():
        if soc.name.casefold() == name.casefold():
            return soc
    raise UnknownNameError("SoC", name, socs, "(farm socs lists them)")
