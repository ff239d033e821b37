"""Settings of a machine in `~/.ssh/config`: address, keys and jump hosts.

OpenSSH itself reads the file (`ssh -G`), so that `Host`, `Match`, `Include` and tokens have their meaning in `ssh`.
"""

from __future__ import annotations

import getpass
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from farm.base.config.devices import SSH_PORT, SshLogin, is_ssh_host, is_ssh_user
from farm.base.errors import InfraError, MissingToolError
from farm.base.files import weakness
from farm.base.processes import ask_program
from farm.base.text import clean_text
from farm.devices.device import SshAddress

NONE = "none"
"""In the place of a file: no file is read."""

# `Match exec` runs commands of the user.
_SECONDS = 15.0
_MOST_JUMPS = 8
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:]+)(?::(?P<port>\d{1,5}))?")
_TOKEN = re.compile(r"%(.)")


def ssh_address(login: SshLogin, storage: str = "") -> SshAddress:
    """Return the address of farm.toml's `login` after the user's configuration of ssh; values of farm.toml win.

    Raises InfraError for unsupported settings, MissingToolError for a configuration without an ssh program to read it.
    """
    plain = SshAddress(
        login.host, login.user or getpass.getuser(), login.port or SSH_PORT, login.key_file, login.known_hosts, storage
    )
    file = _file(login)
    if file is None:
        return plain
    found = _resolve(file, login.host, login.user, login.port, ())
    return msgspec.structs.replace(found, key_file=login.key_file, known_hosts=login.known_hosts, storage=storage)


def _file(login: SshLogin) -> Path | None:
    if login.config:
        return None if login.config == NONE else Path(login.config)
    file = Path.home() / ".ssh/config"
    if not file.is_file():
        return None
    if problem := weakness(file):
        # The file may name commands and files of trusted host keys.
        remedy = f"let only yourself write it ('chmod go-w {file}'), or set ssh_config = 'none'"
        raise InfraError(f"{file} is not used, as another user could have written it: {problem}: {remedy}")
    return file


def _resolve(file: Path, name: str, user: str, port: int, on_the_way: Sequence[str]) -> SshAddress:
    """Return the address of `name`, as the command line of ssh has it, with those on the way to it."""
    if name in on_the_way or len(on_the_way) > _MOST_JUMPS:
        raise InfraError(f"{file}: ProxyJump leads in a circle: {' -> '.join((*on_the_way, name))}")
    facts = _ask_ssh(file, name, user, port)
    host, account = facts["hostname"][0], facts["user"][0]
    if not (is_ssh_host(host) and is_ssh_user(account)):
        raise InfraError(f"{file}: HostName or User of {name} cannot be: {clean_text(f'{account}@{host}', 200)!r}")
    jump, command = ((facts.get(key) or [NONE])[0] for key in ("proxyjump", "proxycommand"))
    if jump == NONE and command != NONE:
        raise InfraError(f"{file}: {name} is reached by ProxyCommand, which farm does not run: use ProxyJump")
    jumps: tuple[SshAddress, ...] = ()
    for number, one in enumerate(jump.split(",") if jump != NONE else ()):
        hop = _jump(file, one.strip(), (*on_the_way, name))
        # As with ssh, what leads to the first of them counts, and the others are reached through those before.
        jumps += (*(hop.jumps if number == 0 else ()), msgspec.structs.replace(hop, jumps=()))
    tokens = {"%": "%", "d": str(Path.home()), "h": host, "n": name, "r": account, "u": getpass.getuser(),
              "p": facts["port"][0]}  # fmt: skip
    return SshAddress(
        host,
        account,
        int(facts["port"][0]),
        alias=name,
        host_key_alias=(facts.get("hostkeyalias") or [""])[0],
        identity_files=tuple(_path(file, one, tokens) for one in facts.get("identityfile", ())),
        known_hosts_files=tuple(
            _path(file, one, tokens)
            for key in ("userknownhostsfile", "globalknownhostsfile")
            for line in facts.get(key, ())
            for one in line.split()
            if one != NONE
        ),
        jumps=jumps,
    )


def _jump(file: Path, text: str, on_the_way: Sequence[str]) -> SshAddress:
    """Return the address of one machine of a ProxyJump, `[user@]host[:port]`."""
    match = _JUMP.fullmatch(text)
    host, user = (match["host"].strip("[]"), match["user"] or "") if match else ("", "")
    if match is None or not is_ssh_host(host) or (user and not is_ssh_user(user)):
        raise InfraError(f"{file}: ProxyJump {clean_text(text, 200)!r}: expected [user@]host[:port]")
    return _resolve(file, host, user, int(match["port"] or 0), on_the_way)


def _ask_ssh(file: Path, name: str, user: str, port: int) -> dict[str, list[str]]:
    """Return what ssh would do: each option, in lower case, with its values."""
    argv = ["ssh", "-G", "-T", "-F", str(file), *(["-l", user] if user else []), *(["-p", str(port)] if port else [])]
    try:
        answer = ask_program([*argv, "--", name], _SECONDS)
    except FileNotFoundError:
        raise MissingToolError(
            f"{file} is there, and no ssh to read it: install openssh-client, or set ssh_config = 'none'"
        ) from None
    except subprocess.TimeoutExpired:
        raise InfraError(f"{file}: ssh did not read it in {_SECONDS:g} s: what does 'Match exec' run?") from None
    if answer.code:
        raise InfraError(f"{file}: ssh does not take it: {clean_text(answer.errors, 400)}")
    facts = defaultdict(list)
    for line in answer.output.splitlines():
        key, _, value = line.partition(" ")
        facts[key].append(value)
    return dict(facts)


def _path(file: Path, text: str, tokens: dict[str, str]) -> str:
    """Return the path of a key or of known hosts, with `~` and tokens replaced."""

    def token(match: re.Match[str]) -> str:
        if match[1] not in tokens:
            raise InfraError(f"{file}: {clean_text(text, 200)!r}: farm does not know {match[0]}")
        return tokens[match[1]]

    try:
        return str(Path(_TOKEN.sub(token, text.strip('"'))).expanduser())
    except RuntimeError as error:  # a home of an unknown user
        raise InfraError(f"{file}: {clean_text(text, 200)!r}: {error}") from None
