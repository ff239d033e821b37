"""farm.toml + environment + flags -> one frozen object."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from farm.base.config.devices import (
    DeviceConfig,
    DeviceTable,
    DeviceTables,
    HealthConfig,
    HostConfig,
    HostTable,
    LeaseConfig,
    SocTable,
)
from farm.base.config.runs import FailuresConfig, NotifyConfig, RetentionConfig, age_ms, read_notify
from farm.base.config.shared import (
    EXPECTED,
    AgentConfig,
    AgentTable,
    ArtifactsAddress,
    ServeConfig,
    read_agent,
    read_artifacts,
    with_files_beside,
)
from farm.base.config.toolchains import ToolchainConfig, read_toolchains
from farm.base.errors import ConfigError, UsageError
from farm.base.files import weakness
from farm.base.forms import is_run_id
from farm.base.machine import usable_bytes
from farm.base.paths import beside
from farm.base.socs import set_like
from farm.base.toml_tables import read_table

QNN_PATHS = {
    "sdk_root": "QNN_SDK_ROOT",
    "android_qnn": "FARM_ANDROID_QNN",
    "android_runner": "",
    "android_backend_library": "",
    "android_ndk_root": "ANDROID_NDK_ROOT",
    "android_executorch": "FARM_ANDROID_EXECUTORCH",
    "executorch_build": "FARM_EXECUTORCH_BUILD",
    "executorch_linux_build": "FARM_EXECUTORCH_LINUX_BUILD",
    "executorch_direct_build": "FARM_EXECUTORCH_DIRECT_BUILD",
    "hexagon_sdk_root": "HEXAGON_SDK_ROOT",
    "hexagon_tools_root": "HEXAGON_TOOLS_ROOT",
}
"""Paths of the [qnn] table, and the variable that overrides each; empty where there is none."""

VARIABLES = {
    "FARM_CONFIG": "configuration file, in place of the nearest farm.toml",
    "FARM_STORE": "`store` of farm.toml, or the path of an SQLite file",
    "FARM_ARTIFACTS": "`artifacts` of farm.toml",
    "FARM_CACHE_DIR": "`paths.cache` of farm.toml",
    "FARM_STATE_DIR": "`paths.state` of farm.toml",
    "FARM_SERVER": "address of a `farm serve`, which everyday commands ask in place of the store",
    "FARM_TOKEN": "token of your account there",
    "FARM_USER": "user of the command, as `farm serve` starts it; PostgreSQL accepts others from server and owner",
    "FARM_VENV": "environment that `farmw` makes, in place of `.venv`",
    "FARM_EXTRAS": "extras that `farmw` installs as well, such as `cluster`",
    "FARM_LOG": "levels of log lines: `LEVEL` and `farm.MODULE=LEVEL`, separated by commas",
}
"""Variables of farm that are not in `QNN_PATHS`, and their meaning."""

# As near as a slip of the finger, and not as another program's variable could be.
_NEAR = 0.85


def require_known_variables() -> None:
    """Raise UsageError for a variable whose name resembles a variable of farm, instead of ignoring it."""
    known = [*VARIABLES, *(name for name in QNN_PATHS.values() if name.startswith("FARM_"))]
    for name in os.environ:
        if not name.startswith("FARM_") or name.startswith(tuple(known)):
            continue
        import difflib

        if near := difflib.get_close_matches(name, known, n=1, cutoff=_NEAR):
            raise UsageError(f"{name} is no variable of farm: did you mean {near[0]}? Set that one, and unset {name}")


def require_folder(path: Path, named: str) -> None:
    """Raise UsageError for a folder, configured as `named`, that is a file or lies below one."""
    there = next((place for place in (path, *path.parents) if place.exists()), path)
    if not there.is_dir():
        raise UsageError(f"{named}: {there} is no folder: name another place")


FILE_NAME = "farm.toml"
OWN_COMMAND = (sys.executable, "-P", "-m", "farm.cli.main")
"""First words of a command of farm that farm starts. -P: modules of the current folder would come before farm's."""

# A week.
_MOST_BUILD_SECONDS = 604_800
_MEGABYTE = 2**20
# A builder that has loaded torch has half of it, and needs the rest to compile anything.
_LEAST_BUILDER_MB = 1024
# A builder grows by about a megabyte per job: above this size a new process costs less than the memory.
_MOST_RECYCLE_MB = 4096
_STORE = re.compile(r"sqlite:///[^\0]+|postgres(ql)?(\+\w+)?://\S+")

