"""Runtime of a device: every file that it needs besides the bundle, the places of the files on this machine, and
checks.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import msgspec

from farm.base.backends.descriptor import Backend
from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, find_backend
from farm.base.config.settings import Config
from farm.base.errors import IllegalTargetError, MissingToolError, UsageError
from farm.base.hashes import digest_of, hash_files
from farm.base.socs import Soc, check_backend, find_soc
from farm.builds.runtime.native import (
    ANDROID,
    GET_LINUX_BUILD,
    HOST,
    LINUX_AARCH64,
    OE_LINUX,
    RUNNER,
    TARGETS,
    AndroidKit,
    BuildTarget,
    Kind,
    Mode,
    NativeBuild,
    NativeExecutorch,
    aarch64_executorch,
    build_native,
    default_executorch,
    planned_native,
    runner_executorch,
    way_to_set,
)
from farm.builds.runtime.packages import package_version
from farm.builds.runtime.parts import HEXAGON, X86_64, RuntimePart, find_fault, library, require_sound
from farm.builds.runtime.qnn_sdk import (
    GET_SDK,
    LIBRARY,
    TARGET,
    QnnFiles,
    android_files,
    host_sdk,
    linux_files,
    release_of,
    repair_of,
    sdk_version,
)

# Files that a device needs for each backend, and the configured places of these files on this machine.
#
# Two modes: traditional (the runner is a program of the CPU) and direct (the runner works on the DSP).
#
# Source: ExecuTorch 1.5, backends/qualcomm/export_utils.py, the files that SimpleADB pushes.


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
_GET_BUILD = way_to_set("FARM_EXECUTORCH_BUILD", f"the build-android folder that {_SCRIPT} makes")
_GET_DIRECT = way_to_set("FARM_EXECUTORCH_DIRECT_BUILD", f"the build-direct folder that {_SCRIPT} makes")
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
        runner=library(_UPSTREAM_RUNNER, build / RUNNER_IN_BUILD if build else None, GET_LINUX_BUILD),
        backend_library=library(_BACKEND_LIBRARY, build / BACKEND_IN_BUILD if build else None, GET_LINUX_BUILD),
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
    get = f"{GET_SDK} with lib/{folder}/unsigned" if backend.signed and qnn.root else qnn.get
    return qnn.dsp(folder, name), get


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
    signs = f"farm setup sign --lpai v{soc.lpai_version}" + (f" --htp v{soc.htp_arch}" if direct else "")
    get = signs if source.path is not None and source.path.is_file() else source.get
    path = signed_path(soc, backend, qnn, source.name)
    return RuntimePart(source.name, path, HEXAGON, get, signs=signs, unsigned=source.path)


def _is_linked_with(runner: Path | None, name: str) -> bool:
    # The dynamic linker reads the name as a string. A runner that only mentions it gets a superfluous, harmless file.
    return runner is not None and runner.is_file() and name.encode() + b"\0" in runner.read_bytes()


# Backend + SoC -> Runtime: every file that a device needs besides the bundle, checked before it is pushed.


# FastRPC's mask for important messages and errors, as in ExecuTorch's own scripts.
_DSP_LOGS = "0x0C"
# Libraries that CMake links into the runner: native_runner/src/CMakeLists.txt.
EXECUTORCH_LIBRARIES = (
    "libexecutorch.so",
    "libexecutorch_threadpool.so",
    "libexecutorch_kernels_optimized.so",
    "libexecutorch_kernels_quantized.so",
    "libexecutorch_etdump.so",
    "libexecutorch_backend_qnn.so",
    "libexecutorch_backend_xnnpack.so",
)
# The wheel brings the C++ runtime that its libraries were linked with, an SDK may leave it to the system.
_CXX_RUNTIME = ("libc++*.so*", "libunwind*.so*")
DIRECT_STUB_RUNNER = "qnn_executor_direct_runner_stub"
"""Stub of direct mode's runner on a virtual device: a script in front of farm's own runner."""
LLAMA_RUNNER = "qnn_llama_runner"
"""ExecuTorch's own program that generates text."""
# Libraries that the simulator needs besides the backend; libHtpPrepare.so and the others are for compiling.
_SIMULATOR_LIBRARIES = ("libQnnSystem.so", *_CXX_RUNTIME)


