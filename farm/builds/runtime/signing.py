"""Signing of skels by the elfsigner of a Hexagon SDK, and the adoption of signed files."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from farm.base.backends.registry import BACKENDS
from farm.base.config.settings import Config
from farm.base.errors import ConfigError, InfraError, MissingToolError, UsageError
from farm.base.files import own_folder
from farm.base.hashes import sha256_of
from farm.base.machine import user_name
from farm.base.processes import Child, Supervisor
from farm.base.socs import Soc, load_socs
from farm.base.text import visible
from farm.builds.runtime.native import way_to_set
from farm.builds.runtime.parts import (
    HEXAGON,
    MACHINES,
    ElfHeader,
    RuntimePart,
    SignRecord,
    find_fault,
    find_signing_fault,
    read_elf,
    replace_file,
    require_sound,
    write_record,
)
from farm.builds.runtime.qnn_sdk import GET_SDK
from farm.builds.runtime.runtime import android_places, direct_sources, signed_path, unsigned_skel

# Use of the Hexagon SDK's elfsigner without a prompt: it signs one file, and only the signed file is kept.
#
# The tool asks for agreement to its license terms until the answer is y or n. It writes a log and intermediate files,
# keys among them, into its output folder. Its exit code is 0 for a signed file, 1 for a failure, 2 for the answer n.


ELFSIGNER = Path("tools/elfsigner/elfsigner.py")
# The tool's own messages name three minutes for signing by a server.
SIGNING_SECONDS = 300.0

# The tool repeats its question after an invalid answer; more repetitions mean that it asks another question.
_ANSWERS = b"y\n" * 8
# Variables that a Python program needs. Others may hold tokens and passwords, which the tool must not get.
_KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ")
# The tool imports `imp`, which Python 3.12 does not have.
_LAST_PYTHON = (3, 11)
_OUTPUT_BYTES = 1 << 20
_LINE_BYTES = 4096


def find_elfsigner(hexagon_sdk: Path | None) -> Path:
    """Return the tool of a Hexagon SDK. Raises MissingToolError."""
    tool = hexagon_sdk / ELFSIGNER if hexagon_sdk is not None else None
    if tool is None or not tool.is_file():
        problem = f"{tool} is not there" if tool is not None else "HEXAGON_SDK_ROOT is not set"
        raise MissingToolError(
            f"signing needs the Hexagon SDK and {problem}: "
            f"{way_to_set('HEXAGON_SDK_ROOT', 'a Hexagon SDK from Qualcomm')}"
        )
    return tool


def find_python(wanted: Path | None = None) -> Path:
    """Return an interpreter for the tool. Raises MissingToolError."""
    if wanted is not None:
        return wanted
    if sys.version_info[:2] <= _LAST_PYTHON:
        return Path(sys.executable)
    for minor in range(_LAST_PYTHON[1], 6, -1):
        if found := shutil.which(f"python3.{minor}"):
            return Path(found)
    raise MissingToolError(
        "elfsigner needs a Python older than 3.12 (it imports the module imp) and none is in PATH: name one with "
        "--python"
    )


def run_elfsigner(
    tool: Path,
    source: Path,
    folder: Path,
    *,
    python: Path,
    show: Callable[[str], None],
    timeout_s: float = SIGNING_SECONDS,
) -> Path:
    """Sign `source` into the empty `folder`, which no other call uses, and return the file that the tool left there.

    The caller removes the tool's other files in `folder`. `show` gets the tool's output, line by line. Raises
    InfraError after `timeout_s`, for an exit code other than 0, and without a signed file. The content of the file is
    not checked.
    """
    signed, scratch = folder / "signed", folder / "scratch"
    for path in (signed, scratch):
        path.mkdir(mode=0o700)
    env = {name: value for name, value in os.environ.items() if name in _KEPT}
    env |= {"TMPDIR": str(scratch), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    env["HEXAGON_SDK_ROOT"] = str(tool.parents[2])
    with Supervisor() as supervisor:
        child = supervisor.spawn(
            # -E: PYTHONPATH and the like are for farm only. A separate standard error would need its own pipe.
            [python, "-c", _BOTH_TO_ONE, tool, "-i", source, "-o", signed],
            name="elfsigner",
            env=env,
            cwd=scratch,
            stdin_pipe=True,
            stdout_pipe=True,
        )
        code = _converse(child, show, timeout_s)
    if code is None:
        raise InfraError(
            f"elfsigner did not sign {source.name} in {timeout_s:g} s and was ended: does it wait for a server, or ask "
            "something else than whether its license terms are agreed to? Its last lines are above"
        )
    if code != 0:
        raise InfraError(f"elfsigner did not sign {source.name}: it ended with exit code {code}; its lines are above")
    made = signed / source.name
    if made.is_symlink() or not made.is_file():
        raise InfraError(f"elfsigner signed {source.name} with exit code 0, and wrote no {made.name}")
    return made


# Program that starts the tool with both output streams in one pipe, which keeps the order of their lines.
_BOTH_TO_ONE = "import os, sys; os.dup2(1, 2); os.execv(sys.executable, [sys.executable, '-E', '-B', *sys.argv[1:]])"


def _converse(child: Child, show: Callable[[str], None], timeout_s: float) -> int | None:
    """Answer the tool's question, show its output, and return its exit code; None after `timeout_s`."""
    room = _OUTPUT_BYTES
    with child.limited(timeout_s) as late:
        with contextlib.suppress(BrokenPipeError), child.process.stdin as answers:  # type: ignore[union-attr]
            answers.write(_ANSWERS)
        while line := child.process.stdout.readline(_LINE_BYTES):  # type: ignore[union-attr]
            room -= len(line)
            if room > 0:
                show(visible(line.decode(errors="replace").rstrip("\r\n")))
        code = child.process.wait()
    return None if late.is_set() else code