__all__ = ["Config", "DeviceConfig", "HealthConfig", "HostConfig", "LeaseConfig", "load_config"]


class _PathsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cache: str | None = None
    """Folder of bundles and native builds; safe to delete at any time."""
    state: str | None = None
    """Folder of store, reports and logs; keep it."""


class _BuildTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    builders: int | None = None
    """Compiler processes at once; default: one for each usable core."""
    timeout_s: float = 1800.0
    """Longest time to compile one job, at least 1."""
    memory_mb: int | None = None
    """Memory limit of a compiler process in MiB, at least 1024; default: half of the machine, 80 % with one builder."""
    recycle_mb: int | None = None
    """Memory in MiB beyond which a compiler process is replaced before its next job, at least 1024."""
    trace: bool | None = None
    """True to record the sources that take part in a bundle; default: for source trees and edited wheels."""


MAVEN_URL = "https://repo1.maven.org/maven2"
"""Maven's central repository."""

_QnnFields: Any = msgspec.defstruct(
    "_QnnFields", [(name, str | None, None) for name in QNN_PATHS], frozen=True, forbid_unknown_fields=True
)


class _QnnTable(_QnnFields):  # type: ignore[misc]
    maven_url: str = MAVEN_URL
    archive_url: str = ""


class _Tables(msgspec.Struct, frozen=True, kw_only=True):
    """Tables of farm.toml that are used as they are written."""

    health: HealthConfig = HealthConfig()
    leases: LeaseConfig = LeaseConfig()
    retention: RetentionConfig = RetentionConfig()
    failures: FailuresConfig = FailuresConfig()
    notify: NotifyConfig = NotifyConfig()
    serve: ServeConfig = ServeConfig()


class _FarmToml(_Tables, frozen=True, forbid_unknown_fields=True):
    suites: tuple[str, ...] = ()
    """Folders that are suites or hold suites."""
    store: str | None = None
    """Address of the store: `sqlite:///FILE` or `postgresql://user@host/database`."""
    artifacts: str | None = None
    """Place for the files of a shared farm: `file:///FOLDER`, `sftp://user@host/FOLDER` or `s3://BUCKET/PREFIX`."""
    agent: AgentTable | None = None
    paths: _PathsTable = _PathsTable()
    build: _BuildTable = _BuildTable()
    qnn: _QnnTable = _QnnTable()
    host: tuple[HostTable, ...] = ()
    device: tuple[DeviceTable, ...] = ()
    soc: dict[str, SocTable] = {}
    toolchain: dict[str, Any] = {}


