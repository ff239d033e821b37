"""`farm setup runtime` and `farm setup sign`: runner, libraries and skels of a device."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from farm.base.backends.registry import BACKENDS, DEFAULT_BACKEND, find_backend
from farm.base.config.settings import Config
from farm.base.errors import ExitCode, IllegalTargetError, UsageError
from farm.base.grouping import grouped
from farm.base.socs import find_soc
from farm.builds.runtime.native import ANDROID, HOST, OE_LINUX, Mode, find_target
from farm.cli.options import FILE, FOLDER, SuggestingGroup, configured, is_json, json_option, soc_option, timeout_option
from farm.cli.output import echo, notice, print_json, show
from farm.report.model.format import size
from farm.report.terminal.layout import columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from farm.builds.runtime.inventory import FileState
    from farm.builds.runtime.signing import Signing


# `farm setup runtime`.


_direct_option = click.option("--direct", is_flag=True, help="Direct mode: QNN and ExecuTorch's delegate on the DSP.")
_backend_option = click.option(
    "--backend", metavar="BACKEND", default=DEFAULT_BACKEND, show_default=True, help=f"{', '.join(BACKENDS)}."
)


@click.group("runtime", cls=SuggestingGroup)
def command() -> None:
    """Show, build and check the files that a device needs besides a compiled program.

    \b
    A runtime is runner, libraries and skel for one target:
      linux-x86_64      Qualcomm's HTP simulator on this machine
      linux-aarch64     the processor of an Arm Linux device: XNNPACK only
      android-arm64     an Android device; needs an NDK and a QNN SDK
      oe-linux-aarch64  an Arm Linux device with QNN, and ExecuTorch's runner
    """


@command.command("build")
@click.option(
    "--target",
    metavar="TARGET",
    default="linux-x86_64",
    show_default=True,
    help="linux-x86_64, linux-aarch64, android-arm64; oe-linux-aarch64, whose QNN libraries are fetched.",
)
@json_option()
def build(target: str) -> None:
    """Build the runner for a target, once, and print its path."""
    from farm.builds.runtime.native import build_native, runner_executorch
    from farm.builds.runtime.qnn_sdk import fetch_linux_files, host_sdk
    from farm.builds.runtime.runtime import android_kit

    config = configured()
    if target == OE_LINUX:
        # This target uses ExecuTorch's runner, so farm builds none and only fetches QNN's libraries.
        config.require_there("sdk_root", "executorch_linux_build")
        libraries = fetch_linux_files(config.cache_dir, config.sdk_root)
        show({"target": target, "libraries": str(libraries)}, [str(libraries)])
        return
    executorch = runner_executorch(config) if target == HOST else None
    native = build_native(config.cache_dir, target, android=android_kit(config), executorch=executorch)
    if target == HOST:
        host_sdk(config.cache_dir, sdk_root=config.sdk_root, native=native)
    answer = {"target": target, "runner": str(native.runner), "log": str(native.folder / "build.log")}
    show(answer, [str(native.runner)])


@command.command("check")
@click.option("--soc", metavar="SOC", required=True, help="The device's SoC.")
@_backend_option
@click.option("--target", metavar="TARGET",
              help="See farm setup runtime --help; otherwise the first that has the backend.")  # fmt: skip
@_direct_option
@json_option()
def check(soc: str, backend: str, target: str | None, *, direct: bool) -> int:
    """Check every file of a runtime: its origin and its problems.

    Exit codes: 0 all are right; 6 a file is missing or not right.
    """
    from farm.builds.runtime.inventory import default_target, inspect

    chosen = find_soc(soc)
    find_backend(backend)
    mode: Mode = "direct" if direct else "traditional"
    place = find_target(target) if target else default_target(backend, mode)
    states = inspect(configured(), chosen, backend, place, mode)
    bad = [state for state in states if state.state != "ok"]
    lines = list(_state_lines(states))
    if place.kind == "linux" and not bad:
        from farm.builds.runtime.parts import required_versions

        needed = required_versions(Path(state.source) for state in states)
        lines += ["", f"the device needs {' and '.join(f'{name} {version}' for name, version in needed.items())}"]
    lines += _repairs((state.repair, state.name) for state in bad)
    answer = {"soc": chosen.name, "backend": backend, "target": place.name, "ok": not bad, "files": states}
    show(answer, lines)
    return ExitCode.MISSING_TOOL if bad else 0


@command.command("stage")
@click.option("--soc", metavar="SOC", required=True, help="The device's SoC.")
@_backend_option
@click.option("--target", metavar="TARGET", default="android-arm64", show_default=True,
              help="android-arm64 or oe-linux-aarch64.")  # fmt: skip
@_direct_option
@click.argument("folder", type=FOLDER)
@json_option()
def stage(soc: str, backend: str, target: str, folder: Path, *, direct: bool) -> None:
    """Copy a device's runtime into FOLDER, every file checked.

    For programs that you run by hand: farm run and farm exec bring the runtime
    to a device by themselves.
    """
    from farm.builds.runtime.runtime import device_command, stage_into, staged_runtime

    chosen, place = find_soc(soc), find_target(target)
    find_backend(backend)
    able = (ANDROID,) if direct else (ANDROID, OE_LINUX)
    if place.name not in able or backend not in place.backends:
        mode_name = "direct mode" if direct else backend
        raise IllegalTargetError(f"there is nothing to stage of {mode_name} for {place.name}: use --target {ANDROID}")
    mode: Mode = "direct" if direct else "traditional"
    runtime = staged_runtime(configured(), chosen, backend, place, mode)
    stage_into(runtime, folder)
    run = device_command(runtime)
    lines = [
        f"{folder}: {len(runtime.files)} files",
        f"on the device{', as root' if runtime.needs_root else ''}, in the folder with the pushed files:",
        # Commands are not wrapped, so that they can be copied.
        f"  {run}",
    ]
    files = sorted(path.name for path in folder.iterdir())
    answer = {"folder": str(folder), "files": files, "needs_root": runtime.needs_root, "command": run}
    show(answer, lines)


@command.command("env")
@soc_option("SoC to check for an HTP; the simulator is the same for every SoC.")
@json_option()
def env(soc: str | None) -> None:
    """Print the environment for tools outside farm.

    Runner and libraries are built first, if needed.

    \b
    eval "$(farm setup runtime env --soc SM8650)"
    python -m executorch.backends.qualcomm.tests.test_qnn_delegate ...
    """
    from farm.base.socs import check_backend
    from farm.builds.runtime.native import runner_executorch
    from farm.builds.runtime.qnn_sdk import outside_environment

    if soc:
        check_backend(find_soc(soc), DEFAULT_BACKEND)
    config = configured()
    variables = outside_environment(config.cache_dir, config.sdk_root, runner_executorch(config))
    if is_json():
        print_json({"env": variables})
        return
    for name, value in variables.items():
        # Values are always quoted, which is easier for a person to read.
        quoted = "'" + value.replace("'", "'\"'\"'") + "'"
        echo(f"export {name}={quoted}", whole=True)


def _state_lines(states: Iterable[FileState]) -> Iterator[str]:
    ordered = sorted(states, key=lambda one: (not one.source, str(Path(one.source).parent), one.name))
    rows = [("file", "size", "made for", "sha256", "state")]
    for state in ordered:
        nbytes = size(state.nbytes) if state.nbytes else "-"
        rows.append((state.name, nbytes, state.made_for or "-", state.sha256[:8] or "-", state.state))
    head, *lines = columns(rows, right=[1], indent="  ")
    yield head
    folder = None
    for line, state in zip(lines, ordered, strict=True):
        where = str(Path(state.source).parent) if state.source else "(not found)"
        if where != folder:
            folder = where
            yield folder
        yield line


def _repairs(needed: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield repairs with the names they are for; `needed` are pairs of repair and name."""
    for repair, names in grouped(needed).items():
        yield ""
        yield from wrapped(f"{', '.join(names)}:", hanging="")
        prose, _, action = repair.rpartition(": ")
        if repair.startswith(("set ", "put ")):
            prose, action = repair, ""
        if prose:
            yield from wrapped(f"  {prose}:" if action else f"  {prose}", hanging="")
        if action:
            # Commands are not wrapped, so that they can be copied.
            yield f"  {action}"


