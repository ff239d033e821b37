"""Abilities of this machine by SoC and backend: compiling, staging, running, repairs of missing parts, and tools.

Nothing is built, fetched or loaded, and only runners and signed files are read to the end: the examination checks that
the files exist and are made for the right machine.
"""

from __future__ import annotations

import functools
import shutil
from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import find_backend, runs_on_cpu
from farm.base.errors import FarmError, MissingToolError
from farm.builds.runtime.device_files import (
    BACKEND_IN_BUILD,
    SKEL_IN_BUILD,
    Places,
    device_parts,
    device_places,
    planned_runner,
    takes_sessions,
)
from farm.builds.runtime.native.cross_compilers import planned_aarch64_executorch
from farm.builds.runtime.native.executorch import runner_executorch
from farm.builds.runtime.native.targets import ANDROID, HOST, LINUX_AARCH64, TARGETS, BuildTarget, Kind, Mode
from farm.builds.runtime.packages import install_hint, package_folder, package_version
from farm.builds.runtime.parts import RuntimePart, find_fault
from farm.builds.runtime.qnn_sdk import newest_linux_folder, repair_of, sdk_version
from farm.builds.runtime.runtime import EXECUTORCH_LIBRARIES, rehearsal_parts, require_backend
from farm.builds.runtime.signing.elfsigner import ELFSIGNER
from farm.builds.runtime.simulator import package_libraries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.base.socs import Soc

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
        self._places: dict[str, Places] = {}
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
        try:
            require_backend(soc, backend, self._config.sdk_root)
        except MissingToolError as error:
            gaps.append(MissingItem(f"compiler for {backend}", repair_of(error)))
        return Availability((), tuple(dict.fromkeys(gaps))) if gaps else Availability(("here",))

    @functools.cached_property
    def _host_gaps(self) -> tuple[MissingItem, ...]:
        """Lacks of building the runner and the bridge. What `farm run` builds by itself is no gap."""
        gaps = []
        for what, ask in (
            ("the native runner", lambda: planned_runner(self._config, HOST)),
            ("QNN for this machine", lambda: package_libraries(self._config.sdk_root)),
            ("the Python package cmake", lambda: _package("cmake")),
            ("the Python package ninja", lambda: _package("ninja")),
        ):
            try:
                ask()
            except MissingToolError as error:
                gaps.append(MissingItem(what, repair_of(error)))
        return tuple(gaps)

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
                if target.name not in self._places:
                    self._places[target.name] = device_places(self._config, target)
                gaps = _gaps_of(device_parts(soc, backend, self._places[target.name], mode), target.kind)
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
        runner = self._places[ANDROID].runner.path
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
    names: dict[str, list[str]] = {}
    for part in parts:
        if (fault := find_fault(part)) is not None:
            shown = part.name if fault.brief == "missing" else f"{part.name} ({fault.brief})"
            names.setdefault(fault.repair, []).append(shown)
    return tuple(MissingItem(", ".join(shown), repair, where) for repair, shown in names.items())


def _package(name: str) -> None:
    if not package_version(name):
        raise MissingToolError(f"{name} is not installed: {install_hint('simulator')}")


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
