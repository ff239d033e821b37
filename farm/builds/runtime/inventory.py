"""Inventory of the runtimes of this machine and the state of their files: nothing is built, fetched or pushed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.errors import IllegalTargetError, MissingToolError
from farm.base.hashes import hash_files
from farm.base.socs import Soc, check_backend, load_socs
from farm.builds.runtime.device_files import device_parts, device_places, planned_runner
from farm.builds.runtime.native.cross_compilers import planned_aarch64_executorch
from farm.builds.runtime.native.executorch import runner_executorch
from farm.builds.runtime.native.targets import ANDROID, HOST, RUNNER, TARGETS, BuildTarget, Mode
from farm.builds.runtime.parts import RuntimePart, find_fault, made_for
from farm.builds.runtime.qnn_sdk import repair_of
from farm.builds.runtime.runtime import EXECUTORCH_LIBRARIES, rehearsal_parts, virtual_runtime
from farm.builds.runtime.simulator import LIBRARY, package_libraries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.base.config.settings import Config

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


class Offer(msgspec.Struct, frozen=True):
    """Runtime that is available here, or could be."""

    name: str
    kind: str
    target: str
    backends: tuple[str, ...]
    state: str
    """`ready`, `not built`, or the missing parts."""
    repairs: tuple[str, ...]
    """Steps of the user, in order."""


def list_offers(config: Config, soc: Soc | None, backend: str | None, mode: Mode = "traditional") -> list[Offer]:
    """Return every runtime for `soc` and `backend`; None stands for all SoCs or backends."""
    offers = []
    for target in TARGETS.values():
        for name, model, backends in _runtimes(target, soc, mode):
            if backend is None or backend in backends:
                states = list(_examine(_parts(config, model, backends[0], target, mode)))
                offers.append(_offer(name, target, backends, states))
    return offers


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
    return list(_examine(_parts(config, soc, backend, target, mode), config.cache_dir))


def default_target(backend: str, mode: Mode = "traditional") -> BuildTarget:
    """Return the nearest target with a runtime of `backend`: this machine if possible."""
    if mode == "direct":
        return TARGETS[ANDROID]
    return next((target for target in TARGETS.values() if backend in target.backends), TARGETS[HOST])


def _runtimes(target: BuildTarget, soc: Soc | None, mode: Mode) -> Iterator[tuple[str, Soc, tuple[str, ...]]]:
    """Yield the name, an SoC and the backends of every runtime of a target."""
    socs = [soc] if soc else list(load_socs().values())
    if mode == "direct":
        if target.name == ANDROID:
            direct = tuple(name for name in target.backends if BACKENDS[name].direct_library)
            yield from _by_hardware("android", "-direct", direct, socs)
    elif target.kind in ("android", "oe-linux"):
        yield from _by_hardware(target.kind, "", target.backends, socs)
    else:
        name = "simulator" if target.name == HOST else target.name
        yield name, socs[0], target.backends
        yield from _by_hardware(name, "", target.rehearses, socs)


def _by_hardware(
    name: str, suffix: str, backends: tuple[str, ...], socs: list[Soc]
) -> Iterator[tuple[str, Soc, tuple[str, ...]]]:
    seen = set()
    for backend in backends:
        for model in sorted(socs, key=lambda one: one.htp_arch):
            version = f"-v{getattr(model, field)}" if (field := BACKENDS[backend].hardware) else ""
            if backend in model.backends and backend + version not in seen:
                seen.add(backend + version)
                yield f"{name}-{backend}{version}{suffix}", model, (backend,)


def _offer(name: str, target: BuildTarget, backends: tuple[str, ...], states: list[FileState]) -> Offer:
    bad = [state for state in states if state.state != "ok"]
    if not bad:
        state = "ready"
    elif all(one.state == "not built" for one in bad):
        state = "not built"
    elif len(bad) == 1:
        state = f"{bad[0].state} {bad[0].name}"
    else:
        state = f"lacks {len(bad)} files"
    return Offer(name, target.kind, target.name, backends, state, tuple(dict.fromkeys(one.repair for one in bad)))


def _examine(parts: list[RuntimePart], cache_dir: Path | None = None) -> Iterator[FileState]:
    """Yield the state of every part; with hashes if there is a `cache_dir` to remember them in."""
    there = [part.path for part in parts if part.path is not None and part.present]
    hashes = hash_files(cache_dir, there) if cache_dir else {}
    for part in parts:
        fault = find_fault(part)
        path = part.path if part.present else None
        yield FileState(
            part.name,
            str(part.path.resolve()) if part.path is not None else "",
            path.stat().st_size if path else 0,
            made_for(path) if path else "",
            hashes.get(path, "") if path else "",
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
    try:
        folder = planned_aarch64_executorch(config.cache_dir) / "lib"
    except MissingToolError as error:
        return [runner, *(RuntimePart(name, None, target.machine, repair_of(error)) for name in names)]
    libraries = (RuntimePart(name, folder / name, target.machine, runner.get, absent="not built") for name in names)
    return [runner, *libraries]


def _runner_part(config: Config, target: BuildTarget) -> RuntimePart:
    try:
        build = planned_runner(config, target.name)
    except MissingToolError as error:
        return RuntimePart(RUNNER, None, target.machine, repair_of(error))
    command = "farm setup runtime build" + ("" if target.name == HOST else f" --target {target.name}")
    return RuntimePart(RUNNER, build.runner, target.machine, command, absent="not built")