# `farm setup sign`.


def _version(_context: click.Context, parameter: click.Parameter, value: str | None) -> int:
    if value is None:
        return 0
    found = re.fullmatch(r"[vV]?(\d{1,3})", value)
    if found is None:
        raise UsageError(f"--{parameter.name}: {value!r} is no version: expected something like v6 or v81")
    return int(found[1])


@click.command("sign")
@click.option("--lpai", callback=_version, metavar="VERSION", help="Version of the LPAI: v6.  [required]")
@click.option("--htp", metavar="VERSION", callback=_version,
              help="Sign the files of direct mode too, of this Hexagon architecture: v81.")  # fmt: skip
@click.option("--force", is_flag=True, help="Sign files again that are signed already, by any user.")
@click.option("--adopt", is_flag=True, help="Sign nothing: vouch for the present signed files.")
@click.option("--python", type=FILE, help="Interpreter for elfsigner (< 3.12).")
@timeout_option("Time limit of one file.")
@json_option()
def sign_command(lpai: int, htp: int, python: Path | None, timeout_s: float, *, force: bool, adopt: bool) -> None:
    """Sign the skel that an LPAI loads, with the Hexagon SDK's elfsigner.

    \b
    farm setup sign --lpai v6             the skel
    farm setup sign --lpai v6 --htp v81   also the files of direct mode
    farm setup sign --lpai v6 --adopt     vouch for signed files

    elfsigner asks whether you agree to its license terms; this command agrees
    in your name. Its output is shown and not kept. User and time of a signature
    are recorded beside the signed file; a skel without such a record, or with
    an unsigned original that has changed since, is not put on a device.
    """
    if not lpai:
        from farm.builds.runtime.signing import lpai_versions

        raise UsageError(f"name the version of the LPAI: {' or '.join(f'--lpai {one}' for one in lpai_versions())}")
    for name, given in (("--force", force), ("--python", python is not None)):
        if adopt and given:
            raise UsageError(f"--adopt signs nothing: leave {name} out")
    from farm.builds.runtime.signing import adopt_all, plan_signing

    config = configured()

    if adopt:
        done = [(path, "adopted") for path in adopt_all(config, lpai, htp)]
    else:
        done = _sign(config, plan_signing(config, lpai, htp), python, timeout_s, force=force)
    lines: list[str] = []
    for folder, files in itertools.groupby(done, lambda one: one[0].parent):
        lines += [str(folder), *(f"  {path.name:<36}{state}" for path, state in files)]
    show({"files": [{"file": str(path), "state": state} for path, state in done]}, lines)


def _sign(
    config: Config, plan: tuple[Signing, ...], python: Path | None, timeout_s: float, *, force: bool
) -> list[tuple[Path, str]]:
    from farm.builds.runtime.signing import find_elfsigner, find_python, sign

    foreign = [one.signed for one in plan if one.reason == "foreign" or one.adopted]
    if foreign and not force:
        raise UsageError(
            f"{', '.join(map(str, foreign))}: signed, but not by this command: --adopt vouches for it as it is, "
            "--force signs anew and replaces it"
        )
    todo = [one for one in plan if one.reason or force]
    if todo:
        tool, interpreter = find_elfsigner(config.hexagon_sdk_root), find_python(python)
        for one in todo:
            notice(f"signing {one.unsigned}")
            sign(
                config,
                one,
                tool=tool,
                python=interpreter,
                show=lambda line: echo(f"  elfsigner: {line}", err=True),
                timeout_s=timeout_s,
            )
    return [(one.signed, "signed" if one in todo else "is signed already") for one in plan]
