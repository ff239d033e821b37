"""Inventory of this machine: abilities by SoC and backend, tools, and the state of the files of runtimes."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from farm.base.backends.registry import find_backend, runs_on_cpu
from farm.base.config.settings import Config
from farm.base.errors import FarmError, IllegalTargetError, MissingToolError
from farm.base.grouping import grouped
from farm.base.hashes import hash_files
from farm.base.socs import Soc, check_backend
from farm.builds.runtime.native import (
    ANDROID,
    HOST,
    LINUX_AARCH64,
    RUNNER,
    TARGETS,
    BuildTarget,
    Kind,
    Mode,
    planned_aarch64_executorch,
    runner_executorch,
)
from farm.builds.runtime.packages import install_hint, package_folder, package_version
from farm.builds.runtime.parts import RuntimePart, find_fault, made_for
from farm.builds.runtime.qnn_sdk import LIBRARY, newest_linux_folder, package_libraries, repair_of, sdk_version
from farm.builds.runtime.runtime import (
    BACKEND_IN_BUILD,
    EXECUTORCH_LIBRARIES,
    SKEL_IN_BUILD,
    device_parts,
    device_places,
    planned_runner,
    rehearsal_parts,
    require_backend,
    takes_sessions,
    virtual_runtime,
)
from farm.builds.runtime.signing import ELFSIGNER

# Abilities of this machine by SoC and backend: compiling, staging, running, repairs of missing parts, and tools.
#
# Nothing is built, fetched or loaded, and only runners and signed files are read to the end: the examination checks
# that the files exist and are made for the right machine.


_COMPILER_PACKAGES = ("executorch", "torch", "torchao")
_TOOL_PACKAGES = (*_COMPILER_PACKAGES, "onnxruntime-qnn", "cmake", "ninja", "adbutils")
_TOOL_PROGRAMS = ("c++", "aarch64-linux-gnu-g++", "qemu-aarch64")
_TOOLS_LIBRARIES = "Tools/target/hexagon/lib"
_BUILD_ANDROID = f"farm setup runtime build --target {ANDROID}"


class MissingItem(msgspec.Struct, frozen=True):
    """Missing part, and the way to get it."""

    what: str
    """Short name of the part, `QNN SDK`, or the missing files."""
    repair: str
    """Next step of the user."""
    where: str = ""
    """Kind of device that lacks the part; "" for this machine."""


class Availability(msgspec.Struct, frozen=True):
    """Cell of the table: kinds of devices with the ability, and missing parts for the others."""

    where: tuple[str, ...]
    """`here` for compiling; kinds of target for staging; `simulator` and serials for running. Empty for nowhere."""
    gaps: tuple[MissingItem, ...] = ()


class Ability(msgspec.Struct, frozen=True):
    """Abilities of this machine for a backend of an SoC."""

    soc: str
    backend: str
    compile: Availability
    stage: Availability
    run: Availability


class Tool(msgspec.Struct, frozen=True):
    """Tool, or set of files that was made elsewhere."""

    name: str
    version: str
    """Version, or a state if it is unknown: `set`, `built`."""
    path: str
    problem: str = ""
    """Problem of the tool, "" for none. A tool that is not configured has no problem: its `version` is ""."""


class Doctor:
    """Examination of a configuration; `attached` are serials by SoC, None without a query of an adb server.

    `compiler` has the versions of the packages that compile; by default the versions in farm's own environment.
    """

    def __init__(
        self,
        config: Config,
        attached: Mapping[str, Iterable[str]] | None = None,
        compiler: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config
        self._compiler = compiler_versions() if compiler is None else compiler
        self._attached = {soc: tuple(serials) for soc, serials in (attached or {}).items()}
        self._asked = attached is not None
        self._places = functools.cache(functools.partial(device_places, config))
        self._staged: dict[tuple[object, ...], tuple[MissingItem, ...]] = {}

    def examine(self, soc: Soc, backend: str) -> Ability:
        """Return the abilities for `backend` of `soc`. Raises IllegalTargetError for a backend that `soc` lacks."""
        compiled = self._compile(soc, backend)
        gaps = {
            target.kind: self._stage(soc, backend, target)
            for target in TARGETS.values()
            if backend in (*target.backends, *target.rehearses)
        }
        staged = Availability(
            tuple(kind for kind, found in gaps.items() if not found),
            tuple(dict.fromkeys(gap for found in gaps.values() for gap in found)),
        )
        return Ability(soc.name, backend, compiled, staged, self._run(soc, compiled, gaps))

    def direct(self, soc: Soc, backend: str) -> tuple[MissingItem, ...]:
        """Return what direct mode lacks for `backend` of `soc`."""
        return self._stage(soc, backend, TARGETS[ANDROID], "direct")

    def _compile(self, soc: Soc, backend: str) -> Availability:
        gaps = [
            MissingItem(f"the Python package {name}", install_hint("build"))
            for name in _COMPILER_PACKAGES
            if not self._compiler.get(name)
        ]
        gaps += self._host_gaps
        gaps += _lack(f"compiler for {backend}", lambda: require_backend(soc, backend, self._config.sdk_root))
        return Availability((), tuple(dict.fromkeys(gaps))) if gaps else Availability(("here",))

    @functools.cached_property
    def _host_gaps(self) -> tuple[MissingItem, ...]:
        """Lacks of building the runner and the bridge. What `farm run` builds by itself is no gap."""
        return (
            *_lack("the native runner", lambda: planned_runner(self._config, HOST)),
            *_lack("QNN for this machine", lambda: package_libraries(self._config.sdk_root)),
            *(
                MissingItem(f"the Python package {name}", install_hint("simulator"))
                for name in ("cmake", "ninja")
                if not package_version(name)
            ),
        )

    def _stage(
        self, soc: Soc, backend: str, target: BuildTarget, mode: Mode = "traditional"
    ) -> tuple[MissingItem, ...]:
        key = (target.name, mode, backend, soc.htp_arch, soc.lpai_version)
        if key not in self._staged:
            if target.kind == "simulator":
                gaps = self._simulator(soc, backend)
            elif target.name == LINUX_AARCH64:
                gaps = self._linux()
            else:
                gaps = _gaps_of(device_parts(soc, backend, self._places(target), mode), target.kind)
            self._staged[key] = gaps
        return self._staged[key]

    def _simulator(self, soc: Soc, backend: str) -> tuple[MissingItem, ...]:
        gaps = list(self._host_gaps)
        try:
            executorch = runner_executorch(self._config)
            names = EXECUTORCH_LIBRARIES if executorch.shared else ()
            lacking = [name for name in names if not (executorch.libraries / name).is_file()]
            gaps += [MissingItem(name, install_hint("build")) for name in lacking]
        except MissingToolError as error:
            gaps.append(MissingItem("ExecuTorch's libraries", repair_of(error)))
        if find_backend(backend).on_host == "rehearsed":
            gaps += _gaps_of(rehearsal_parts(soc, backend, self._config.sdk_root))
        return tuple(dict.fromkeys(gaps))

    def _linux(self) -> tuple[MissingItem, ...]:
        repair = f"farm setup runtime build --target {LINUX_AARCH64}"
        try:
            built = planned_runner(self._config, LINUX_AARCH64).built
            fetched = planned_aarch64_executorch(self._config.cache_dir).is_dir()
        except MissingToolError as error:
            return (MissingItem("what builds farm_runner", repair_of(error), "linux"),)
        return () if built and fetched else (MissingItem("farm_runner", repair, "linux"),)

    def _run(self, soc: Soc, compiled: Availability, gaps: Mapping[Kind, tuple[MissingItem, ...]]) -> Availability:
        android = gaps.get("android")
        if not compiled.where:
            return Availability((), tuple(dict.fromkeys((*compiled.gaps, *(android or ())))))
        where = ["simulator"] if gaps.get("simulator") == () else []
        sessions = self._session_gap if android == () else None
        if android == () and sessions is None:
            where += self._attached.get(soc.name, ())
        if where:
            return Availability(tuple(where))
        if sessions is not None:
            return Availability((), (sessions,))
        return Availability((), (*(android or ()), *(() if soc.name in self._attached else (self._no_device(),))))

    @functools.cached_property
    def _session_gap(self) -> MissingItem | None:
        """Lack of a runner for Android that is not farm's; None for farm's runner."""
        runner = self._places(TARGETS[ANDROID]).runner.path
        if runner is not None and runner.is_file() and takes_sessions(runner):
            return None
        name = runner.name if runner else "the runner"
        return MissingItem(f"{name}: takes no jobs in a session", _BUILD_ANDROID)

    def _no_device(self) -> MissingItem:
        if not self._asked:
            return MissingItem("a device: no adb server", "adb start-server")
        return MissingItem("a device with that SoC", "attach one; 'adb devices' lists attached devices")


def runnable(ability: Ability) -> bool:
    """Return whether `farm run` can execute with this ability."""
    return bool(ability.compile.where and ability.stage.where and ability.run.where)


def backends_of(soc: Soc) -> tuple[str, ...]:
    """Return the backends of an SoC; the CPU's, which every SoC has, come last."""
    return tuple(sorted(soc.backends, key=runs_on_cpu))