class Runtime(msgspec.Struct, frozen=True):
    """Runner and libraries for a device, where all lie in one folder that the runner searches."""

    files: dict[str, Path]
    """Local file by path on the device, relative to the runtime folder; a symbolic link stands for its target."""
    digest: str
    """Hash over the names and contents of `files`, and over the mask of the DSP's log."""
    runner: str
    """Name in `files` of the program to execute."""
    versions: dict[str, str]
    """Facts that numbers depend on: `runner` is the key of farm's build or a hash, `skel` and `runtime` (files that
    farm did not build) are hashes; `qnn` and `executorch` are versions, if known; `dsp_logs` is a mask."""
    kind: Kind
    needs_root: bool = False
    """True for a runner that must run as root (LPAI: signed process domain)."""
    hashes: dict[str, str] = {}
    """SHA-256 of the files, by the names of `files`."""
    one_shot: bool = False
    """True for ExecuTorch's own runner, which runs one job and ends."""
    flags: dict[str, str] = {}
    """Flags that the runner gets with every job."""

    @property
    def dsp_logs(self) -> str:
        """FastRPC's mask of the DSP's log; empty for a runtime without code on the DSP."""
        return self.versions.get("dsp_logs", "")


def virtual_runtime(
    config: Config,
    soc: Soc | None = None,
    backend: str = DEFAULT_BACKEND,
    *,
    mode: Mode = "traditional",
    native: NativeBuild | None = None,
) -> Runtime:
    """Return the runtime of a virtual device for bundles of the toolchain that `config` has selected.

    Direct mode is rehearsed: a stub takes its runner's place. All else is as in `simulator_runtime`.
    """
    executorch = runner_executorch(config)
    found = simulator_runtime(
        config.cache_dir, soc, backend, sdk_root=config.sdk_root, executorch=executorch, native=native
    )
    if mode != "direct":
        return found
    require_direct(find_backend(backend))
    files = {**found.files, DIRECT_STUB_RUNNER: Path(__file__).with_name(f"{DIRECT_STUB_RUNNER}.sh")}
    made = _runtime(config.cache_dir, files, DIRECT_STUB_RUNNER, found.versions, found.kind, found.needs_root)
    # The runner that computes is behind the stub.
    stub = {"runner": found.versions["runner"], "direct_stub": made.versions["runner"]}
    return _one_shot(made, _direct_flags(backend), stub)


def _one_shot(runtime: Runtime, flags: dict[str, str], versions: Mapping[str, str] = MappingProxyType({})) -> Runtime:
    """Return `runtime` with a runner that runs one job; `versions` replace known ones."""
    # Most of it was built elsewhere: a number depends on all of it.
    known = {**runtime.versions, **versions, "runtime": runtime.digest}
    return msgspec.structs.replace(runtime, one_shot=True, flags=flags, versions=known)


def _direct_flags(backend: str) -> dict[str, str]:
    """Return the flags that direct mode's runner gets with every job."""
    return {"domain_id": str(find_backend(backend).direct_domain)}


def with_runner(
    cache_dir: Path, runtime: Runtime, runner: str, files: dict[str, Path], flags: dict[str, str]
) -> Runtime:
    """Return `runtime` with another runner of `files`, which runs one job; all `files` lie beside the runner."""
    kept = {name: path for name, path in runtime.files.items() if name != runtime.runner}
    versions = {name: version for name, version in runtime.versions.items() if name != "runtime"}
    return _one_shot(_runtime(cache_dir, kept | files, runner, versions, runtime.kind, runtime.needs_root), flags)


def remade(cache_dir: Path, runtime: Runtime, files: dict[str, Path], versions: dict[str, str]) -> Runtime:
    """Return `runtime` with other `files`, among them its runner, and the known `versions` of these."""
    made = _runtime(cache_dir, files, runtime.runner, versions, runtime.kind, runtime.needs_root)
    known = {**made.versions, "runner": versions["runner"]}
    return msgspec.structs.replace(made, one_shot=runtime.one_shot, flags=runtime.flags, versions=known)


def simulator_runtime(
    cache_dir: Path,
    soc: Soc | None = None,
    backend: str = DEFAULT_BACKEND,
    *,
    sdk_root: Path | None = None,
    executorch: NativeExecutorch | None = None,
    native: NativeBuild | None = None,
) -> Runtime:
    """Return the runtime of a virtual device for bundles of `backend`; `sdk_root` as for `host_sdk`.

    Simulated backends get the simulator, CPU backends no file of QNN. A rehearsed backend, which needs `soc`, gets an
    SDK's library for this machine, and the skel of a device, which is staged but not loaded. `native` has the runner;
    without it the first call builds the runner with `executorch` or farm's own ExecuTorch. Raises IllegalTargetError,
    MissingToolError, InfraError, ConfigError for a skel that is not signed as required.
    """
    known = find_backend(backend)
    if known.on_host == "absent":
        raise MissingToolError(f"there is no {backend.upper()} simulator: attach a device")
    executorch = executorch or default_executorch()
    native = native or build_native(cache_dir, executorch=executorch)
    files = {
        RUNNER: native.runner,
        **(_executorch_files(executorch.libraries) if executorch.shared else {}),
    }
    versions = {"executorch": executorch.version}
    if known.simulated:
        sdk = host_sdk(cache_dir, sdk_root=sdk_root, native=native)
        files[LIBRARY] = sdk.lib_dir / LIBRARY
        for pattern in _SIMULATOR_LIBRARIES:
            files |= {path.name: path for path in sorted(sdk.lib_dir.glob(pattern))}
        if sdk.bridged:
            files[f"real/{LIBRARY}"] = sdk.lib_dir / "real" / LIBRARY
        versions["qnn"] = sdk.qnn_version
    elif not known.on_cpu:
        if soc is None:
            raise IllegalTargetError(f"the runtime of an {backend.upper()} depends on the SoC: name it")
        files |= _complete(soc, backend, rehearsal_parts(soc, backend, sdk_root))
        versions["qnn"] = sdk_version(sdk_root)
    return _runtime(cache_dir, files, RUNNER, versions, "simulator", needs_root=known.needs_root)


