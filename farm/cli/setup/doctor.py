"""`farm doctor`, and the archive of `--bundle`: versions, configuration without secrets, and recent logs."""

from __future__ import annotations

import configparser
import json
import os
import platform
import re
import socket
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import click
import msgspec

from farm import __version__
from farm.base.backends.descriptor import DIRECT_MODE
from farm.base.backends.registry import BACKENDS, find_backend
from farm.base.config.shared import secrets_of, shown_address
from farm.base.errors import ExitCode, FarmError, UsageError
from farm.base.files import end_of_log, zipped
from farm.base.grouping import grouped
from farm.base.socs import check_backend, find_soc, load_socs
from farm.base.text import HIDDEN, json_document, redacted, visible, with_texts
from farm.cli.options import configured, json_option, soc_option, toolchain_option
from farm.cli.output import show
from farm.dispatch.notify.channels import hide_secrets, read_secret
from farm.report.terminal.layout import WIDTH, columns, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from farm.base.config.settings import Config
    from farm.builds.runtime.inventory import Ability, Availability, MissingItem, Tool
    from farm.devices.adb.host import AdbHost


# `farm doctor`.


# A healthy phone answers sooner; a hanging device must not delay all other checks.
_SCAN_SECONDS = 3.0
# With more SoCs than these in a line, they are counted if they are all that have the backend.
_MOST_NAMES = 6
_NAMES = {"here": "yes"}


@click.command("doctor")
@soc_option("Only this SoC.")
@click.option("--backend", metavar="BACKEND", help="Only this backend.")
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    metavar="FILE.zip",
    help="Write versions, configuration without secrets and recent logs, for a report of a problem.",
)
@toolchain_option("Toolchain to check")
@json_option()
def command(soc: str | None, backend: str | None, bundle: Path | None, toolchain: str) -> int:
    """Show what can be compiled, staged and run here, and how to repair the rest.

    Nothing is built or fetched.

    \b
    Exit codes: 0; 2 usage or configuration; 6 --soc and --backend name a
    combination that cannot be run here.
    """
    from farm.builds.runtime.inventory import Doctor, backends_of, compiler_versions, list_tools, runnable
    from farm.builds.toolchains.selection import look_into, use_toolchain

    if bundle is not None and (soc or backend):
        raise UsageError("--bundle is about this machine: leave out --soc and --backend")
    if backend is not None:
        find_backend(backend)
    chosen = find_soc(soc) if soc else None
    if chosen is not None and backend is not None:
        check_backend(chosen, backend)
    config = use_toolchain(configured(), toolchain)
    if bundle is not None:
        names = write_bundle(bundle, config, list_tools(config))
        about = f"versions, configuration without secrets, {len(names) - 2} logs: look through it before you send it"
        show({"bundle": str(bundle), "files": names}, [f"{bundle}: {about}"])
        return 0
    attached, note = _attached()
    compiler = compiler_versions() if config.toolchain.python is None else look_into(config, config.toolchain).versions
    doctor = Doctor(config, attached, compiler)
    socs = [chosen] if chosen else list(load_socs().values())
    wanted = [(one, name) for one in socs for name in backends_of(one) if backend in (None, name)]
    abilities = [doctor.examine(one, name) for one, name in wanted]
    tools = list_tools(config, compiler)
    direct = [
        {"soc": one.name, "backend": name, "runs_jobs": not gaps, "gaps": gaps}
        for one, name in wanted
        if BACKENDS[name].direct_library
        for gaps in [doctor.direct(one, name)]
    ]
    answer = {"abilities": abilities, "direct": direct, "tools": tools, "adb": note}
    show(answer, [*_abilities(abilities), *_direct(direct), *_tools(tools, note)])
    asked = chosen is not None and backend is not None
    return ExitCode.MISSING_TOOL if asked and not runnable(abilities[0]) else 0


def _attached() -> tuple[dict[str, list[str]] | None, str]:
    """Return the serials of usable devices by SoC, None without an adb server, and a note on adb."""
    from farm.devices.adb.host import AdbHost
    from farm.devices.adb.server import server_place

    try:
        place = server_place(os.environ)
    except UsageError as error:
        return None, str(error)
    server = AdbHost(place.port, place.host)
    try:
        socket.create_connection((place.host, place.port), timeout=0.2).close()
    except OSError:
        return None, f"no server on {server.place}"
    found: list[tuple[dict[str, list[str]], str]] = []
    # A daemon thread, so that a hanging device does not delay the exit.
    asking = threading.Thread(target=lambda: found.append(_scan(server)), daemon=True)
    asking.start()
    asking.join(_SCAN_SECONDS)
    if not found:
        return {}, f"the server on {server.place} did not list its devices within {_SCAN_SECONDS:g} s"
    return found[0]