def _gaps_of(parts: Iterable[RuntimePart], where: str = "") -> tuple[MissingItem, ...]:
    """Return the problems of the parts, one missing item for each repair."""
    faults = [(part.name, fault) for part in parts if (fault := find_fault(part))]
    names = grouped((one.repair, name if one.brief == "missing" else f"{name} ({one.brief})") for name, one in faults)
    return tuple(MissingItem(", ".join(shown), repair, where) for repair, shown in names.items())


def _lack(what: str, ask: Callable[[], object]) -> tuple[MissingItem, ...]:
    """Return the item that `ask` reports as missing; none if it raises no MissingToolError."""
    try:
        ask()
    except MissingToolError as error:
        return (MissingItem(what, repair_of(error)),)
    return ()


def compiler_versions() -> dict[str, str]:
    """Return the versions of the packages that compile, as farm's own environment has them; empty for none."""
    return {name: package_version(name) for name in _COMPILER_PACKAGES}


def list_tools(config: Config, compiler: Mapping[str, str] | None = None) -> list[Tool]:
    """Return the tools of this machine, missing ones with an empty version; `compiler` as in Doctor."""
    versions = {name: package_version(name) for name in _TOOL_PACKAGES} | dict(compiler or {})
    tools = [Tool(name, versions[name], "") for name in _TOOL_PACKAGES]
    tools += [Tool(name, "in PATH" if (path := shutil.which(name)) else "", path or "") for name in _TOOL_PROGRAMS]
    tools += [_runner(config, name) for name in TARGETS]
    tools += [_adb(), _qnn_sdk(config.sdk_root), _ndk(config.android_ndk_root)]
    folders = (
        ("ExecuTorch for Android", config.executorch_build, (BACKEND_IN_BUILD,)),
        ("ExecuTorch for Arm Linux", config.executorch_linux_build, (BACKEND_IN_BUILD,)),
        ("ExecuTorch for direct mode", config.executorch_direct_build, (BACKEND_IN_BUILD, SKEL_IN_BUILD)),
        ("Hexagon SDK", config.hexagon_sdk_root, (str(ELFSIGNER),)),
        ("Hexagon tools", config.hexagon_tools_root, (_TOOLS_LIBRARIES,)),
    )
    tools += [_folder(*folder) for folder in folders]
    return tools