def rehearsal_parts(soc: Soc, backend: str, sdk_root: Path | None) -> tuple[RuntimePart, ...]:
    """Return the files of an SDK for rehearsing `backend` of `soc` on a virtual device. Raises IllegalTargetError."""
    known = check_backend(soc, backend)
    wanted = known.host_library.name if known.host_library else ""
    get = f"{GET_SDK}, {_release_text(known.first_qnn)} or newer, with {TARGET} libraries"
    folder = sdk_root / "lib" / TARGET if sdk_root else None
    names = dict.fromkeys((wanted, "libQnnSystem.so"))
    if folder is not None:
        patterns = (wanted.replace(".so", "*.so"), *_SIMULATOR_LIBRARIES)
        names |= dict.fromkeys(path.name for pattern in patterns for path in sorted(folder.glob(pattern)))
    libraries = [RuntimePart(name, folder / name if folder else None, X86_64, get) for name in names]
    return (*libraries, dsp_file(soc, known, QnnFiles(get, sdk_root)))


def runtime_for(config: Config, soc: str, kind: str, os: str, backend: str, mode: Mode) -> Runtime:
    """Return the runtime of a device of `kind` with a SoC and `os`, both by name. Raises as `attached_runtime`."""
    if kind == "virtual":
        return virtual_runtime(config, find_soc(soc), backend, mode=mode)
    return attached_runtime(config, find_soc(soc), backend, mode, linux=os == "linux")


def attached_runtime(
    config: Config, soc: Soc, backend: str, mode: Mode = "traditional", *, linux: bool = False
) -> Runtime:
    """Return the runtime of an attached device with `soc` for bundles of `backend`.

    The device runs Android, or `linux`: there farm's runner has the CPU's backend only, and QNN needs ExecuTorch's
    runner, as in direct mode. Raises IllegalTargetError, MissingToolError that names every missing file and the way to
    get it, ConfigError for a file that is made for another machine or not signed as required.
    """
    if linux and mode == "direct":
        raise IllegalTargetError(f"direct mode is for Android devices, and no runtime of it for {OE_LINUX} is known")
    if linux and find_backend(backend).on_cpu:
        return linux_runtime(config.cache_dir)
    runtime = staged_runtime(config, soc, backend, TARGETS[OE_LINUX if linux else ANDROID], mode)
    if runtime.one_shot and not linux and mode != "direct":
        raise MissingToolError(
            f"{runtime.files[runtime.runner]} is not farm's runner and takes no jobs in a session: "
            f"farm setup runtime build --target {ANDROID} (docs/guides/runtime.md), or set android_runner in "
            "the [qnn] table of farm.toml"
        )
    return runtime


def staged_runtime(config: Config, soc: Soc, backend: str, target: BuildTarget, mode: Mode = "traditional") -> Runtime:
    """Return the files that a device needs, with any kind of runner. Raises as `attached_runtime`."""
    require_named(config, backend, target, mode)
    places = device_places(config, target)
    known = check_backend(soc, backend)
    version = places.qnn.version
    release = release_of(version)
    if known.first_qnn and release is not None and release < known.first_qnn:
        least = _release_text(known.first_qnn)
        raise MissingToolError(
            f"the {backend} backend of {soc.name} needs QNN {least} or newer, not {version}: {GET_SDK}"
        )
    parts = device_parts(soc, backend, places, mode)
    files = _complete(soc, backend, parts)
    versions = {} if known.on_cpu else {"qnn": version}
    runtime = _runtime(config.cache_dir, files, parts[0].name, versions, target.kind, needs_root=known.needs_root)
    if not takes_sessions(files[runtime.runner]):
        return _one_shot(runtime, _direct_flags(backend) if mode == "direct" else {})
    if known.on_cpu:
        return runtime
    # The runner has a fact of its own. ExecuTorch's backend was built elsewhere, and QNN is named by its version.
    others = digest_of(sorted(one for one in runtime.hashes.items() if one[0] != runtime.runner))
    return msgspec.structs.replace(runtime, versions={**runtime.versions, "runtime": others})