def _scan(server: AdbHost) -> tuple[dict[str, list[str]], str]:
    from farm.devices.discovery import scan

    try:
        found = scan(server.port, server.host)
    except FarmError as error:
        return {}, str(error)
    by_soc = grouped((device.soc, device.serial) for device in found.devices if device.kind == "hardware")
    names = [f"{device.serial} ({device.soc})" for device in found.devices]
    names += [f"{device.serial} ({device.state})" for device in found.unusable]
    return by_soc, f"attached: {', '.join(names) or 'no device'}"


def _abilities(abilities: list[Ability]) -> Iterator[str]:
    repairs: dict[str, list[MissingItem]] = {}
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in sorted(abilities, key=lambda one: list(BACKENDS).index(one.backend)):
        cells = [_cell(answer, repairs) for answer in (one.compile, one.stage, one.run)]
        rows.setdefault((one.backend, *cells), []).append(one.soc)
    head, *lines = columns([("backend", "compile", "stage", "run"), *rows])
    yield head
    for line, (row, socs) in zip(lines, rows.items(), strict=True):
        yield line
        having = sum(one.backend == row[0] for one in abilities)
        every = len(socs) == having > _MOST_NAMES
        yield from wrapped(f"  {f'all {having} SoCs' if every else ', '.join(socs)}", hanging="")
    if repairs:
        yield ""
        yield from wrapped("In brackets: the missing parts, there or for other devices, and their repair.", 80, "")
    for number, (repair, gaps) in enumerate(repairs.items(), 1):
        where = ", ".join(dict.fromkeys(gap.where for gap in gaps if gap.where))
        parts = list(dict.fromkeys(name for gap in gaps for name in gap.what.split(", ")))
        what = ", ".join(parts[:_MOST_NAMES])
        if more := parts[_MOST_NAMES:]:
            what += f" and {len(more)} more"
        yield from wrapped(f"[{number}] {where and f'{where}: '}{what}", hanging="    ")
        # Commands are not wrapped, so that they can be copied.
        is_command = repair.startswith(("farm ", "pip ", "apt-get ", "adb "))
        yield from [f"    {repair}"] if is_command else wrapped(f"    {repair}", hanging="")


def _cell(answer: Availability, repairs: dict[str, list[MissingItem]]) -> str:
    for gap in answer.gaps:
        known = repairs.setdefault(gap.repair, [])
        if gap not in known:
            known.append(gap)
    order = list(repairs)
    numbers = sorted({order.index(gap.repair) + 1 for gap in answer.gaps})
    where = " ".join(_NAMES.get(one, one) for one in answer.where) or "no"
    return f"{where} [{','.join(map(str, numbers))}]" if numbers else where


def _direct(asked: Sequence[dict[str, object]]) -> list[str]:
    if not asked:
        return []
    ready = [f"{one['soc']} {one['backend']}" for one in asked if not one["gaps"]]
    state = f"complete for {', '.join(ready)}" if ready else "not complete for any of them"
    return ["", *wrapped(
        f"direct mode: {state}; 'farm setup runtime check --direct --soc SOC' lists its files. Jobs run in it with "
        f"--option {DIRECT_MODE}=true.",
        hanging="",
    )]  # fmt: skip


def _tools(tools: list[Tool], note: str) -> Iterator[str]:
    yield from ("", "tools")
    name_width = max(len(tool.name) for tool in tools) + 4
    for tool in tools:
        text = f"{tool.version}: {tool.problem}" if tool.problem else tool.version or "none"
        if tool.name == "adb":
            text = f"{text}; {note}"
        line = f"  {tool.name}".ljust(name_width) + text
        if tool.path and len(line) + 2 + len(tool.path) <= WIDTH:
            yield f"{line}  {tool.path}"
            continue
        first, *more = wrapped(text, WIDTH - name_width, "")
        yield f"  {tool.name}".ljust(name_width) + first
        yield from (" " * name_width + one for one in more)
        if tool.path:
            # Paths are not wrapped, so that they can be copied.
            yield f"    {tool.path}"


# Archive of `farm doctor --bundle`: versions, configuration without secrets, and recent logs.


_LOG_BYTES = 256 << 10
"""Bytes kept of the end of one log."""
_NEWEST_LOGS = 40
_LOGS = ("agent/*/agent.log*", "agent/*/logs/*.log", "runs/*/logs/*.log")
"""Patterns below the state folder: logs of agents, device processes and builders."""
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|ACCESS_KEY|API_?KEY", re.IGNORECASE)
_LEAST_SECRET_CHARS = 6
"""Least length of a variable's value that its name makes a secret."""
_LOGIN = re.compile(r"(://[^\s/:@]*):[^\s@]*@")
_COMMANDS = ("power", "build")
"""Commands of users in farm.toml, whose arguments may be secrets."""