# farm setup sign: the files that an LPAI requires signed, and the steps from an unsigned file to a recorded one.


# Backend whose DSP loads only signed files.
_SIGNED = next(backend for backend in BACKENDS.values() if backend.signed)


class Signing(msgspec.Struct, frozen=True):
    """File to sign."""

    unsigned: Path
    signed: Path
    reason: str
    """Reason for signing: `unsigned`, `foreign`, `outdated` ...; "" for a valid signature."""
    adopted: bool = False
    """True if the invalid signature came from elsewhere and was adopted."""


def plan_signing(config: Config, lpai: int, direct_arch: int = 0) -> tuple[Signing, ...]:
    """Return the files to sign for LPAI version `lpai`; with `direct_arch`, a Hexagon's, for direct mode as well.

    Raises UsageError for versions that no SoC has, MissingToolError with the names of all missing unsigned files,
    ConfigError for an unsigned file that is made for another machine.
    """
    pairs = _pairs(config, lpai, direct_arch, direct=bool(direct_arch))
    parts = [part for part, _ in pairs]
    if missing := [fault for part in parts if not part.present and (fault := find_fault(part)) is not None]:
        names = ", ".join(fault.problem for fault in missing)
        raise MissingToolError(f"{names}: {'; '.join(dict.fromkeys(fault.repair for fault in missing))}")
    require_sound(parts)
    return tuple(_planned(part.path, path) for part, path in pairs if part.path is not None)


def adopt_all(config: Config, lpai: int, direct_arch: int = 0) -> tuple[Path, ...]:
    """Adopt the existing signed files of LPAI version `lpai`, signed anywhere, and return them: the skel and direct
    mode's files on the DSP. With `direct_arch` all files of direct mode must exist.

    The unsigned originals may be missing. Raises UsageError without a file to adopt, else as `plan_signing`.
    """
    signed = _pairs(config, lpai, direct_arch, direct=True)
    there = [(part, path) for part, path in signed if path.is_file()]
    lacking = [path for _, path in (signed[1:] if direct_arch else ()) if not path.is_file()]
    if lacking:
        names = ", ".join(path.name for path in lacking)
        raise UsageError(
            f"{lacking[0].parent} lacks {names}: put it there, or let farm setup sign make it without --adopt"
        )
    if not there:
        skel = signed[0][1]
        problem = f"there is nothing to adopt in {skel.parent}: put signed files there, as {skel.name}"
        raise UsageError(f"{problem}; without --adopt, farm setup sign makes them")
    require_sound(part for part, _ in there if part.present)
    for part, path in there:
        adopt(part.path, path)
    return tuple(path for _, path in there)


def _pairs(config: Config, lpai: int, direct_arch: int, *, direct: bool) -> list[tuple[RuntimePart, Path]]:
    """Return the unsigned skel and, with `direct`, direct mode's files, each with the place of its signed file.

    Raises UsageError, MissingToolError without an SDK.
    """
    soc, root = _soc_of(lpai, direct_arch), config.sdk_root
    if root is None or not root.is_dir():
        problem = "QNN_SDK_ROOT is not set" if root is None else f"the QNN SDK folder {root} does not exist"
        raise MissingToolError(f"signing needs the files of a QNN SDK and {problem}: {GET_SDK}")
    places = android_places(config)
    parts = [unsigned_skel(soc, _SIGNED, places.qnn), *(direct_sources(soc, _SIGNED, places) if direct else ())]
    return [(part, path) for part in parts if (path := signed_path(soc, _SIGNED, places.qnn, part.name)) is not None]


