"""Which runtimes can be had here, and what each file of one is: nothing is built, fetched or pushed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.errors import IllegalTargetError, MissingToolError
from farm.profiles import BACKEND_PRECISIONS, Soc, check_target, load_socs
from farm.runtime.hashes import hash_files
from farm.runtime.native import planned_native
from farm.runtime.packages import package_folder
from farm.runtime.parts import Part, android_parts, find_fault, made_for
from farm.runtime.runtime import EXECUTORCH_LIBRARIES, simulator_runtime
from farm.runtime.simulator import LIBRARY, package_libraries
from farm.runtime.targets import HOST, RUNNER, TARGETS, BuildTarget
from farm.runtime.toolchains import AndroidKit, planned_aarch64_executorch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.config import Config

_QNN_BACKEND = "libexecutorch_backend_qnn.so"
# Where an ExecuTorch build for Android installs it.
_PREFIX_LIBRARY = "lib/executorch/backends/qualcomm/libqnn_executorch_backend.so"


class FileState(msgspec.Struct, frozen=True):
    """One file of a runtime."""

    name: str
    """Path on the device, relative to the runtime folder."""
    source: str
    """Where it comes from, links followed; "" when it is nowhere."""
    nbytes: int
    made_for: str
    """Processor, or the Hexagon architecture of a skel."""
    sha256: str
    state: str
    """`ok`, or what is wrong in a word or two."""
    problem: str = ""
    repair: str = ""
    """The one thing to do about it."""


class Offer(msgspec.Struct, frozen=True):
    """A runtime that can be had here, or could be."""

    name: str
    kind: str
    target: str
    backends: tuple[str, ...]
    state: str
    """`ready`, `not built`, or what is missing."""
    repairs: tuple[str, ...]
    """What to do, in order."""


def android_kit(config: Config) -> AndroidKit:
    """Return where the parts of an Android build are, as far as the configuration says."""
    return AndroidKit(config.android_ndk_root, config.android_executorch)


def list_offers(config: Config, soc: Soc | None, backend: str | None) -> list[Offer]:
    """Return every runtime there is for `soc` and `backend`; None stands for all of them."""
    offers = []
    for target in TARGETS.values():
        for name, model, backends in _runtimes(target, soc):
            if backend is None or backend in backends:
                states = list(_examine(_parts(config, model, backends[0], target)))
                offers.append(_offer(name, target, backends, states))
    return offers


def inspect(config: Config, soc: Soc, backend: str, target: BuildTarget) -> list[FileState]:
    """Return every file that a device with `soc` needs for `backend`. Raises IllegalTargetError."""
    check_target(soc, backend, BACKEND_PRECISIONS.get(backend, ("",))[0])
    if backend not in target.backends:
        why = {
            "simulator": f"there is no {backend} simulator",
            "linux": "the aarch64 executorch wheel has no QNN backend",
        }
        able = " or ".join(other.name for other in TARGETS.values() if backend in other.backends)
        raise IllegalTargetError(
            f"the {backend} backend has no runtime on {target.name}: {why.get(target.kind, 'none is known')}; "
            f"use --target {able}"
        )
    return list(_examine(_parts(config, soc, backend, target), config.cache_dir))


def default_target(backend: str) -> BuildTarget:
    """Return the target that is nearest: this machine where `backend` has a runtime on it."""
    return next((target for target in TARGETS.values() if backend in target.backends), TARGETS[HOST])


def _runtimes(target: BuildTarget, soc: Soc | None) -> Iterator[tuple[str, Soc, tuple[str, ...]]]:
    """Yield name, an SoC that it is for, and backends of every runtime of a target."""
    socs = [soc] if soc else list(load_socs().values())
    if target.kind != "android":
        yield ("simulator" if target.name == HOST else target.name), socs[0], target.backends
        return
    seen = set()
    for backend in target.backends:
        for model in sorted(socs, key=lambda one: one.htp_arch):
            version = {"htp": f"-v{model.htp_arch}", "lpai": f"-v{model.lpai_version}"}.get(backend, "")
            if backend in model.backends and backend + version not in seen:
                seen.add(backend + version)
                yield f"android-{backend}{version}", model, (backend,)


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


def _examine(parts: list[Part], cache_dir: Path | None = None) -> Iterator[FileState]:
    """Yield the state of every part, with hashes where `cache_dir` says where they are remembered."""
    there = [part.path for part in parts if part.path is not None and part.path.is_file()]
    hashes = hash_files(cache_dir, there) if cache_dir else {}
    for part in parts:
        fault = find_fault(part)
        path = part.path if part.path is not None and part.path.is_file() else None
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


def _parts(config: Config, soc: Soc, backend: str, target: BuildTarget) -> list[Part]:
    if target.kind == "simulator":
        return _simulator_parts(config, target)
    if target.kind == "linux":
        return _linux_parts(config, target)
    return _android_parts(config, soc, backend, target)


def _simulator_parts(config: Config, target: BuildTarget) -> list[Part]:
    runner = _runner_part(config, target)
    if runner.path is not None and runner.path.is_file():
        try:
            files = simulator_runtime(config.cache_dir, sdk_root=config.sdk_root).files
            return [Part(name, path, target.machine, runner.get) for name, path in files.items()]
        except MissingToolError:
            # Then one by one, to say which.
            pass
    parts = [runner, _qnn_part(config, target)]
    try:
        libraries = package_folder("executorch", "lib/libexecutorch.so", "build") / "lib"
    except MissingToolError as error:
        repair = _repair(error)
        return [*parts, *(Part(name, None, target.machine, repair) for name in EXECUTORCH_LIBRARIES)]
    return parts + [Part(name, libraries / name, target.machine, "") for name in EXECUTORCH_LIBRARIES]


def _qnn_part(config: Config, target: BuildTarget) -> Part:
    try:
        package_libraries(config.sdk_root)
    except MissingToolError as error:
        return Part(LIBRARY, None, target.machine, _repair(error))
    return Part(LIBRARY, None, target.machine, "farm runtime build", absent="not built")


def _linux_parts(config: Config, target: BuildTarget) -> list[Part]:
    runner = _runner_part(config, target)
    names = [name for name in EXECUTORCH_LIBRARIES if name != _QNN_BACKEND]
    try:
        folder = planned_aarch64_executorch(config.cache_dir) / "lib"
    except MissingToolError as error:
        return [runner, *(Part(name, None, target.machine, _repair(error)) for name in names)]
    return [runner, *(Part(name, folder / name, target.machine, runner.get, absent="not built") for name in names)]


def _android_parts(config: Config, soc: Soc, backend: str, target: BuildTarget) -> list[Part]:
    parts = list(android_parts(soc, backend, config.sdk_root, config.android_runner, config.android_backend_library))
    if config.android_runner is None:
        built = _runner_part(config, target)
        there = built.path is not None and built.path.is_file()
        get, absent = (_tell("android_runner", built.path), "not set") if there else (built.get, built.absent)
        parts[0] = Part(RUNNER, None, target.machine, get, absent=absent)
    prefix = config.android_executorch
    if config.android_backend_library is None and len(parts) > 1 and prefix and (prefix / _PREFIX_LIBRARY).is_file():
        get = _tell("android_backend_library", prefix / _PREFIX_LIBRARY)
        parts[1] = Part(parts[1].name, None, target.machine, get, absent="not set")
    return parts


def _tell(key: str, path: Path | None) -> str:
    return f'put {key} = "{path}" into the [qnn] table of farm.toml'


def _runner_part(config: Config, target: BuildTarget) -> Part:
    try:
        build = planned_native(config.cache_dir, target.name, android=android_kit(config))
    except MissingToolError as error:
        return Part(RUNNER, None, target.machine, _repair(error))
    return Part(RUNNER, build.runner, target.machine, _build_command(target), absent="not built")


def _build_command(target: BuildTarget) -> str:
    return "farm runtime build" + ("" if target.name == HOST else f" --target {target.name}")


def _repair(error: MissingToolError) -> str:
    # Messages of this kind end in what to do.
    return str(error).rpartition(": ")[2]
