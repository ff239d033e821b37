"""Archive of `farm doctor --bundle`: versions, configuration without secrets, and recent logs."""

from __future__ import annotations

import configparser
import io
import json
import os
import platform
import re
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import msgspec

from farm import __version__
from farm.base.config.store_address import secrets_of, shown_address
from farm.base.errors import FarmError, UsageError
from farm.base.logs import end_of_log
from farm.base.text import HIDDEN, json_document, redacted, visible
from farm.dispatch.notify.credentials import hide_secrets, read_secret

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from farm.base.config.settings import Config
    from farm.builds.runtime.doctor import Tool

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
        "configuration.json": json_document(hide.value(shown_config(config))),
        **{f"logs/{name}": visible(hide.text(text)).encode() for name, text in _recent_logs(config.state_dir)},
    }
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in files.items():
            file.writestr(name, data)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UsageError(f"{path} is there already: name another file") from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(archive.getvalue())
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
    return json_document(hide.value(answer))


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

    def value(self, value: Any) -> Any:
        """Return a value of JSON with the secrets in its texts hidden."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(one) for one in value]
        if isinstance(value, dict):
            return {key: self.value(one) for key, one in value.items()}
        return value