def write_bundle(path: Path, config: Config, tools: Sequence[Tool]) -> list[str]:
    """Write the archive and return the names of its files. Raises UsageError for an existing or unwritable file."""
    hide = _Redaction(_secrets(config))
    files = {
        "versions.json": _versions(tools, hide),
        "configuration.json": json_document(with_texts(shown_config(config), hide.text)),
        **{f"logs/{name}": visible(hide.text(text)).encode() for name, text in _recent_logs(config.state_dir)},
    }
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} is there already: name another file") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(zipped(files))
    except OSError as error:
        path.unlink()
        raise UsageError(f"cannot write {path}: {error.strerror}: name a file on another disk, or make room") from None
    return list(files)


def shown_config(config: Config) -> dict[str, Any]:
    """Return the configuration as JSON has it, without passwords, addresses of webhooks and arguments of commands."""
    shown: dict[str, Any] = msgspec.to_builtins(config, enc_hook=str)
    shown["store_url"] = shown_address(config.store_url)
    for hook in shown["notify"]["webhook"]:
        hook["url"] = hook["url"] and f"{urlsplit(hook['url']).scheme}://{HIDDEN}"
    for device in shown["devices"]:
        device["address"] = {key: value if key == "type" else HIDDEN for key, value in device["address"].items()}
    for table in (*shown["devices"], *shown["toolchains"].values(), shown["toolchain"]):
        for key in _COMMANDS:
            if table.get(key):
                table[key] = [table[key][0], *[HIDDEN] * (len(table[key]) - 1)]
    return shown


def _versions(tools: Sequence[Tool], hide: _Redaction) -> bytes:
    answer = {
        "farm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "interpreter": sys.executable,
        "tools": [{"name": tool.name, "version": tool.version, "problem": tool.problem} for tool in tools],
    }
    return json_document(with_texts(answer, hide.text))


def _recent_logs(state_dir: Path) -> Iterator[tuple[str, str]]:
    """Yield the newest logs below the state folder: their relative names and their ends."""
    found = [path for pattern in _LOGS for path in state_dir.glob(pattern) if path.is_file() and not path.is_symlink()]
    for path in sorted(found, key=_changed_ns, reverse=True)[:_NEWEST_LOGS]:
        text = end_of_log(path, _LOG_BYTES)
        # The first line may begin within a secret, which would hide it from the redaction.
        whole = text.partition("\n")[2] if path.stat().st_size > _LOG_BYTES else text
        yield visible(str(path.relative_to(state_dir))), whole


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _secrets(config: Config) -> Iterator[str]:
    """Yield the secrets of the store, of S3, of notifications and of this environment."""
    yield from secrets_of(config.store_url)
    yield from (value for name, value in os.environ.items()
                if _SECRET_NAME.search(name) and len(value) >= _LEAST_SECRET_CHARS)  # fmt: skip
    yield os.environ.get("PGPASSWORD", "")
    notify = config.notify
    hide_secrets(notify.webhook, notify.mail)
    named = [(one.url_env, one.url_file) for one in notify.webhook]
    named += [(one.token_env, one.token_file) for one in notify.webhook]
    yield from (one.url for one in notify.webhook)
    if notify.mail is not None:
        named.append((notify.mail.password_env, notify.mail.password_file))
    for variable, file in named:
        try:
            yield read_secret(variable, file)
        except FarmError:
            continue
    yield from _secrets_of_files()


def _secrets_of_files() -> Iterator[str]:
    """Yield the passwords of ~/.pgpass and the keys of ~/.aws/credentials, or of the files that variables name."""
    passwords = Path(os.environ.get("PGPASSFILE") or "~/.pgpass").expanduser()
    for line in end_of_log(passwords, _LOG_BYTES).splitlines():
        yield re.split(r"(?<!\\):", line)[-1]
    keys = configparser.RawConfigParser(strict=False)
    try:
        keys.read(Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser())
    except (configparser.Error, OSError, UnicodeDecodeError):
        return
    for section in keys.sections():
        yield from (value for name, value in keys.items(section) if _SECRET_NAME.search(name))


class _Redaction:
    """Redaction of secrets in texts and JSON values."""

    def __init__(self, secrets: Iterable[str]) -> None:
        found = {
            form for secret in secrets if secret for form in (secret, quote(secret, safe=""), json.dumps(secret)[1:-1])
        }
        self._secrets = sorted(found, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Return `text` with each secret, and each password of an address, hidden."""
        return _LOGIN.sub(rf"\1:{HIDDEN}@", redacted(text, self._secrets))