def _runner(config: Config, target: str) -> Tool:
    name = f"farm_runner for {target}"
    try:
        build = planned_runner(config, target)
    except FarmError:
        return Tool(name, "", "")
    if build.built:
        return Tool(name, "built", str(build.runner))
    return Tool(name, "not built" if target == HOST else "", "")


def _adb() -> Tool:
    if path := shutil.which("adb"):
        return Tool("adb", "in PATH", path)
    try:
        return Tool("adb", "of adbutils", str(package_folder("adbutils", "binaries/adb", "build") / "binaries" / "adb"))
    except FarmError:
        return Tool("adb", "", "")


def _qnn_sdk(root: Path | None) -> Tool:
    if root is None:
        return Tool("QNN SDK", "", "")
    problem = "" if (root / "lib").is_dir() else "has no lib folder" if root.is_dir() else "does not exist"
    linux = newest_linux_folder(root)
    folders = [name for name in ("x86_64-linux-clang", "aarch64-android") if (root / "lib" / name).is_dir()]
    folders += [linux.name] if linux else []
    version = sdk_version(root)
    return Tool("QNN SDK", f"{version} ({', '.join(folders)})" if folders else version, str(root), problem)


def _ndk(root: Path | None) -> Tool:
    tool = _folder("Android NDK", root, ("build/cmake/android.toolchain.cmake",))
    try:
        lines = (root / "source.properties").read_text(errors="replace").splitlines() if root else []
    except OSError:
        return tool
    revisions = [line.partition("=")[2].strip() for line in lines if line.startswith("Pkg.Revision")]
    return msgspec.structs.replace(tool, version=revisions[0]) if revisions else tool


def _folder(name: str, root: Path | None, needed: tuple[str, ...]) -> Tool:
    if root is None:
        return Tool(name, "", "")
    lacking = next((path for path in needed if not (root / path).exists()), None)
    # Qualcomm's SDKs are unpacked into folders named by their version.
    return Tool(name, root.name, str(root), f"has no {lacking}" if lacking else "")


# State of the files of runtimes: nothing is built, fetched or pushed.


_QNN_BACKEND = "libexecutorch_backend_qnn.so"


class FileState(msgspec.Struct, frozen=True):
    """State of a file of a runtime."""

    name: str
    """Path on the device, relative to the runtime folder."""
    source: str
    """Path of the file here, links followed; "" for a missing file."""
    nbytes: int
    made_for: str
    """Processor, or the Hexagon architecture of a skel."""
    sha256: str
    state: str
    """State: `ok`, or the problem in one or two words."""
    problem: str = ""
    repair: str = ""
    """Next step of the user."""