class Config(_Tables, frozen=True):
    """Configuration of a command. Every path is absolute."""

    cache_dir: Path
    """Bundles and native builds: may be thrown away at any time."""
    state_dir: Path
    """The store, the runs and their artifacts: keep it."""
    suite_folders: tuple[Path, ...]
    store_url: str
    builders: int
    """Builder processes at once."""
    build_timeout_s: float
    """Longest that one job may take to compile."""
    build_memory_mb: int
    """Resident memory, in MiB, beyond which a builder is ended and its job fails."""
    build_recycle_mb: int
    """Resident memory, in MiB, beyond which a builder is replaced before the next job."""
    sdk_root: Path | None
    """QNN SDK; default: the libraries from PyPI."""
    android_qnn: Path | None
    """QNN SDK or runtime for Android devices; default: `sdk_root`."""
    android_runner: Path | None
    """Runner built for Android."""
    android_backend_library: Path | None
    """ExecuTorch's QNN backend library for that runner."""
    android_ndk_root: Path | None
    """Android NDK that builds the runner."""
    android_executorch: Path | None
    """Install prefix of ExecuTorch for Android, to build the runner against."""
    executorch_build: Path | None
    """Build folder of ExecuTorch for Android (`build-android` of its script); it may be the prefix as well."""
    executorch_linux_build: Path | None
    """Build folder of ExecuTorch for Arm Linux."""
    executorch_direct_build: Path | None
    """Build folder of ExecuTorch for the Hexagon, for direct mode."""
    hexagon_sdk_root: Path | None
    """Hexagon SDK, whose elfsigner signs skels."""
    hexagon_tools_root: Path | None
    """Hexagon tools, whose C++ runtime direct mode needs; usually a folder inside that SDK."""
    file: Path | None
    """The farm.toml that was read."""
    maven_url: str = MAVEN_URL
    """Maven repository with QNN for Android."""
    archive_url: str = ""
    """Address of Qualcomm's archive, `{version}` for the version; default: the address of ExecuTorch's downloader."""
    hosts: tuple[HostConfig, ...] = ()
    """Other machines with devices."""
    devices: tuple[DeviceConfig, ...] = ()
    """Devices that are named, or that discovery does not find."""
    toolchains: dict[str, ToolchainConfig] = {}
    """Toolchains of farm.toml by name."""
    toolchain: ToolchainConfig = ToolchainConfig()
    """Toolchain of this command: farm/builds/toolchains/selection.py."""
    trace: bool | None = None
    """True if builders record the files of ExecuTorch and torchao in a bundle; None: only for edited ones."""
    artifacts: ArtifactsAddress | None = None
    """Place of the files of a shared farm; None for a farm of one machine."""
    agent: AgentConfig = AgentConfig()

    @property
    def is_shared(self) -> bool:
        """True for a shared farm: runs are submitted, and agents execute them."""
        return self.artifacts is not None and self.store_url.startswith("postgres")

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a command of farm that this process starts: it reads the same farm.toml, and asks no server.

        Servers and agents start commands, which need the store itself.
        """
        kept = {name: value for name, value in os.environ.items() if name not in ("FARM_SERVER", "FARM_TOKEN")}
        return {**kept, "FARM_CONFIG": str(self.file)} if self.file else kept

    def require_there(self, *keys: str) -> None:
        """Raise UsageError for a configured path of these keys of the [qnn] table that does not exist."""
        for key in keys:
            path, variable = getattr(self, key), QNN_PATHS[key]
            if path is not None and not path.exists():
                value = os.environ.get(variable)
                table = f"toolchain {self.toolchain.name}" if self.toolchain.native else f"{self.file}: qnn.{key}"
                named = f"{variable}={value}" if value else table
                raise UsageError(f"{named}: there is no {path}: correct it, or leave it out")

    @property
    def uploads_folder(self) -> Path:
        """Folder of the suites that users have uploaded to `farm serve`; none of their code is executed here."""
        return self.state_dir / "serve" / "suites"

    def run_folder(self, run_id: str) -> Path:
        """Return the folder of a run's plan, logs and report.

        Ids come from a store that other users may write: raises UsageError for an invalid id.
        """
        if not is_run_id(run_id):
            raise UsageError(f"{run_id[:80]!r} is not the id of a run: another program wrote it to the store")
        return self.state_dir / "runs" / run_id


HEARERS: list[Callable[[Config], None]] = []
"""Callbacks for every loaded configuration."""


def load_config(file: Path | None = None, *, folder: Path | None = None) -> Config:
    """Return the configuration.

    `file`, else $FARM_CONFIG, else the first farm.toml from `folder` (the current one) upwards that no other user could
    have written (`farm.base.files`); others are named on standard error and ignored. $FARM_CACHE_DIR,
    $FARM_STATE_DIR, $FARM_STORE, $FARM_ARTIFACTS, $QNN_SDK_ROOT, $ANDROID_NDK_ROOT, $FARM_ANDROID_QNN,
    $FARM_ANDROID_EXECUTORCH, $FARM_EXECUTORCH_BUILD, $FARM_EXECUTORCH_LINUX_BUILD, $FARM_EXECUTORCH_DIRECT_BUILD,
    $HEXAGON_SDK_ROOT and $HEXAGON_TOOLS_ROOT override it.
    Raises ConfigError, naming file and key, and UsageError, naming the variable.
    """
    require_known_variables()
    path = file or _from_environment("FARM_CONFIG") or _nearest(folder or Path.cwd())
    table = _read(path) if path else _FarmToml()
    base = path.parent.resolve() if path else Path.cwd()
    builders = table.build.builders if table.build.builders is not None else _usable_cores()
    if builders < 1:
        raise ConfigError(path or FILE_NAME, "build.builders", f"is {builders}, expected at least 1")
    if not 1 <= table.build.timeout_s <= _MOST_BUILD_SECONDS:
        problem = f"is {table.build.timeout_s:g}, expected 1 to {_MOST_BUILD_SECONDS} seconds"
        raise ConfigError(path or FILE_NAME, "build.timeout_s", problem)
    memory_mb, recycle_mb = _builder_memory(path or FILE_NAME, table.build, builders)
    if table.store is not None and not _STORE.fullmatch(table.store):
        # Not shown: it may hold a password.
        problem = "is no address of a store: expected 'sqlite:///FILE' or 'postgresql://user@host/database'"
        raise ConfigError(path or FILE_NAME, "store", problem)
    attached = DeviceTables(path or Path(FILE_NAME), lambda value: _beside(base, value))
    set_like(attached.socs(table.soc))
    qnn_paths: dict[str, Any] = {
        name: (_from_environment(variable) if variable else None) or _beside(base, getattr(table.qnn, name))
        for name, variable in QNN_PATHS.items()
    }
    cache_dir = _from_environment("FARM_CACHE_DIR") or _beside(base, table.paths.cache)
    state_dir = _from_environment("FARM_STATE_DIR") or _beside(base, table.paths.state)
    if cache_dir is None or state_dir is None:
        import platformdirs

        cache_dir = cache_dir or platformdirs.user_cache_path("farm")
        state_dir = state_dir or platformdirs.user_state_path("farm")
    cache_dir, state_dir = cache_dir.absolute(), state_dir.absolute()
    for place, variable, key in ((cache_dir, "FARM_CACHE_DIR", "cache"), (state_dir, "FARM_STATE_DIR", "state")):
        require_folder(place, variable if os.environ.get(variable) else f"{path or FILE_NAME}: paths.{key}")
    store_url = _store_of_environment() or _store_url(base, table.store) or f"sqlite:///{state_dir / 'farm.db'}"
    config = Config(
        cache_dir=cache_dir,
        state_dir=state_dir,
        suite_folders=tuple(path for name in table.suites if (path := _beside(base, name)) is not None),
        store_url=store_url,
        builders=builders,
        build_timeout_s=table.build.timeout_s,
        build_memory_mb=memory_mb,
        build_recycle_mb=recycle_mb,
        **qnn_paths,
        file=path,
        maven_url=table.qnn.maven_url,
        archive_url=table.qnn.archive_url,
        hosts=attached.hosts(table.host),
        devices=attached.devices(table.device),
        health=attached.health(table.health),
        leases=attached.leases(table.leases),
        retention=_retention(path or FILE_NAME, table.retention),
        failures=_failures(path or FILE_NAME, table.failures),
        notify=read_notify(path or Path(FILE_NAME), table.notify, lambda value: _beside(base, value)),
        serve=table.serve,
        toolchains=read_toolchains(path or Path(FILE_NAME), table.toolchain, lambda value: _beside(base, value)),
        trace=table.build.trace,
        artifacts=_artifacts(path or Path(FILE_NAME), base, table, store_url),
        agent=read_agent(path or FILE_NAME, table.agent or AgentTable(), lambda value: _beside(base, value)),
    )
    for hear in HEARERS:
        hear(config)
    return config


def _artifacts(file: Path, base: Path, table: _FarmToml, store_url: str) -> ArtifactsAddress | None:
    """Return the place of the files of a shared farm, None for a farm of one machine.

    $FARM_STORE with a file of SQLite makes a farm of one machine despite farm.toml: a user works alone.
    """
    variable = os.environ.get("FARM_ARTIFACTS", "")
    on_postgresql = store_url.startswith("postgres")
    needs = "files that several hosts share need a store that they share: set store = 'postgresql://user@host/database'"
    if variable:
        try:
            found = read_artifacts(variable, lambda value: _beside(Path.cwd(), value))
        except UsageError as error:
            raise UsageError(f"FARM_ARTIFACTS {error}") from None
        if not on_postgresql:
            raise UsageError(f"FARM_ARTIFACTS is set, and the store is SQLite: {needs}, or unset FARM_ARTIFACTS")
        return found
    if table.artifacts is not None:
        try:
            found = read_artifacts(table.artifacts, lambda value: _beside(base, value))
        except UsageError as error:
            raise ConfigError(file, "artifacts", str(error)) from None
        if not on_postgresql and not os.environ.get("FARM_STORE"):
            raise ConfigError(file, "artifacts", f"the store is SQLite, and {needs}, or leave artifacts out")
        return found if on_postgresql else None
    if table.agent is not None and not os.environ.get("FARM_STORE"):
        problem = f"an agent is for a farm that several hosts share: set store and artifacts ({EXPECTED}) as well"
        raise ConfigError(file, "agent", problem)
    return None


def _retention(file: Path | str, table: RetentionConfig) -> RetentionConfig:
    for key, age in (("keep", table.keep), ("keep_nightly", table.keep_nightly)):
        if age is not None and age_ms(age) is None:
            raise ConfigError(file, f"retention.{key}", f"is {age!r}, expected an age such as '90d', '12w' or '36h'")
    for key, count in (("keep_runs", table.keep_runs), ("keep_results", table.keep_results)):
        if count is not None and count < 1:
            raise ConfigError(file, f"retention.{key}", f"is {count}, expected at least 1")
    return table


def _failures(file: Path | str, table: FailuresConfig) -> FailuresConfig:
    for key in table.__struct_fields__:
        if (value := getattr(table, key)) < 0:
            raise ConfigError(file, f"failures.{key}", f"is {value}, expected at least 0")
    return table


def _usable_cores() -> int:
    # A container or taskset may allow fewer processors than the machine has.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _builder_memory(file: Path | str, table: _BuildTable, builders: int) -> tuple[int, int]:
    """Return the most memory of a builder, and the size from which it is replaced, in MiB."""
    usable_mb = usable_bytes() // _MEGABYTE
    # Large models are rare, so that one may have half of the machine.
    most = table.memory_mb if table.memory_mb is not None else usable_mb * (8 if builders == 1 else 5) // 10
    share = usable_mb // (2 * builders)
    recycle = table.recycle_mb if table.recycle_mb is not None else min(max(share, _LEAST_BUILDER_MB), _MOST_RECYCLE_MB)
    for key, value in (("memory_mb", table.memory_mb), ("recycle_mb", table.recycle_mb)):
        if value is not None and value < _LEAST_BUILDER_MB:
            problem = f"is {value}, expected at least {_LEAST_BUILDER_MB} MB: torch alone takes half of that"
            raise ConfigError(file, f"build.{key}", problem)
    return max(most, _LEAST_BUILDER_MB), recycle


def _store_url(base: Path, value: str | None) -> str | None:
    """Return the URL with the paths in it made absolute, relative to the file that names it."""
    prefix = "sqlite:///"
    if value is None or not value.startswith(prefix):
        return value and with_files_beside(base, value)
    return f"{prefix}{base / value.removeprefix(prefix)}"


def _store_of_environment() -> str:
    """Return $FARM_STORE: an address, or the path of a file. Raises UsageError for another value."""
    value = os.environ.get("FARM_STORE", "")
    is_path = "://" not in value and ("/" in value or bool(Path(value).suffix))
    if value and not is_path and not _STORE.fullmatch(value):
        # Not shown: it may hold a password.
        expected = "a path such as ./farm.db, 'sqlite:///FILE' or 'postgresql://user@host/database'"
        raise UsageError(f"FARM_STORE is no address of a store: expected {expected}")
    return with_files_beside(Path.cwd(), value) if value.startswith("postgres") else value


def _from_environment(name: str) -> Path | None:
    value = os.environ.get(name)
    return _beside(Path.cwd(), value) if value else None


def _beside(base: Path, value: str | None) -> Path | None:
    return beside(base, value) if value else None


def _nearest(folder: Path) -> Path | None:
    for parent in (folder, *folder.parents):
        file = parent / FILE_NAME
        if not file.is_file():
            continue
        problem = weakness(file)
        if not problem:
            return file
        _warn(f"{file} is ignored: {problem}; if you trust it, name it with --config or FARM_CONFIG")
    return None


@functools.cache
def _warn(text: str) -> None:
    """Print a line to standard error, once in a process; folders may have any name."""
    from farm.base.text import one_line

    print(f"farm: {one_line(text, 2000)}", file=sys.stderr)  # noqa: T201 - there is no command here that prints


def _read(path: Path) -> _FarmToml:
    try:
        return read_table(path, _FarmToml)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(path, "", error.strerror or str(error)) from None
