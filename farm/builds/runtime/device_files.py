"""Files that a device needs for each backend, and the configured places of these files on this machine.

Two modes: traditional (the runner is a program of the CPU) and direct (the runner works on the DSP).

Source: ExecuTorch 1.5, backends/qualcomm/export_utils.py, the files that SimpleADB pushes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.errors import IllegalTargetError, MissingToolError
from farm.builds.runtime.native.build import NativeBuild, planned_native
from farm.builds.runtime.native.cross_compilers import AndroidKit
from farm.builds.runtime.native.elf import HEXAGON
from farm.builds.runtime.native.executorch import runner_executorch
from farm.builds.runtime.native.targets import ANDROID, HOST, OE_LINUX, RUNNER, BuildTarget, Mode
from farm.builds.runtime.parts import RuntimePart, library
from farm.builds.runtime.qnn_sdk import QnnFiles, android_files, linux_files, repair_of

if TYPE_CHECKING:
    from farm.base.backends.descriptor import Backend
    from farm.base.config.settings import Config
    from farm.base.socs import Soc

_BACKEND_LIBRARY = "libqnn_executorch_backend.so"
_UPSTREAM_RUNNER = "qnn_executor_runner"
_DIRECT_RUNNER, _DIRECT_STUB = "qnn_executor_direct_runner", "libqnn_executorch_stub.so"
DIRECT_SKEL = "libqnn_executorch_skel.so"
"""Library of direct mode that the DSP loads first."""
_CXX_LIBRARIES = ("libc++.so.1", "libc++abi.so.1")

# Paths inside a build folder of ExecuTorch.
BACKEND_IN_BUILD = f"backends/qualcomm/{_BACKEND_LIBRARY}"
SKEL_IN_BUILD = f"backends/qualcomm/qnn_executorch/direct_mode/{DIRECT_SKEL}"
RUNNER_IN_BUILD = f"examples/qualcomm/executor_runner/{_UPSTREAM_RUNNER}"
_DIRECT_IN_BUILD = "examples/qualcomm/direct_executor_runner"
# Path of the backend in the install prefix of an ExecuTorch build for Android.
_BACKEND_IN_PREFIX = f"lib/executorch/{BACKEND_IN_BUILD}"

_SCRIPT = "backends/qualcomm/scripts/build.sh of ExecuTorch"
_TABLE = "in the [qnn] table of farm.toml"
_GET_BUILD = f"set FARM_EXECUTORCH_BUILD to the build-android folder that {_SCRIPT} makes, or executorch_build {_TABLE}"
_GET_LINUX_BUILD = (
    "set FARM_EXECUTORCH_LINUX_BUILD to the folder of an ExecuTorch build for Arm Linux, or executorch_linux_build "
    f"{_TABLE}"
)
_GET_DIRECT = (
    f"set FARM_EXECUTORCH_DIRECT_BUILD to the build-direct folder that {_SCRIPT} makes, or executorch_direct_build "
    f"{_TABLE}"
)
_GET_TOOLS = "set HEXAGON_TOOLS_ROOT to the Hexagon tools (the folder that has Tools/ in it)"
_BUILD_RUNNER = f"farm setup runtime build --target {ANDROID}"


class Places(msgspec.Struct, frozen=True):
    """Places on this machine of the files for one kind of device; unset places are unknown."""

    qnn: QnnFiles
    runner: RuntimePart
    backend_library: RuntimePart
    build: Path | None = None
    """Build folder of ExecuTorch for Android, for direct mode's runner and stub."""
    direct_build: Path | None = None
    hexagon_tools: Path | None = None


def android_kit(config: Config) -> AndroidKit:
    """Return the places of the parts of an Android build, as far as they are configured."""
    # build.sh installs into its build folder.
    executorch = config.android_executorch or config.executorch_build
    return AndroidKit(config.android_ndk_root, executorch, config.toolchain.executorch)


def planned_runner(config: Config, target: str) -> NativeBuild:
    """Return farm's own runner for `target` and the selected toolchain, built or not. Raises as `planned_native`."""
    executorch = runner_executorch(config) if target == HOST else None
    return planned_native(config.cache_dir, target, android=android_kit(config), executorch=executorch)


def device_places(config: Config, target: BuildTarget) -> Places:
    """Return the places of the files for the devices of `target`."""
    return _linux_places(config) if target.name == OE_LINUX else android_places(config)


