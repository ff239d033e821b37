"""`farm setup sign`."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from farm.base.config.settings import Config
from farm.base.errors import UsageError
from farm.cli.options import FILE, configured, json_option, timeout_option
from farm.cli.output import echo, notice, show

if TYPE_CHECKING:
    from farm.builds.runtime.signing.sign import Signing

_ROOT = click.Path(path_type=Path)


def _version(_context: click.Context, parameter: click.Parameter, value: str | None) -> int:
    if value is None:
        return 0
    found = re.fullmatch(r"[vV]?(\d{1,3})", value)
    if found is None:
        raise UsageError(f"--{parameter.name}: {value!r} is no version: expected something like v6 or v81")
    return int(found[1])


def _folder(_context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    if value is None:
        return None
    folder = value.expanduser().absolute()
    if not folder.is_dir():
        raise UsageError(f"{parameter.opts[0]}: there is no folder {folder}")
    return folder


@click.command("sign")
@click.option("--lpai", callback=_version, metavar="VERSION", help="Version of the LPAI: v6.  [required]")
@click.option("--direct", is_flag=True, help="Sign the files of direct mode too; needs --htp.")
@click.option("--htp", metavar="VERSION", callback=_version, help="Hexagon architecture of direct mode's files: v81.")
@click.option("--sdk-root", type=_ROOT, callback=_folder, help="QNN SDK; otherwise $QNN_SDK_ROOT, or farm.toml.")
@click.option("--hexagon-sdk", type=_ROOT, callback=_folder,
              help="Hexagon SDK; otherwise $HEXAGON_SDK_ROOT, or farm.toml.")  # fmt: skip
@click.option("--force", is_flag=True, help="Sign files again that are signed already, by any user.")
@click.option("--adopt", is_flag=True, help="Sign nothing: vouch for the present signed files.")
@click.option("--python", type=FILE, help="Interpreter for elfsigner (< 3.12).")
@timeout_option("Time limit of one file.")
@json_option()
def command(
    lpai: int,
    htp: int,
    sdk_root: Path | None,
    hexagon_sdk: Path | None,
    python: Path | None,
    timeout_s: float,
    *,
    direct: bool,
    force: bool,
    adopt: bool,
) -> None:
    """Sign the skel that an LPAI loads, with the Hexagon SDK's elfsigner.

    \b
    farm setup sign --lpai v6                      the skel
    farm setup sign --lpai v6 --direct --htp v81   also the files of direct mode
    farm setup sign --lpai v6 --adopt              vouch for signed files

    elfsigner asks whether you agree to its license terms; this command agrees
    in your name. Its output is shown and not kept. User and time of a signature
    are recorded beside the signed file; a skel without such a record, or with
    an unsigned original that has changed since, is not put on a device.
    """
    if not lpai:
        from farm.builds.runtime.signing.sign import lpai_versions

        raise UsageError(f"name the version of the LPAI: {' or '.join(f'--lpai {one}' for one in lpai_versions())}")
    if direct and not htp:
        raise UsageError("--direct needs --htp, the Hexagon architecture of the device: --htp v81")
    if htp and not direct:
        raise UsageError("--htp is for --direct only")
    for name, given in (("--force", force), ("--python", python is not None)):
        if adopt and given:
            raise UsageError(f"--adopt signs nothing: leave {name} out")
    roots = {"sdk_root": sdk_root, "hexagon_sdk_root": hexagon_sdk}
    config = msgspec.structs.replace(configured(), **{name: path for name, path in roots.items() if path is not None})
    from farm.builds.runtime.signing.sign import adopt_all, plan_signing

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
    from farm.builds.runtime.signing.elfsigner import find_elfsigner, find_python
    from farm.builds.runtime.signing.sign import sign

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