def sign(
    config: Config,
    one: Signing,
    *,
    tool: Path,
    python: Path,
    show: Callable[[str], None],
    timeout_s: float = SIGNING_SECONDS,
) -> SignRecord:
    """Sign one file and record it; the earlier signed file stays until the new one is known to be good.

    Raises InfraError with the step that failed. All other files of the tool are removed.
    """
    with own_folder(config.cache_dir / "signing", f"{os.getpid()}-{one.unsigned.name}") as folder:
        # The tool's intermediate files hold keys.
        folder.chmod(0o700)
        source = folder / "input" / one.unsigned.name
        source.parent.mkdir()
        # A copy is signed, so that the recorded hash is right even if the original changes meanwhile.
        shutil.copyfile(one.unsigned, source)
        made = run_elfsigner(tool, source, folder, python=python, show=show, timeout_s=timeout_s)
        try:
            _check_signed(made, read_elf(source))
        except ConfigError as error:
            raise InfraError(f"elfsigner ended with exit code 0, but {made.name} {error.problem}") from None
        record = _record("signed", one.unsigned, source, made, tool)
        try:
            one.signed.parent.mkdir(parents=True, exist_ok=True)
            # A process that is killed between the two lines leaves a file without a record, which is refused; the same
            # command signs it again.
            replace_file(one.signed, made.read_bytes())
            write_record(one.signed, record)
        except OSError as error:
            raise InfraError(f"cannot write {one.signed}: {error.strerror or error}") from None
        return record


def adopt(unsigned: Path | None, signed: Path) -> SignRecord:
    """Adopt a file that was signed elsewhere, after the checks of `sign`, and record it; its original may be missing.

    Raises ConfigError if `signed` is not signed or is made for another machine.
    """
    original = unsigned if unsigned is not None and unsigned.is_file() else None
    _check_signed(signed, read_elf(original) if original else None)
    record = _record("adopted", original, original, signed, None)
    write_record(signed, record)
    return record


def lpai_versions() -> tuple[str, ...]:
    """Return the versions of the LPAI that SoCs have, as `--lpai` takes them."""
    return tuple(f"v{one}" for one in sorted({soc.lpai_version for soc in load_socs().values() if soc.lpai_version}))


def _soc_of(lpai: int, direct_arch: int) -> Soc:
    socs = [soc for soc in load_socs().values() if soc.lpai_version]
    able = [soc for soc in socs if soc.lpai_version == lpai]
    if not able:
        raise UsageError(f"no SoC has LPAI v{lpai}: known are {', '.join(lpai_versions())}")
    archs = sorted({soc.htp_arch for soc in able})
    if direct_arch and direct_arch not in archs:
        legal = ", ".join(f"v{arch}" for arch in archs)
        raise UsageError(f"no SoC with LPAI v{lpai} has a Hexagon V{direct_arch}: legal are --htp {legal}")
    return next(soc for soc in able if direct_arch in (0, soc.htp_arch))


def _planned(unsigned: Path, signed: Path) -> Signing:
    if not signed.is_file():
        return Signing(unsigned, signed, "missing")
    try:
        if not read_elf(signed).signed:
            return Signing(unsigned, signed, "unsigned")
    except ConfigError:
        return Signing(unsigned, signed, "damaged")
    fault = find_signing_fault(signed, unsigned)
    return Signing(unsigned, signed, fault.kind, fault.adopted) if fault else Signing(unsigned, signed, "")


def _check_signed(made: Path, source: ElfHeader | None) -> None:
    header = read_elf(made)
    if header.machine != HEXAGON:
        raise ConfigError(made, "", f"is made for {header.machine_name}, expected {MACHINES[HEXAGON]}")
    if not header.signed:
        raise ConfigError(made, "", "has no segment with a signature: it is not signed")
    if source is not None and (header.machine, header.flags) != (source.machine, source.flags):
        problem = f"has e_flags {header.flags:#x}, and its original has {source.flags:#x}"
        raise ConfigError(made, "", f"{problem}: it is another file")


def _record(
    how: Literal["signed", "adopted"], unsigned: Path | None, source: Path | None, made: Path, tool: Path | None
) -> SignRecord:
    return SignRecord(
        how=how,
        who=user_name(),
        host=platform.node(),
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        tool=str(tool) if tool else "",
        tool_sha256=sha256_of(tool) if tool else "",
        input=str(unsigned) if unsigned else "",
        input_sha256=sha256_of(source) if source else "",
        output_sha256=sha256_of(made),
    )