def require_named(config: Config, backend: str, target: BuildTarget, mode: Mode) -> None:
    """Raise UsageError for a configured path of the files of `backend` on `target` that does not exist.

    No other file replaces a configured one.
    """
    qnn = () if find_backend(backend).on_cpu else ("sdk_root",)
    if target.name == OE_LINUX:
        config.require_there(*qnn, "executorch_linux_build")
    elif mode == "direct":
        config.require_there(*qnn, "executorch_build", "executorch_direct_build", "hexagon_tools_root")
    else:
        ours = ("android_qnn", "android_runner", "android_backend_library", "android_executorch", "executorch_build")
        config.require_there(*qnn, *ours)


def android_places(config: Config) -> Places:
    """Return the places of the files for Android devices."""
    return Places(
        qnn=android_files(config.android_qnn or config.sdk_root),
        runner=_android_runner(config),
        backend_library=_android_backend_library(config),
        build=config.executorch_build,
        direct_build=config.executorch_direct_build,
        hexagon_tools=config.hexagon_tools_root,
    )


def _linux_places(config: Config) -> Places:
    build = config.executorch_linux_build
    return Places(
        qnn=linux_files(config.sdk_root, config.cache_dir),
        runner=library(_UPSTREAM_RUNNER, build / RUNNER_IN_BUILD if build else None, _GET_LINUX_BUILD),
        backend_library=library(_BACKEND_LIBRARY, build / BACKEND_IN_BUILD if build else None, _GET_LINUX_BUILD),
    )


def _android_runner(config: Config) -> RuntimePart:
    if (named := config.android_runner) is not None:
        return library(named.name, named, f"set android_runner {_TABLE} (docs/guides/runtime.md)")
    try:
        planned = planned_runner(config, ANDROID)
    except MissingToolError as error:
        get, absent = repair_of(error), "missing"
    else:
        get, absent = _BUILD_RUNNER, "not built"
        if planned.built:
            return library(RUNNER, planned.runner, get, absent)
    build = config.executorch_build
    if build is not None and (build / RUNNER_IN_BUILD).is_file():
        return library(_UPSTREAM_RUNNER, build / RUNNER_IN_BUILD, get)
    return library(RUNNER, None, get, absent)


def _android_backend_library(config: Config) -> RuntimePart:
    if (named := config.android_backend_library) is not None:
        return library(named.name, named, f"set android_backend_library {_TABLE} (docs/guides/runtime.md)")
    # The ExecuTorch that the runner is built with: see `android_kit`.
    root = config.android_executorch or config.executorch_build
    candidates = [root / place for place in (BACKEND_IN_BUILD, _BACKEND_IN_PREFIX)] if root else []
    found = next((path for path in candidates if path.is_file()), None)
    return library(_BACKEND_LIBRARY, found or next(iter(candidates), None), _GET_BUILD)


def takes_sessions(runner: Path) -> bool:
    """Return whether a runner is farm's own, the only one with sessions; its messages contain its name."""
    return RUNNER.encode() in runner.read_bytes()


def device_parts(soc: Soc, backend_name: str, places: Places, mode: Mode = "traditional") -> tuple[RuntimePart, ...]:
    """Return the files that a device with `soc` needs for a backend, the runner first. Raises IllegalTargetError."""
    backend = find_backend(backend_name)
    if mode == "direct":
        require_direct(backend)
        return _direct_parts(soc, backend, places)
    if backend.on_cpu:
        # CPU backends are part of the runner; a runner linked with the QNN backend starts only with that library.
        linked = _is_linked_with(places.runner.path, places.backend_library.name)
        return (places.runner, places.backend_library) if linked else (places.runner,)
    # Signed files come only from an SDK: the wheel of onnxruntime-qnn has none.
    qnn = places.qnn.of_sdk if backend.signed else places.qnn
    names = [soc_name(name, soc) for name in backend.libraries]
    parts = (places.runner, places.backend_library, *(library(name, qnn.library(name), qnn.get) for name in names))
    return (*parts, dsp_file(soc, backend, qnn)) if backend.skel else parts


def soc_name(name: str, soc: Soc) -> str:
    """Return the name of a backend's file for `soc`; `name` has fields of the SoC in braces."""
    return name.format_map(msgspec.structs.asdict(soc))