def inspect(config: Config, soc: Soc, backend: str, target: BuildTarget, mode: Mode = "traditional") -> list[FileState]:
    """Return every file that a device with `soc` needs for `backend`. Raises IllegalTargetError."""
    check_backend(soc, backend)
    if mode == "direct" and target.name != ANDROID:
        raise IllegalTargetError(f"direct mode has no runtime on {target.name}: use --target {ANDROID}")
    if backend not in (*target.backends, *target.rehearses):
        why = {
            "simulator": f"there is no {backend} simulator",
            "linux": "the aarch64 executorch wheel has no QNN backend",
            "oe-linux": f"{backend} needs nothing of QNN",
        }
        able = " or ".join(other.name for other in TARGETS.values() if backend in other.backends)
        raise IllegalTargetError(
            f"the {backend} backend has no runtime on {target.name}: {why.get(target.kind, 'none is known')}; "
            f"use --target {able}"
        )
    return list(_examine(config.cache_dir, _parts(config, soc, backend, target, mode)))


def default_target(backend: str, mode: Mode = "traditional") -> BuildTarget:
    """Return the nearest target with a runtime of `backend`: this machine if possible."""
    if mode == "direct":
        return TARGETS[ANDROID]
    return next((target for target in TARGETS.values() if backend in target.backends), TARGETS[HOST])


def _examine(cache_dir: Path, parts: list[RuntimePart]) -> Iterator[FileState]:
    """Yield the state of every part."""
    there = [part.path for part in parts if part.path is not None and part.present]
    hashes = hash_files(cache_dir, there)
    for part in parts:
        fault = find_fault(part)
        path = part.path if part.present else None
        yield FileState(
            part.name,
            str(part.path.resolve()) if part.path is not None else "",
            path.stat().st_size if path else 0,
            made_for(path) if path else "",
            hashes[path] if path else "",
            fault.brief if fault else "ok",
            fault.problem if fault else "",
            fault.repair if fault else "",
        )


def _parts(config: Config, soc: Soc, backend: str, target: BuildTarget, mode: Mode) -> list[RuntimePart]:
    if target.kind == "simulator":
        return _simulator_parts(config, soc, backend, target)
    if target.kind == "linux":
        return _linux_parts(config, target)
    return list(device_parts(soc, backend, device_places(config, target), mode))


def _simulator_parts(config: Config, soc: Soc, backend: str, target: BuildTarget) -> list[RuntimePart]:
    runner = _runner_part(config, target)
    known = find_backend(backend)
    if not known.simulated:
        more = () if known.on_cpu else rehearsal_parts(soc, backend, config.sdk_root)
        return [runner, *_executorch_parts(config, target), *more]
    if runner.path is not None and runner.path.is_file():
        try:
            files = virtual_runtime(config).files
            return [RuntimePart(name, path, target.machine, runner.get) for name, path in files.items()]
        except MissingToolError:
            # The single parts below name the missing file.
            pass
    return [runner, _qnn_part(config, target), *_executorch_parts(config, target)]


def _executorch_parts(config: Config, target: BuildTarget) -> list[RuntimePart]:
    try:
        executorch = runner_executorch(config)
    except MissingToolError as error:
        return [RuntimePart(name, None, target.machine, repair_of(error)) for name in EXECUTORCH_LIBRARIES]
    names = EXECUTORCH_LIBRARIES if executorch.shared else ()
    return [RuntimePart(name, executorch.libraries / name, target.machine, "") for name in names]


def _qnn_part(config: Config, target: BuildTarget) -> RuntimePart:
    try:
        package_libraries(config.sdk_root)
    except MissingToolError as error:
        return RuntimePart(LIBRARY, None, target.machine, repair_of(error))
    return RuntimePart(LIBRARY, None, target.machine, "farm setup runtime build", absent="not built")


def _linux_parts(config: Config, target: BuildTarget) -> list[RuntimePart]:
    runner = _runner_part(config, target)
    names = [name for name in EXECUTORCH_LIBRARIES if name != _QNN_BACKEND]
    return [runner, *_planned(target, names, lambda: planned_aarch64_executorch(config.cache_dir) / "lib", runner.get)]


def _runner_part(config: Config, target: BuildTarget) -> RuntimePart:
    command = "farm setup runtime build" + ("" if target.name == HOST else f" --target {target.name}")
    [runner] = _planned(target, [RUNNER], lambda: planned_runner(config, target.name).folder, command)
    return runner


def _planned(target: BuildTarget, names: list[str], plan: Callable[[], Path], command: str) -> list[RuntimePart]:
    """Return files in the folder that `command` makes; with the repair if `plan` of it raises MissingToolError."""
    try:
        folder = plan()
    except MissingToolError as error:
        return [RuntimePart(name, None, target.machine, repair_of(error)) for name in names]
    return [RuntimePart(name, folder / name, target.machine, command, absent="not built") for name in names]
