"""`farm setup toolchain` and `farm setup sdk`: toolchains and their QNN SDKs."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click
from msgspec.structs import asdict

from farm.base.config.settings import Config
from farm.base.errors import FarmError, UsageError
from farm.cli.options import SuggestingGroup, configured, json_option, named
from farm.cli.output import notice, show
from farm.report.model.format import short_age, size
from farm.report.terminal.layout import columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from farm.builds.toolchains.overview import EnvironmentRow, ToolchainRow
    from farm.builds.toolchains.sdk_archives import SdkOffer
    from farm.builds.toolchains.toolchain import SourceState, Toolchain


# `farm setup toolchain`.


# Width of the name in a table of 80 columns.
_NAME_CHARS = 24


@click.group("toolchain", cls=SuggestingGroup)
def command() -> None:
    """List and show toolchains, which compile bundles.

    A toolchain is a Python interpreter with torch and ExecuTorch, and a QNN
    SDK. farm.toml names them ([toolchain.NAME]); a path or a version of
    ExecuTorch can stand in place of a NAME.
    """


@command.command("list")
@json_option()
def list_command() -> None:
    """List toolchains, and environments that farm made.

    The list has the environment farm runs in, the tables of farm.toml, and
    environments of releases in the cache.
    """
    from farm.builds.toolchains.overview import environment_rows, toolchain_rows

    config = configured()
    rows, environments = toolchain_rows(config), environment_rows(config.cache_dir)
    answer = {"toolchains": rows, "environments": environments}
    show(answer, [*_listed(rows), *_environments(environments)])


def _listed(rows: Sequence[ToolchainRow]) -> Iterator[str]:
    from farm.builds.toolchains.overview import NOT_MADE

    head = ("name", "kind", "executorch", "torch", "qnn", "commit")
    cells = [
        (
            row.name if len(row.name) <= _NAME_CHARS else f"{row.name[: _NAME_CHARS - 1]}…",
            row.kind,
            *(row.versions.get(name, "-") for name in ("executorch", "torch")),
            row.qnn,
            _state(row.source),
        )
        for row in rows
    ]
    table = columns([head, *cells])
    yield table[0]
    for line, row in zip(table[1:], rows, strict=True):
        yield from wrapped(line) if len(line) > 80 else [line]
        if row.kind not in ("version", "qnn"):
            yield f"  {row.place}"
        if row.problem:
            hint = ": the first command with it makes it"
            yield from wrapped(f"  {row.problem}{hint if row.problem == NOT_MADE else ''}")


def _state(source: SourceState) -> str:
    return " ".join(filter(None, (source.commit[:10], source.branch, "dirty" if source.dirty else "")))


def _environments(rows: Sequence[EnvironmentRow]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", "environments that farm made (farm setup cache prune removes unused ones)")
    yield from columns(
        [
            (row.executorch, f"torch {row.torch}", size(row.nbytes), f"used {short_age(row.used_ms)} ago",
             "" if row.current else "old: farm's own packages have changed since")
            for row in rows
        ],
        right=(2,),
        indent="  ",
    )  # fmt: skip


@command.command("show")
@click.argument("name", callback=named, metavar="NAME|PATH|VERSION")
@json_option()
def show_command(name: str) -> None:
    """Show a toolchain in full, with remarks on possible problems.

    \b
    Exit codes: 0; 2 it does not exist; 6 a part of it is missing.
    """
    from farm.builds.toolchains.selection import prepare, use_toolchain

    config = use_toolchain(configured(), name)
    tools = prepare(config)
    selected = config.toolchain
    facts = {
        "schema": 2,
        "name": tools.name or "default",
        "python": tools.compiler.python,
        "executorch": str(selected.executorch or ""),
        "checkout": str(selected.checkout or ""),
        "branch": tools.branch,
        "private": tools.private,
        "qnn": str(config.sdk_root or ""),
        "native": {target: str(folder) for target, folder in selected.native.items()},
        "runner": tools.runner,
        "versions": tools.versions,
        "environment": tools.compiler.env,
        "source": tools.source,
    }
    show(facts, _shown(facts, tools))


def _shown(facts: dict[str, object], tools: Toolchain) -> Iterator[str]:
    source = tools.source
    branch = tools.branch or "default"
    if tools.private:
        branch = f"compared with {branch}, and never part of it"
    rows = [
        ("python", tools.compiler.python),
        ("executorch in", str(facts["executorch"])),
        ("commit", source.commit),
        ("git branch", source.branch),
        ("subject", source.subject),
        *(("submodule", f"{path} {commit[:12]}") for path, commit in source.submodules.items()),
        ("state", "dirty" if source.dirty else ""),
        *(("changed", path) for path in source.changed),
        ("branch", branch),
        ("QNN SDK", str(facts["qnn"])),
        *((f"native {target}", folder) for target, folder in dict(facts["native"]).items()),  # type: ignore[call-overload]
        ("runner", tools.runner[:16]),
    ]
    yield str(facts["name"])
    yield from columns([row for row in rows if row[1]], indent="  ")
    yield from ("", "dependencies of its bundles")
    yield from columns([(name, text[:40]) for name, text in sorted(tools.versions.items())], indent="  ")
    yield from (["", "worth a look"] if source.warnings else [])
    for warning in source.warnings:
        yield from wrapped(f"  {warning}")


# `farm setup sdk`.


_WHEEL, _QAIRT, _MAVEN = _SOURCES = ("wheel", "qairt", "maven")


@click.group("sdk", cls=SuggestingGroup)
def sdk_command() -> None:
    """Show and fetch QNN SDKs, which compile, simulate and run.

    \b
    farm setup sdk list                     SDKs here, and SDKs to fetch
    farm setup sdk fetch 2.49               a wheel of onnxruntime-qnn, as an SDK
    farm setup sdk fetch --accept-licence   Qualcomm's SDK, as ExecuTorch has it
    farm setup sdk fetch --source maven     libraries for Android devices only
    Their folders are for sdk_root in the [qnn] table of farm.toml, and
    qnn = "2.49" in the table of a toolchain selects one for it alone.
    """


@sdk_command.command("list")
@json_option()
def list_sdks() -> None:
    """List the SDKs on this machine, and SDKs that can be fetched.

    The column compiles has the backends that an SDK can compile for, each for at
    least one SoC.
    """
    from farm.builds.toolchains.sdks import sdk_states

    config = configured()
    states = sdk_states(config)
    offers = list(_offers(config))
    rows = [("QNN", "compiles", "size", "from")]
    rows += [
        (
            f"{state.version}{' *' if state.default else ''}",
            ", ".join(state.backends) or "-",
            size(state.nbytes),
            urlsplit(state.origin).hostname or state.origin,
        )
        for state in states
    ]
    lines = [*columns(rows, right=(2,))] if states else ["no QNN is here"]
    if any(state.default for state in states):
        lines.append("* is the default")
    for state in states:
        lines += wrapped(f"{state.version} is for {', '.join(state.targets)}") if len(state.targets) > 1 else []
        lines += wrapped(f"{state.version}: {state.problem}") if state.problem else []
    if offers:
        lines += ["", "can be fetched:"]
        lines += columns([(f"farm setup sdk fetch {offer['fetch']}", offer["from"]) for offer in offers], indent="  ")
    sdks = [{**asdict(one), "root": str(one.root or "")} for one in states]
    show({"sdks": sdks, "can_be_fetched": offers}, lines)


@sdk_command.command("fetch")
@click.argument("version", required=False)
@click.option("--source", type=click.Choice(_SOURCES), help="wheel of onnxruntime-qnn; qairt: Qualcomm's archive, for "
              "compiler and devices; maven: com.qualcomm.qti:qnn-runtime, for Android devices only.")  # fmt: skip
@click.option("--toolchain", callback=named, metavar="NAME|PATH|VERSION",
              help="Toolchain whose ExecuTorch names Qualcomm's SDK.")  # fmt: skip
@click.option("--accept-licence", is_flag=True, help="You have read and accept the licence.")
@click.option("--sha256", metavar="HASH", default="", help="Expected hash of the archive.")
@json_option()
def fetch(version: str | None, source: str | None, toolchain: str | None, sha256: str, *, accept_licence: bool) -> None:
    """Fetch an SDK into the cache, check it, and print its folder.

    VERSION is a version of QNN, such as 2.49: by default of a wheel of
    onnxruntime-qnn. Without VERSION ExecuTorch's downloader names the SDK. Before a download from Qualcomm its size and
    licence are shown, and you are asked once. pip's configuration applies to
    wheels.
    """
    from farm.builds.toolchains.sdk_sources import fetch_wheel_sdk
    from farm.builds.toolchains.sdks import find_cached, require_version
    from farm.builds.toolchains.selection import use_toolchain

    config = use_toolchain(configured(), toolchain or "")
    if sha256 and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UsageError(f"--sha256 {sha256!r} is no SHA-256: expected 64 hexadecimal digits")
    if version is not None:
        version = require_version(version)
    if source == _MAVEN:
        folder = _fetch_runtime(config, version or "", sha256, accepted=accept_licence)
    elif source == _WHEEL:
        if version is None or sha256 or accept_licence:
            raise UsageError(f"--source {_WHEEL} takes a VERSION, such as 2.49, and neither --sha256 nor a licence")
        folder = find_cached(config, version) or fetch_wheel_sdk(config.cache_dir, version)
    else:
        ours = bool(source or accept_licence or sha256 or toolchain)
        folder = _fetch_archive(config, version, sha256, named=ours, only=source == _QAIRT, accepted=accept_licence)
    show({"folder": str(folder)}, [str(folder)])


def _fetch_archive(
    config: Config, version: str | None, sha256: str, *, named: bool, only: bool, accepted: bool
) -> Path:
    """Return the SDK of ExecuTorch's downloader, or of a wheel for a version of a wheel.

    `named`: options are about Qualcomm's archive, which comes first then. `only`: no wheel is looked at.
    """
    from farm.builds.toolchains.sdk_sources import candidates, fetch_sdk, fetch_wheel_sdk, is_complete, offered_sdk
    from farm.builds.toolchains.sdks import is_version

    if version is not None:
        if (there := _cached_sdk(config, version, sha256, only=only)) is not None:
            return there
        if not named and candidates(version):
            return fetch_wheel_sdk(config.cache_dir, version)
    offer = offered_sdk(config, version if only and version is not None and is_complete(version) else "")
    if version is not None and not is_version(offer.version, version):
        if only:
            example = f"a complete version, as {offer.version}"
            raise UsageError(f"ExecuTorch's downloader knows QNN {offer.version}, not {version}: name {example}")
        if named:
            notice(f"ExecuTorch's downloader knows QNN {offer.version}, not {version}: looking at onnxruntime-qnn")
        return fetch_wheel_sdk(config.cache_dir, version)
    if (there := _cached_sdk(config, offer.version, sha256, only=only)) is None:
        _require_licence(config, offer, accepted=accepted)
        there = fetch_sdk(config, offer, sha256)
    return there


def _cached_sdk(config: Config, version: str, sha256: str, *, only: bool) -> Path | None:
    """Return the SDK of `version` in the cache; with `only` or a hash no SDK of a wheel. Raises InfraError for another
    hash, UntrustedError for a folder that another user could have written.
    """
    from farm.base.files import require_own
    from farm.builds.runtime.qnn_sdk import require_archive, wheel_release
    from farm.builds.toolchains.sdks import find_cached

    there = find_cached(config, version)
    if there is None or ((only or sha256) and wheel_release(there)):
        return None
    require_own(there)
    return require_archive(there, sha256)


def _fetch_runtime(config: Config, version: str, sha256: str, *, accepted: bool) -> Path:
    from farm.builds.toolchains.sdk_sources import fetch_release, offered_release, release_folder

    release = offered_release(config, version)
    if not release_folder(config, release.version).is_dir():
        _require_licence(config, release, accepted=accepted)
    folder = fetch_release(config, release, sha256)
    notice(f"for Android devices: export FARM_ANDROID_QNN={folder}, or android_qnn in the [qnn] table of farm.toml")
    return folder


def _require_licence(config: Config, offer: SdkOffer, *, accepted: bool) -> None:
    """Ask on a terminal, once for each licence, whether the user accepts it; record the consent.

    Raises UsageError for a refusal, and without a terminal.
    """
    from farm.builds.toolchains.sdk_archives import consents, record_consent

    if offer.licence in consents(config):
        return
    if not accepted:
        about = f"{offer.name} {offer.version} is Qualcomm's, under a licence of its own: {offer.licence}"
        shown_size = size(total) if (total := offer.nbytes) else "unknown size"
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UsageError(f"{about} ({shown_size} from {offer.url}): read it and add --accept-licence")
        notice(about)
        notice(f"it is fetched from {offer.url}, {shown_size}")
        if not click.confirm("Do you accept the licence?", default=False, err=True):
            raise UsageError("without the licence nothing was fetched")
    record_consent(config, offer)


def _offers(config: Config) -> list[dict[str, str]]:
    """Return the SDKs that can be fetched and are not here."""
    from farm.builds.toolchains.sdk_sources import KNOWN_WHEELS, WHEEL_MB, offered_sdk
    from farm.builds.toolchains.sdks import find_cached, wheel_version

    offers = [
        {"fetch": ".".join(qnn.split(".")[:2]), "qnn": qnn, "from": f"onnxruntime-qnn {wheel}, {WHEEL_MB} MB"}
        for wheel, qnn in reversed(KNOWN_WHEELS.items())
        if find_cached(config, qnn) is None and qnn != wheel_version()
    ]
    with contextlib.suppress(FarmError):
        offer = offered_sdk(config)
        if find_cached(config, offer.version) is None:
            about = "Qualcomm's, about 2 GB, under its licence"
            offers.append({"fetch": offer.version, "qnn": offer.version, "from": about})
    about = "Qualcomm's, for Android devices"
    return [*offers, {"fetch": "--source maven", "qnn": "the newest", "from": about}]
