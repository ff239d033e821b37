"""`farm setup sdk`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from farm.base.config.settings import load_config
from farm.base.errors import FarmError, UsageError
from farm.cli.options import SuggestingGroup, config_option, json_option, named
from farm.cli.output import echo, notice, show
from farm.report.model.format import size
from farm.report.terminal.layout import columns, wrapped

if TYPE_CHECKING:
    from pathlib import Path

    from farm.base.config.settings import Config
    from farm.builds.toolchains.sdk.downloader import SdkOffer
    from farm.builds.toolchains.sdks import SdkState

_SHA256 = 64


@click.group("sdk", cls=SuggestingGroup)
def command() -> None:
    """Show, fetch and choose QNN SDKs, which compile, simulate and run.

    \b
    farm setup sdk list                     SDKs here, and SDKs to fetch
    farm setup sdk fetch 2.49               a wheel of onnxruntime-qnn, as an SDK
    farm setup sdk fetch --accept-licence   Qualcomm's SDK, as ExecuTorch has it
    farm setup sdk use 2.49                 the default, in farm.toml
    A toolchain has its own: qnn = "2.49" in its table.
    """


@command.command("list")
@json_option()
def list_sdks(config_file: Path | None, *, as_json: bool) -> None:
    """List the SDKs on this machine, and SDKs that can be fetched.

    Compiles: the backends that it can compile for, each for at least one SoC.
    """
    from farm.builds.toolchains.sdks import sdk_states

    config = load_config(config_file)
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
    show({"sdks": [_state(one) for one in states], "can_be_fetched": offers}, lines, as_json=as_json)


@command.command("fetch")
@config_option
@click.argument("version", required=False)
@click.option(
    "--toolchain", callback=named, metavar="NAME|PATH|VERSION", help="Toolchain whose ExecuTorch names Qualcomm's SDK."
)
@click.option("--accept-licence", is_flag=True, help="You have read and accept Qualcomm's licence.")
@click.option("--sha256", default="", help="Expected hash of the archive.")
def fetch(
    config_file: Path | None, version: str | None, toolchain: str | None, sha256: str, *, accept_licence: bool
) -> None:
    """Fetch an SDK into the cache, check it, and print its folder.

    VERSION, such as 2.49, is the version of a wheel of onnxruntime-qnn, or of
    the SDK that ExecuTorch's downloader knows. Without VERSION it is the
    latter. pip's own configuration applies to wheels.
    """
    from farm.builds.toolchains.sdk.downloader import fetch_sdk, offered_sdk
    from farm.builds.toolchains.sdk.wheels import candidates, fetch_wheel_sdk
    from farm.builds.toolchains.sdks import find_cached, is_version, require_version
    from farm.builds.toolchains.select import use_toolchain

    config = use_toolchain(load_config(config_file), toolchain or "")
    if sha256 and (len(sha256) != _SHA256 or any(letter not in "0123456789abcdefABCDEF" for letter in sha256)):
        raise UsageError(f"--sha256 {sha256!r} is no SHA-256: expected 64 hexadecimal digits")
    if version is not None:
        version = require_version(version)
        if (there := find_cached(config, version)) is not None:
            echo(there)
            return
        if not accept_licence and not sha256 and not toolchain and candidates(version):
            echo(fetch_wheel_sdk(config.cache_dir, version))
            return
    offer = offered_sdk(config)
    if version is not None and not is_version(offer.version, version):
        if accept_licence or sha256 or toolchain:
            notice(f"ExecuTorch's downloader knows QNN {offer.version}, not {version}: looking at {_WHEELS}")
        echo(fetch_wheel_sdk(config.cache_dir, version))
        return
    if (there := find_cached(config, offer.version)) is None:
        _require_licence(offer, accepted=accept_licence)
        there = fetch_sdk(config, offer, sha256)
    echo(there)


@command.command("use")
@config_option
@click.argument("sdk", metavar="VERSION|PATH")
def use(config_file: Path | None, sdk: str) -> None:
    """Make an SDK the default: sdk_root in the [qnn] table of farm.toml.

    SDK is a version from 'farm setup sdk list', or the folder of an SDK. Comments
    and all other settings in farm.toml stay as they are.
    """
    from farm.base.config.edit import set_sdk_root
    from farm.builds.toolchains.sdks import default_path, resolve_qnn

    config = load_config(config_file)
    root = resolve_qnn(config, default_path(sdk))
    wanted = [] if root is None else ["[qnn]", f'sdk_root = "{root}"']
    if config.file is None and not wanted:
        echo("there is no farm.toml: the wheel in farm's environment is used already")
        return
    if config.file is None:
        raise UsageError(f"there is no farm.toml yet: write one with these two lines: {wanted[0]} and {wanted[1]}")
    changed = set_sdk_root(config.file, root)
    what = f"sdk_root is {root}" if root is not None else "the wheel in farm's environment is used"
    echo(f"{config.file}: {what}{'' if changed else ' already'}")
    if os.environ.get("QNN_SDK_ROOT"):
        notice("QNN_SDK_ROOT is set, which overrides it: unset it")


_WHEELS = "wheels of onnxruntime-qnn"


def _require_licence(offer: SdkOffer, *, accepted: bool) -> None:
    """Ask on a terminal whether the user accepts the licence. Raises UsageError if not, or without a terminal."""
    from farm.builds.toolchains.sdk.downloader import LICENCE

    about = f"QNN SDK {offer.version} is Qualcomm's, under a licence of its own: {LICENCE}"
    if accepted:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{about}: read it and add --accept-licence")
    notice(about)
    notice(f"it is fetched from {offer.url}")
    if not click.confirm("Do you accept the licence?", default=False, err=True):
        raise UsageError("without the licence nothing was fetched")


def _offers(config: Config) -> list[dict[str, str]]:
    """Return the SDKs that can be fetched and are not here."""
    from farm.builds.toolchains.sdk.downloader import offered_sdk
    from farm.builds.toolchains.sdk.wheels import KNOWN_WHEELS, WHEEL_MB
    from farm.builds.toolchains.sdks import find_cached, wheel_version

    offers = [
        {"fetch": ".".join(qnn.split(".")[:2]), "qnn": qnn, "from": f"onnxruntime-qnn {wheel}, {WHEEL_MB} MB"}
        for wheel, qnn in reversed(KNOWN_WHEELS.items())
        if find_cached(config, qnn) is None and qnn != wheel_version()
    ]
    try:
        offer = offered_sdk(config)
    except FarmError:
        return offers
    if find_cached(config, offer.version) is None:
        offers.append(
            {"fetch": offer.version, "qnn": offer.version, "from": "Qualcomm's, about 2 GB, under its licence"}
        )
    return offers


def _state(state: SdkState) -> dict[str, object]:
    import msgspec

    return {**msgspec.structs.asdict(state), "root": str(state.root) if state.root else ""}
