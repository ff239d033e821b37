"""Tables of farm.toml for a shared farm: its store and files, settings of this host's agent, and `farm serve`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from farm.base.config.devices import SshLogin, is_ssh_host, is_ssh_user
from farm.base.errors import ConfigError, UnknownNameError, UsageError
from farm.base.forms import DAY_S, NAME, in_seconds
from farm.base.paths import beside

# Tables of farm.toml for a shared farm: place of its files, and settings of this host's agent.


if TYPE_CHECKING:
    from collections.abc import Callable

    BesideFile = Callable[[str], Path | None]

EXPECTED = "'file:///FOLDER', 'sftp://user@host/FOLDER' or 's3://BUCKET/PREFIX'"

_OPTIONS = {
    "file": (),
    "sftp": ("key_file", "known_hosts", "ssh_config"),
    "s3": ("endpoint_url", "region", "profile"),
}
_NONE = "none"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")
# Amazon S3, "General purpose bucket naming rules"; MinIO and others take the same.
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[\w./=-]*")
_ENDPOINT = re.compile(r"https?://[\w.-]+(:\d{1,5})?/?|https?://\[[0-9A-Fa-f:.]+\](:\d{1,5})?/?")


class NightlyTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entry of `[agent] nights` as written."""

    file: str
    """Path of the nightly.toml."""
    at: str
    """Time of day, `HH:MM`."""
    timezone: str = "UTC"
    """IANA name of the time zone."""
    days: tuple[str, ...] = ()
    """Days of the week, `mon` to `sun`; default: every day."""
    late: str = "1h"
    """Longest delay after which the nightly run still begins."""


class AgentTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[agent]`, as it is written."""

    name: str = ""
    """Name of the host in the farm; default: the host's own name."""
    build: bool = False
    """True if the host compiles for others, with the toolchains of this file."""
    nights: tuple[NightlyTable, ...] = ()
    """Nightly runs that the agent starts."""


class NightlyConfig(msgspec.Struct, frozen=True):
    """Nightly run that the agent of this host starts, unless another has started it."""

    file: Path
    """Absolute path of its nightly.toml."""
    hour: int
    minute: int
    timezone: str
    """Time zone of both times, an IANA name, equal on every host with this nightly run."""
    days: tuple[int, ...]
    """On which it starts, 0 is Monday."""
    late_s: float
    """So much later it may still begin: a host that comes back after that leaves it out."""


class AgentConfig(msgspec.Struct, frozen=True):
    """Settings of `farm lab agent` on this host; its options override them."""

    name: str = ""
    """Name of the host in the farm; empty for its own name."""
    build: bool = False
    """True if it compiles for others, with the toolchains of this file."""
    nights: tuple[NightlyConfig, ...] = ()


class ArtifactsAddress(msgspec.Struct, frozen=True):
    """Place of the files of a shared farm, without secrets: these come from the environment or its files."""

    scheme: Literal["file", "sftp", "s3"]
    path: str
    """An absolute folder; of `s3` the bucket, and a prefix after a `/`."""
    login: SshLogin | None = None
    """Login of `sftp`."""
    endpoint_url: str = ""
    """Server of `s3`; empty for Amazon's."""
    region: str = ""
    profile: str = ""
    """Profile in ~/.aws or $AWS_SHARED_CREDENTIALS_FILE; empty for $AWS_PROFILE."""

    def __str__(self) -> str:
        """Return it for people."""
        if self.login is None:
            return f"{self.scheme}://{self.path}"
        user = f"{self.login.user}@" if self.login.user else ""
        port = f":{self.login.port}" if self.login.port else ""
        return f"sftp://{user}{self.login.host}{port}{self.path}"


def read_agent(file: Path | str, table: AgentTable, beside: BesideFile) -> AgentConfig:
    """Return the [agent] table with files resolved by `beside`. Raises ConfigError for invalid values."""
    if table.name and not NAME.fullmatch(table.name):
        problem = f"{table.name!r}: expected letters, digits, '.', '_', '-', at most 64"
        raise ConfigError(file, "agent.name", problem)
    nights = tuple(_nightly(file, f"agent.nights[{n}]", one, beside) for n, one in enumerate(table.nights))
    return AgentConfig(table.name, table.build, nights)


def _nightly(file: Path | str, key: str, table: NightlyTable, beside: BesideFile) -> NightlyConfig:
    path = beside(table.file)
    at = _CLOCK.fullmatch(table.at)
    late_s = in_seconds(table.late, DAY_S)
    unknown = [day for day in table.days if day not in DAYS]
    if path is None:
        raise ConfigError(file, f"{key}.file", "is empty, expected the path of a nightly.toml")
    if at is None:
        raise ConfigError(file, f"{key}.at", f"is {table.at!r}, expected a time of the day such as '22:00'")
    if late_s is None:
        raise ConfigError(file, f"{key}.late", f"is {table.late!r}, expected a time of at most a day, such as '1h'")
    if unknown:
        raise ConfigError(file, f"{key}.days", str(UnknownNameError("day", unknown[0], DAYS, shown=DAYS)))
    import zoneinfo

    try:
        zoneinfo.ZoneInfo(table.timezone)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError):
        problem = f"is {table.timezone!r}, expected a name such as 'UTC' or 'Europe/Berlin'"
        raise ConfigError(file, f"{key}.timezone", problem) from None
    days = tuple(sorted({DAYS.index(day) for day in table.days or DAYS}))
    return NightlyConfig(path, int(at[1]), int(at[2]), table.timezone, days, late_s)


def read_artifacts(text: str, beside: BesideFile) -> ArtifactsAddress:
    """Return the address in `text`, with relative paths resolved by `beside`.

    Raises UsageError with the problem, and quotes no part that may be a secret.
    """
    try:
        parts = urlsplit(text)
        port = parts.port or 0
    except ValueError:
        raise UsageError(f"is no address: expected {EXPECTED}") from None
    if parts.scheme not in _OPTIONS or not text.startswith(f"{parts.scheme}://") or parts.fragment:
        raise UsageError(f"is no place that farm keeps files in: expected {EXPECTED}")
    if parts.password is not None or (parts.scheme != "sftp" and "@" in parts.netloc):
        how = "use a key" if parts.scheme == "sftp" else "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws"
        raise UsageError(f"holds a password, which no file may hold: {how} (docs/reference/configuration.md)")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS[parts.scheme]:
            raise UsageError(str(UnknownNameError(f"option of {parts.scheme}://", name, _OPTIONS[parts.scheme])))
    path = unquote(parts.path)
    if parts.scheme == "s3":
        return _s3(parts.netloc, path, options)
    folder = path.rstrip("/")
    if not folder.startswith("/") or "\0" in folder or ".." in folder.split("/"):
        raise UsageError(f"expected a folder after the host, absolute and without '..': {EXPECTED}")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise UsageError("file:// is a folder of this machine: expected three slashes, 'file:///FOLDER'")
        return ArtifactsAddress("file", folder)
    return ArtifactsAddress("sftp", folder, _login(parts.username, parts.hostname, port, options, beside))


def _s3(bucket: str, path: str, options: dict[str, str]) -> ArtifactsAddress:
    prefix = path.strip("/")
    if not _BUCKET.fullmatch(bucket) or not _PREFIX.fullmatch(prefix) or ".." in prefix.split("/"):
        raise UsageError("expected a bucket, and a prefix of letters, digits and '_ . - = /': s3://BUCKET/PREFIX")
    endpoint = options.get("endpoint_url", "")
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        raise UsageError("endpoint_url: expected 'https://HOST:PORT', without login and path")
    place = f"{bucket}/{prefix}".rstrip("/")
    region, profile = options.get("region", ""), options.get("profile", "")
    return ArtifactsAddress("s3", place, endpoint_url=endpoint, region=region, profile=profile)


def _login(user: str | None, host: str | None, port: int, options: dict[str, str], beside: BesideFile) -> SshLogin:
    if not host or not is_ssh_host(host) or (user is not None and not is_ssh_user(user)):
        raise UsageError("expected user@host or user@host:port after sftp://")
    files = {name: options.get(name, "") for name in _OPTIONS["sftp"]}
    found = {name: value if value == _NONE else str(beside(value) or "") for name, value in files.items()}
    return SshLogin(user or "", host, port, found["key_file"], found["known_hosts"], found["ssh_config"])


# The address of a store on PostgreSQL: what of it is a secret, which files it names, how the server is checked.


_SECRETS = ("password", "sslpassword")
_FILES = ("sslrootcert", "sslcert", "sslkey", "sslcrl", "passfile")
# libpq's, "SSL Mode Descriptions".
_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_CHECKING = ("require", "verify-ca", "verify-full")
_SYSTEM = "system"
"""In the place of a file: the authorities that this machine trusts."""


def with_files_beside(base: Path, url: str) -> str:
    """Return the address with the paths of its certificates and password file made absolute, relative to `base`."""
    return _with_query(
        url, lambda key, value: str(beside(base, value)) if key in _FILES and value not in ("", _SYSTEM) else value
    )


def shown_address(url: str) -> str:
    """Return the address without its passwords."""
    if url.startswith("sqlite"):
        return url
    if _is_ambiguous(url):
        # The end of the password is ambiguous.
        return f"{url.partition('://')[0]}://***"
    head, login, place = _login_in(url)
    user, colon, _ = login.partition(":")
    shown = f"{head}{user}{colon and ':***'}{place}"
    return _with_query(shown, lambda key, value: "***" if key in _SECRETS else value)


def secrets_of(url: str) -> tuple[str, ...]:
    """Return the passwords in the address."""
    own = unquote(_login_in(url)[1].partition(":")[2])
    return tuple(filter(None, (own, *(value for key, value in _query(url) if key in _SECRETS))))


def require_one_login(url: str) -> None:
    """Raise UsageError without a quote for an address whose password has no clear end."""
    if _is_ambiguous(url):
        raise UsageError(
            "store: the address has an @, or a / or # before it, that is part of the user or password: write %40 for "
            "@, %2F for / and %23 for # there"
        )


def require_tls_files(url: str) -> None:
    """Raise UsageError for a named certificate that is missing or would not be used, and for no `sslmode`."""
    query = dict(_query(url))
    for key in _FILES:
        name = query.get(key, "")
        if name and not (key == "sslrootcert" and name == _SYSTEM) and not Path(name).is_file():
            raise UsageError(f"store: {key}: there is no file {name}")
    mode = query.get("sslmode") or os.environ.get("PGSSLMODE") or "prefer"
    if mode not in _MODES:
        raise UsageError(f"store: {UnknownNameError('sslmode', mode, _MODES)}")
    if query.get("sslrootcert") and mode not in _CHECKING:
        problem = f"sslmode={mode} goes on without it"
        raise UsageError(f"store: sslrootcert is to check the server, and {problem}: add sslmode=verify-full")


def _is_ambiguous(url: str) -> bool:
    login, at, place = url.partition("://")[2].partition("?")[0].partition("@")
    return bool(at) and not url.startswith("sqlite") and ("@" in place or "/" in login or "#" in login)


def _login_in(url: str) -> tuple[str, str, str]:
    """Return the address up to its login, the login, and the rest, which begins with `@` after a login."""
    scheme, mark, rest = url.partition("://")
    end = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
    login, at, host = rest[:end].rpartition("@")
    return scheme + mark, login, at + host + rest[end:]


def _query(url: str) -> list[tuple[str, str]]:
    return parse_qsl(url.partition("?")[2], keep_blank_values=True)


def _with_query(url: str, change: Callable[[str, str], str]) -> str:
    head, mark, query = url.partition("?")
    if not query:
        return url
    changed = [(key, change(key, value)) for key, value in _query(url)]
    return head + mark + urlencode(changed, quote_via=quote, safe="/*:,")


# Address and sign-in of `farm serve`: the table [serve] of farm.toml.


RoleName = Literal["viewer", "developer", "operator"]


class OpenIdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sign-in by an OpenID Connect provider: `[serve.openid]`."""

    issuer: str
    """Address of the provider, below which it has `.well-known/openid-configuration`."""
    client_id: str
    """Id of this server at the provider; its redirect address is `URL/login/openid/callback`."""
    client_secret_env: str
    """Environment variable with the secret of this server at the provider."""
    name_claim: str = "preferred_username"
    """Claim with the name of a user."""
    roles_claim: str = "groups"
    """Claim with a list of groups."""
    roles: dict[str, RoleName] = {}
    """Role of the members of a group; the highest counts."""
    default_role: RoleName | None = None
    """Role of users without such a group; without it they are refused."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address and sign-in of the server."""

    url: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^\s/?#]+)?$")] = ""
    """Address for users, as `https://farm.lab`, if a reverse proxy has another than `farm serve`."""
    openid: OpenIdConfig | None = None