def linux_runtime(cache_dir: Path) -> Runtime:
    """Return the runtime of an aarch64 Linux device for bundles of CPU backends (XNNPACK, portable kernels).

    The first call fetches the aarch64 executorch wheel and builds the runner. Raises MissingToolError,
    InfraError.
    """
    native = build_native(cache_dir, LINUX_AARCH64)
    files = {RUNNER: native.runner, **_executorch_files(aarch64_executorch(cache_dir) / "lib")}
    return _runtime(cache_dir, files, RUNNER, {"executorch": package_version("executorch")}, "linux")


def stage_into(runtime: Runtime, folder: Path) -> None:
    """Copy the files of a runtime into `folder`, which must be missing or empty. Raises UsageError, OSError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty: name a folder that is not there yet")
    for name, path in runtime.files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o755)


def device_command(runtime: Runtime) -> str:
    """Return the shell command that starts the runner on the device, in the folder of the pushed files."""
    flags = "".join(f" --{name} {value}" for name, value in runtime.flags.items())
    runner = f"LD_LIBRARY_PATH=. ADSP_LIBRARY_PATH=. ./{runtime.runner}{flags}"
    return f"{runner} --model_path model.pte --input_list_path input_list.txt"


def require_backend(soc: Soc, backend: str, sdk_root: Path | None) -> None:
    """Raise MissingToolError, in one line with the setting to change, if `backend` cannot be compiled for `soc` here.

    Backends whose libraries all come with pip can always be compiled. Raises IllegalTargetError for a backend that
    `soc` does not have.
    """
    known = check_backend(soc, backend)
    if (wanted := known.host_library) is None:
        return
    why = wanted.why.format(get_sdk=GET_SDK, target=TARGET)
    needs = f"the {backend} backend of {soc.name} needs"
    if sdk_root is None:
        raise MissingToolError(f"{needs} a QNN SDK with {wanted.name}, as {why}")
    get = why.rpartition(": ")[2]
    if not sdk_root.is_dir():
        raise MissingToolError(f"{needs} a QNN SDK, and the QNN SDK folder {sdk_root} does not exist: {get}")
    if release := release_of(sdk_version(sdk_root)):
        problem = wanted.too_new if wanted.before and release >= wanted.before else ""
        if known.first_qnn and release < known.first_qnn:
            problem = f"older than {_release_text(known.first_qnn)}, which {backend} needs"
        if problem:
            raise MissingToolError(f"{needs} another QNN SDK, as QNN {_release_text(release)} is {problem}: {get}")
    library = sdk_root / "lib" / TARGET / wanted.name
    if not library.is_file():
        raise MissingToolError(f"{needs} a QNN SDK with {wanted.name} (looked for {library}), as {why}")


def _release_text(release: tuple[int, int] | None) -> str:
    return ".".join(map(str, release or ()))


def _executorch_files(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in map(folder.joinpath, EXECUTORCH_LIBRARIES) if path.is_file()}


def _runtime(
    cache_dir: Path,
    files: dict[str, Path],
    runner: str,
    versions: dict[str, str],
    kind: Kind,
    needs_root: bool = False,
) -> Runtime:
    hashes = hash_files(cache_dir, files.values())
    named = {name: hashes[path] for name, path in files.items()}
    known = {name: version for name, version in versions.items() if version}
    # A build of farm is known by its sources and toolchain: its bytes may differ from build to build.
    built = files[runner].parent
    known["runner"] = built.name[:16] if built.parent == cache_dir / "native" else hashes[files[runner]]
    for name in files:
        if name.endswith(("Skel.so", DIRECT_SKEL)):
            known["skel"] = hashes[files[name]]
    if "skel" in known:
        known["dsp_logs"] = _DSP_LOGS
    content = [*sorted(named.items()), *(one for one in known.items() if one[0] == "dsp_logs")]
    return Runtime(files, digest_of(content), runner, known, kind, needs_root, named)


def _complete(soc: Soc, backend: str, parts: Sequence[RuntimePart]) -> dict[str, Path]:
    """Return the files by name. Raises MissingToolError with the names of all missing files, ConfigError."""
    missing = [fault for part in parts if not part.present and (fault := find_fault(part))]
    if missing:
        names = ", ".join(fault.problem.replace(" is missing", "") for fault in missing)
        count = "a file that is missing" if len(missing) == 1 else f"{len(missing)} files that are missing"
        how = "; ".join(dict.fromkeys(fault.repair for fault in missing))
        raise MissingToolError(f"{soc.name} {backend} needs {count}: {names}: {how}")
    require_sound(parts)
    return {part.name: part.path for part in parts if part.path is not None}
