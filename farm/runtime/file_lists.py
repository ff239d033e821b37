"""Which files a device needs for each backend, in both modes: complete and exact, one list a backend.

Source: ExecuTorch 1.5, backends/qualcomm/export_utils.py, what SimpleADB pushes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.errors import IllegalTargetError
from farm.runtime.native.elf import HEXAGON
from farm.runtime.parts import Part, library
from farm.runtime.qnn_sdk import LPAI_SKEL, QnnFiles, get_lpai, get_unsigned

if TYPE_CHECKING:
    from pathlib import Path

    from farm.runtime.native.targets import Mode
    from farm.suites.socs import Soc

BACKEND_LIBRARY = "libqnn_executorch_backend.so"
UPSTREAM_RUNNER = "qnn_executor_runner"
DIRECT_RUNNER = "qnn_executor_direct_runner"
DIRECT_STUB = "libqnn_executorch_stub.so"
DIRECT_SKEL = "libqnn_executorch_skel.so"
CXX_LIBRARIES = ("libc++.so.1", "libc++abi.so.1")
DIRECT_BACKENDS = ("htp", "lpai")

# Inside a build folder of ExecuTorch.
BACKEND_IN_BUILD = f"backends/qualcomm/{BACKEND_LIBRARY}"
SKEL_IN_BUILD = f"backends/qualcomm/qnn_executorch/direct_mode/{DIRECT_SKEL}"
RUNNER_IN_BUILD = f"examples/qualcomm/executor_runner/{UPSTREAM_RUNNER}"
DIRECT_IN_BUILD = "examples/qualcomm/direct_executor_runner"

_BUILD_SCRIPT = "backends/qualcomm/scripts/build.sh of ExecuTorch"
GET_DIRECT = (
    f"set FARM_EXECUTORCH_DIRECT_BUILD to the build-direct folder that {_BUILD_SCRIPT} makes, or "
    "executorch_direct_build in the [qnn] table of farm.toml"
)
GET_TOOLS = "set HEXAGON_TOOLS_ROOT to the Hexagon tools (the folder that has Tools/ in it)"


class Built(msgspec.Struct, frozen=True):
    """One file that an ExecuTorch build makes, or that somebody named: where it is, else how to get it."""

    path: Path | None
    get: str
    absent: str = "missing"
    name: str = ""
    """What it is called on the device; "" for its own name."""


class Places(msgspec.Struct, frozen=True):
    """Where the files of the runtimes for one kind of device are."""

    qnn: QnnFiles
    runner: Built
    backend_library: Built
    build: Path | None = None
    """Build folder of ExecuTorch for the device's processor, for direct mode's runner and stub."""
    get_build: str = ""
    direct_build: Path | None = None
    hexagon_tools: Path | None = None


def device_parts(soc: Soc, backend: str, places: Places, mode: Mode = "traditional") -> tuple[Part, ...]:
    """Return what a device with `soc` needs to run bundles of `backend`. Raises IllegalTargetError.

    The runner comes first.
    """
    if mode == "direct":
        return _direct(soc, backend, places)
    qnn = places.qnn.with_lpai if backend == "lpai" else places.qnn
    runner = _built("farm_runner", places.runner)
    backend_library = _built(BACKEND_LIBRARY, places.backend_library)
    if backend == "xnnpack":
        # The runner has it linked in; it starts only with the QNN backend beside it where it was linked with that.
        return (runner, backend_library) if _asks_for(runner.path, backend_library.name) else (runner,)
    names, skel = _qnn_names(soc, backend, places)
    parts = [library(name, qnn.library(name), qnn.get) for name in names]
    return (runner, backend_library, *parts, *([skel] if skel else []))


def _qnn_names(soc: Soc, backend: str, places: Places) -> tuple[tuple[str, ...], Part | None]:
    """Return QNN's libraries for the device's processor, and the skel for its DSP."""
    if backend == "htp":
        names = ("libQnnHtp.so", f"libQnnHtpV{soc.htp_arch}Stub.so", "libQnnHtpPrepare.so")
        return ("libQnnSystem.so", *names), _hexagon_file(soc, places, f"libQnnHtpV{soc.htp_arch}Skel.so")
    if backend == "gpu":
        return ("libQnnSystem.so", "libQnnGpu.so"), None
    return ("libQnnSystem.so", "libQnnLpai.so", "libQnnLpaiStub.so"), lpai_skel(soc, places.qnn.with_lpai)


def lpai_skel(soc: Soc, qnn: QnnFiles) -> Part:
    """Return the skel of an LPAI, which must be signed."""
    get = get_lpai(soc.lpai_version) if qnn.root else qnn.get
    source = Part(LPAI_SKEL, qnn.lpai(soc.lpai_version, LPAI_SKEL, "unsigned"), HEXAGON, get)
    return _signed(soc, qnn, source)


def sign_command(soc_lpai: int | None, *, direct_arch: int = 0) -> str:
    """Return the command that signs what an LPAI needs."""
    return f"farm sign --lpai v{soc_lpai}" + (f" --direct --htp v{direct_arch}" if direct_arch else "")


def direct_sources(lpai: int, arch: int, places: Places) -> dict[str, Part]:
    """Return the unsigned files that direct mode runs on the DSP of an LPAI, by name.

    Source: ExecuTorch, backends/qualcomm/scripts/sign_library.sh.
    """
    qnn = places.qnn
    files = {
        "libQnnLpai.so": (qnn.lpai(lpai, "libQnnLpai.so", "unsigned"), get_unsigned(lpai) if qnn.root else qnn.get),
        "libQnnSystem.so": (qnn.hexagon(arch, "libQnnSystem.so"), qnn.get),
        **_direct_files(places, arch),
    }
    return {name: Part(name, path, HEXAGON, get, hexagon=arch, exact=False) for name, (path, get) in files.items()}


def _direct(soc: Soc, backend: str, places: Places) -> tuple[Part, ...]:
    if backend not in DIRECT_BACKENDS:
        raise IllegalTargetError(f"direct mode runs on a DSP: legal are {' and '.join(DIRECT_BACKENDS)}, not {backend}")
    folder = places.build / DIRECT_IN_BUILD if places.build else None
    parts = [
        library(name, folder / name if folder else None, places.get_build) for name in (DIRECT_RUNNER, DIRECT_STUB)
    ]
    if backend == "lpai":
        sources = direct_sources(soc.lpai_version or 0, soc.htp_arch, places)
        parts += [_signed(soc, places.qnn, source, direct=True) for source in sources.values()]
        return tuple(parts)
    parts += [
        _hexagon_file(soc, places, f"libQnnHtpV{soc.htp_arch}.so"),
        _hexagon_file(soc, places, "libQnnSystem.so", exact=False),
    ]
    parts += [
        Part(name, path, HEXAGON, get, hexagon=soc.htp_arch, exact=False, soc=soc.name)
        for name, (path, get) in _direct_files(places, soc.htp_arch).items()
    ]
    return tuple(parts)


def _direct_files(places: Places, arch: int) -> dict[str, tuple[Path | None, str]]:
    build, tools = places.direct_build, places.hexagon_tools
    cxx = tools / "Tools" / "target" / "hexagon" / "lib" / f"v{arch}" / "G0" / "pic" if tools else None
    return {
        BACKEND_LIBRARY: (build / BACKEND_IN_BUILD if build else None, GET_DIRECT),
        DIRECT_SKEL: (build / SKEL_IN_BUILD if build else None, GET_DIRECT),
        **{name: (cxx / name if cxx else None, GET_TOOLS) for name in CXX_LIBRARIES},
    }


def _hexagon_file(soc: Soc, places: Places, name: str, *, exact: bool = True) -> Part:
    path = places.qnn.hexagon(soc.htp_arch, name)
    return Part(name, path, HEXAGON, places.qnn.get, hexagon=soc.htp_arch, exact=exact, soc=soc.name)


def _signed(soc: Soc, qnn: QnnFiles, source: Part, *, direct: bool = False) -> Part:
    """Return the signed file that is made from `source`: by signing it, where that is there."""
    signs = sign_command(soc.lpai_version, direct_arch=soc.htp_arch if direct else 0)
    get = signs if source.path is not None and source.path.is_file() else source.get
    path = qnn.lpai(soc.lpai_version, source.name)
    return Part(source.name, path, HEXAGON, get, signs=signs, unsigned=source.path)


def _built(name: str, built: Built) -> Part:
    name = built.name or (built.path.name if built.path else name)
    return library(name, built.path, built.get, built.absent)


def _asks_for(runner: Path | None, name: str) -> bool:
    # As the dynamic linker reads it; what only mentions the name gets a file more, which harms nothing.
    return runner is not None and runner.is_file() and name.encode() + b"\0" in runner.read_bytes()