def dsp_file(soc: Soc, backend: Backend, qnn: QnnFiles) -> RuntimePart:
    """Return the skel of a backend, signed if the backend requires it."""
    source = unsigned_skel(soc, backend, qnn)
    return _signed(soc, backend, qnn, source) if backend.signed else source


def unsigned_skel(soc: Soc, backend: Backend, qnn: QnnFiles) -> RuntimePart:
    """Return the skel of a backend as Qualcomm ships it."""
    name = soc_name(backend.skel, soc)
    path, get = _shipped(soc, backend, qnn, name)
    part = RuntimePart(name, path, HEXAGON, get)
    return part if backend.signed else msgspec.structs.replace(part, hexagon=soc.htp_arch, soc=soc.name)


def signed_path(soc: Soc, backend: Backend, qnn: QnnFiles, name: str) -> Path | None:
    """Return the place of a backend's signed file; None without an SDK."""
    return qnn.dsp(soc_name(backend.dsp_folder, soc), name, "signed")


def _shipped(soc: Soc, backend: Backend, qnn: QnnFiles, name: str) -> tuple[Path | None, str]:
    """Return the place of a backend's DSP file in the SDK, and the way to get the file."""
    folder = soc_name(backend.dsp_folder, soc)
    return qnn.dsp(folder, name), qnn.get_dsp(folder) if backend.signed else qnn.get


def require_direct(backend: Backend) -> None:
    """Raise IllegalTargetError for a backend without a direct mode."""
    if not backend.direct_library:
        able = " and ".join(one.name for one in BACKENDS.values() if one.direct_library)
        raise IllegalTargetError(f"direct mode runs on a DSP: legal are {able}, not {backend.name}")


def direct_sources(soc: Soc, backend: Backend, places: Places) -> list[RuntimePart]:
    """Return the unsigned files that direct mode runs on the DSP.

    Source: ExecuTorch, backends/qualcomm/scripts/sign_library.sh.
    """
    qnn, arch, build, tools = places.qnn, soc.htp_arch, places.direct_build, places.hexagon_tools
    cxx = tools / "Tools" / "target" / "hexagon" / "lib" / f"v{arch}" / "G0" / "pic" if tools else None
    name = soc_name(backend.direct_library, soc)
    files = {
        name: _shipped(soc, backend, qnn, name),
        "libQnnSystem.so": (qnn.dsp(f"hexagon-v{arch}", "libQnnSystem.so"), qnn.get),
        _BACKEND_LIBRARY: (build / BACKEND_IN_BUILD if build else None, _GET_DIRECT),
        DIRECT_SKEL: (build / SKEL_IN_BUILD if build else None, _GET_DIRECT),
        **{file: (cxx / file if cxx else None, _GET_TOOLS) for file in _CXX_LIBRARIES},
    }
    exact = "" if backend.signed else name
    return [
        RuntimePart(file, path, HEXAGON, get, hexagon=arch, exact=file == exact, soc=soc.name)
        for file, (path, get) in files.items()
    ]


def _direct_parts(soc: Soc, backend: Backend, places: Places) -> tuple[RuntimePart, ...]:
    folder = places.build / _DIRECT_IN_BUILD if places.build else None
    parts = [library(name, folder / name if folder else None, _GET_BUILD) for name in (_DIRECT_RUNNER, _DIRECT_STUB)]
    sources = direct_sources(soc, backend, places)
    if backend.signed:
        sources = [_signed(soc, backend, places.qnn, source, direct=True) for source in sources]
    return (*parts, *sources)


def _signed(soc: Soc, backend: Backend, qnn: QnnFiles, source: RuntimePart, *, direct: bool = False) -> RuntimePart:
    """Return the signed file of `source`; the way to get it is signing, or first the way to get a missing `source`."""
    signs = f"farm setup sign --lpai v{soc.lpai_version}" + (f" --direct --htp v{soc.htp_arch}" if direct else "")
    get = signs if source.path is not None and source.path.is_file() else source.get
    path = signed_path(soc, backend, qnn, source.name)
    return RuntimePart(source.name, path, HEXAGON, get, signs=signs, unsigned=source.path)


def _is_linked_with(runner: Path | None, name: str) -> bool:
    # The dynamic linker reads the name as a string. A runner that only mentions it gets a superfluous, harmless file.
    return runner is not None and runner.is_file() and name.encode() + b"\0" in runner.read_bytes()
