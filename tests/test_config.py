"""farm.toml: its keys and their errors, and what makes a farm of several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from made import config

from farm.base.config.devices import Endpoint, SshLogin
from farm.base.config.settings import DeviceConfig, HostConfig, load_config
from farm.base.config.shared import read_artifacts
from farm.base.errors import ConfigError, UsageError
from farm.base.machine import usable_bytes
from farm.devices.connect import require_named


def test_the_nearest_file_upwards_counts_and_paths_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARM_CACHE_DIR")
    monkeypatch.delenv("FARM_STATE_DIR")
    (tmp_path / "farm.toml").write_text(
        'suites = ["mine"]\n[paths]\ncache = "c"\nstate = "s"\n[build]\nbuilders = 3\n[qnn]\nsdk_root = "sdk"\n'
    )
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    answer = load_config(folder=deep)
    assert answer.suite_folders == (tmp_path / "mine",)
    assert (answer.cache_dir, answer.state_dir) == (tmp_path / "c", tmp_path / "s")
    assert answer.store_url == f"sqlite:///{tmp_path / 's' / 'farm.db'}"
    assert (answer.builders, answer.sdk_root) == (3, tmp_path / "sdk")


def test_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path / "other"))
    answer = config(tmp_path, '[paths]\ncache = "c"\n[qnn]\nsdk_root = "sdk"\n')
    assert (answer.cache_dir, answer.sdk_root) == (tmp_path / "elsewhere", tmp_path / "other")


def test_what_builders_may_have_is_a_share_of_the_machine_or_what_the_file_says(tmp_path: Path) -> None:
    many = config(tmp_path, "[build]\nbuilders = 1000\n")
    assert (many.build_recycle_mb, many.build_memory_mb) == (1024, usable_bytes() // 2**21)
    assert config(tmp_path, "[build]\nbuilders = 1\n").build_memory_mb > many.build_memory_mb
    answer = config(tmp_path, "[build]\nmemory_mb = 3000\nrecycle_mb = 2000\n")
    assert (answer.build_memory_mb, answer.build_recycle_mb) == (3000, 2000)


ROOTS = {
    "executorch_build": "FARM_EXECUTORCH_BUILD",
    "executorch_linux_build": "FARM_EXECUTORCH_LINUX_BUILD",
    "executorch_direct_build": "FARM_EXECUTORCH_DIRECT_BUILD",
    "hexagon_sdk_root": "HEXAGON_SDK_ROOT",
    "hexagon_tools_root": "HEXAGON_TOOLS_ROOT",
    "android_ndk_root": "ANDROID_NDK_ROOT",
    "android_executorch": "FARM_ANDROID_EXECUTORCH",
}


@pytest.mark.parametrize(("key", "variable"), ROOTS.items())
def test_every_folder_of_others_may_be_told_in_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, variable: str
) -> None:
    for name in ROOTS.values():
        monkeypatch.delenv(name, raising=False)
    assert getattr(config(tmp_path, f'[qnn]\n{key} = "told/here"\n'), key) == tmp_path / "told" / "here"
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    assert getattr(load_config(tmp_path / "farm.toml"), key) == tmp_path / "there"
    monkeypatch.delenv(variable)
    assert getattr(config(tmp_path, ""), key) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("suite = ['x']\n", "farm.toml: unknown key 'suite': did you mean 'suites'"),
        ("[qnn]\nsdkroot = 'x'\n", "qnn: unknown key 'sdkroot': did you mean 'sdk_root'"),
        ("[heatlh]\ngate_wait_s = 1\n", "unknown key 'heatlh': did you mean 'health'"),
        ("[toolchain.main]\ncheckot = 'x'\n", "toolchain.main: unknown key 'checkot': did you mean 'checkout'"),
        ("[[host]]\nname = 'a'\nadbb = 'a:1'\n", r"host\[0\]: unknown key 'adbb': did you mean 'adb'"),
        ("[build]\nbuilders = 0\n", "build.builders: is 0, expected at least 1"),
        ("suites = [", "farm.toml"),
        ("[[host]]\nadb = 'a:1'\n", "name"),
        ("[[host]]\nname = 'a'\n", r"host\[0\]: has neither adb = 'HOST:PORT' nor ssh"),
        ("[[host]]\nname = 'a b'\nadb = 'a:1'\n", r"host\[0\].name: 'a b': expected letters"),
        ("[[host]]\nname = 'a'\nadb = 'a:1'\n[[host]]\nname = 'a'\nadb = 'b:1'\n", r"host\[1\].name: 'a' is the name"),
        ("[[host]]\nname = 'a'\nadb = 'a:70000'\n", r"host\[0\].adb: 'a:70000': expected HOST:PORT"),
        ("[[host]]\nname = 'a'\nadb = 'a:1'\nkey_file = 'k'\n", r"host\[0\].key_file: is for ssh"),
        ("[[device]]\nname = 'a'\n", r"device\[0\]: does not name a device"),
        ("[[device]]\nserial = 'a'\nlocal = true\n", r"device\[0\]: has serial and local, expected one of"),
        ("[[device]]\nssh = '@board'\n", r"device\[0\].ssh: '@board': expected host, user@host"),
        ("[[device]]\nssh = 'me@-oProxyCommand=x'\n", r"device\[0\].ssh"),
        ("[[device]]\nserial = 'a'\nstorage = '/x'\n", r"device\[0\].storage: adb has a folder of its own"),
        ("[[device]]\nlocal = true\nstorage = 'x'\n", r"device\[0\].storage: 'x': expected an absolute path"),
        ("[[device]]\nserial = 'a'\nlabels = ['b c']\n", r"device\[0\].labels: 'b c'"),
        ("[[device]]\nserial = 'a'\n[[device]]\nserial = 'a'\n", r"device\[1\]: is the same device as one before"),
        ("[health]\nmin_battery_percent = 200\n", "health.min_battery_percent: is 200, expected 0 to 100"),
        ("[leases]\nttl_s = 10\nheartbeat_s = 5\n", "leases.heartbeat_s: is 5, expected 0.2 to 3.33333"),
        ("[leases]\nttl_s = 0\n", "leases.ttl_s: is 0, expected 2 to 3600"),
        ("[build]\ntimeout_s = -1\n", "build.timeout_s: is -1, expected 1 to 604800 seconds"),
        ("[build]\ntimeout_s = inf\n", "build.timeout_s: is inf, expected 1"),
        ("[build]\nmemory_mb = 100\n", "build.memory_mb: is 100, expected at least 1024 MB"),
        ("store = 'nonsense'\n", "store: is no address of a store: expected 'sqlite:///FILE' or 'postgresql://"),
        ("store = 'mysql://me:secret@host/farm'\n", "store: is no address"),
        ("[[device]]\nserial = 'a'\nsoc = 'SM8651'\n", r"device\[0\].soc: unknown SoC 'SM8651': did you mean 'SM8650'"),
        ("[[device]]\nserial = 'a'\nsoc = \"\\u001b[31m\"\n", r"device\[0\].soc: unknown SoC '\\x1b\[31m'"),
        ("[[device]]\nserial = 'a'\nname = 'sm8650'\n", r"device\[0\].name: 'sm8650' is an SoC, which devices are"),
        (
            "[[device]]\nserial = 'a'\nname = 'b'\n[[device]]\nserial = 'b'\n",
            "name: 'b' is another one's serial",
        ),
        ("[[device]]\nconnect = 'a:5555'\n[[device]]\nserial = 'a:5555'\n", r"device\[1\]: is the same device as one"),
        ("[[device]]\nlocal = true\nstorage = '/opt/../etc'\n", r"device\[0\].storage: '/opt/../etc': .* without '..'"),
        ('[[device]]\nlocal = true\nstorage = "/opt/\\u001b"\n', r"device\[0\].storage: '/opt/\\x1b'"),
        ("[[device]]\nserial = 'a'\nnote = \"\\u001b]0;x\"\n", r"device\[0\].note: '\\x1b\]0;x': expected one line of"),
    ],
)
def test_a_broken_file_names_itself_and_the_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        config(tmp_path, text)
    assert f"{tmp_path}/farm.toml" in str(caught.value)
    assert str(caught.value).isprintable()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("FARM_CACHEDIR", "x", "FARM_CACHEDIR is no variable of farm: did you mean FARM_CACHE_DIR"),
        ("FARM_CONFIG", "/nope/farm.toml", "/nope/farm.toml: no such file"),
        ("FARM_STORE", "garbage", "FARM_STORE is no address of a store: expected a path such as ./farm.db"),
        ("FARM_STORE", "mysql://me:secret@host/farm", "FARM_STORE is no address of a store"),
        ("FARM_CACHE_DIR", "{file}", "FARM_CACHE_DIR: .*/file is no folder: name another place"),
    ],
)
def test_a_variable_is_used_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, value.format(file=tmp_path / "file"))
    with pytest.raises(UsageError, match=says) as caught:
        load_config(folder=tmp_path)
    assert "secret" not in str(caught.value)


def test_a_folder_that_is_a_file_is_refused_by_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARM_CACHE_DIR")
    with pytest.raises(UsageError, match=r"farm\.toml: paths\.cache: .*farm\.toml is no folder"):
        config(tmp_path, '[paths]\ncache = "farm.toml"\n')


def test_times_are_seconds_or_as_people_write_them(tmp_path: Path) -> None:
    times = "[build]\ntimeout_s = '1h30m'\n[health]\ngate_wait_s = '10m'\ndisk_wait_s = 7\n[leases]\nttl_s = '1m'\n"
    answer = config(tmp_path, times)
    assert (answer.build_timeout_s, answer.leases.ttl_s) == (5400, 60)
    assert (answer.health.gate_wait_s, answer.health.disk_wait_s) == (600, 7)
    with pytest.raises(ConfigError, match=r"build\.timeout_s: is 'a while', expected seconds, or a time"):
        config(tmp_path, "[build]\ntimeout_s = 'a while'\n")


def test_a_device_may_be_named_as_its_own_serial_and_its_soc_in_any_case(tmp_path: Path) -> None:
    found = config(tmp_path, "[[device]]\nserial = 'left'\nname = 'left'\nsoc = 'sm8650'\n")
    assert found.devices == (DeviceConfig(serial="left", name="left", soc="SM8650"),)


def test_a_store_has_an_address_and_variables_of_others_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FARM_STORE", raising=False)
    for variable in ("FARM_WEBHOOK_URL", "FARM_STORE_2", "FARM_HOME", "FARM_SESSION", "FARMS_STORE"):
        monkeypatch.setenv(variable, "theirs")
    for url in ("sqlite:////data/farm.db", "postgresql://me:secret@host/farm", "postgres://host/farm"):
        assert config(tmp_path, f"store = '{url}'\n").store_url == url


def test_hosts_and_devices(tmp_path: Path) -> None:
    answer = config(
        tmp_path,
        """
        [[host]]
        name = "attic"
        ssh = "me@attic.local:2222"
        key_file = "keys/attic"
        [[host]]
        name = "lab"
        adb = "10.0.0.7:5038"
        [[device]]
        serial = "R5CT10"
        name = "left"
        labels = ["lab", "rooted"]
        soc = "SM8650"
        in_service = false
        note = "cracked"
        [[device]]
        ssh = "root@[fe80::1]"
        known_hosts = "/etc/known"
        storage = "/opt/farm/"
        [[device]]
        connect = "10.0.0.9:5555"
        [[device]]
        local = true
        [health]
        max_temperature_c = 40
        [leases]
        ttl_s = 10
        """,
    )
    attic = SshLogin("me", "attic.local", 2222, str(tmp_path / "keys/attic"), "")
    assert answer.hosts == (
        HostConfig("attic", Endpoint("127.0.0.1", 5037), attic),
        HostConfig("lab", Endpoint("10.0.0.7", 5038)),
    )
    labels = ("lab", "rooted")
    assert answer.devices == (
        DeviceConfig(serial="R5CT10", name="left", labels=labels, soc="SM8650", in_service=False, note="cracked"),
        DeviceConfig(ssh=SshLogin("root", "fe80::1", 0, "", "/etc/known"), storage="/opt/farm"),
        DeviceConfig(connect=Endpoint("10.0.0.9", 5555)),
        DeviceConfig(local=True),
    )
    assert (answer.health.max_temperature_c, answer.health.min_battery_percent, answer.leases.ttl_s) == (40, 20, 10)


@pytest.mark.parametrize(
    "run_id", ["", "..", "/etc", "20261121-014501-4f7a12/..", "20261121-014501-4f7a12\n", "latest", "\u0662" * 8]
)
def test_only_the_id_of_a_run_becomes_a_folder(tmp_path: Path, run_id: str) -> None:
    answer = load_config(folder=tmp_path)
    assert answer.run_folder("20261121-014501-4f7a12") == answer.state_dir / "runs" / "20261121-014501-4f7a12"
    with pytest.raises(UsageError, match="is not the id of a run"):
        answer.run_folder(run_id)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[[device]]\nssh = 'me@board'\nknown_hosts = 'nope'\n", r"device\[0\]\.known_hosts: there is no file .*/nope"),
        ("[[host]]\nname = 'a'\nssh = 'me@b'\nkey_file = 'nope'\n", r"host\[0\]\.key_file: there is no file .*/nope"),
        ("[[device]]\naddress = {type = 'locl'}\n", r"device\[0\]\.address: there is no transport 'locl': known are"),
        ("[[device]]\naddress = {type = 'local', strage = 'x'}\n", r"device\[0\]\.address: Object missing.*`storage`"),
    ],
)
def test_what_a_device_is_reached_with_is_there_before_devices_are_used(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        require_named(config(tmp_path, text))
    if "[[host]]" not in text:
        require_named(config(tmp_path, text.replace("[[device]]", "[[device]]\nin_service = false")))


# farm.toml of a farm that several hosts share: what makes it one, what cannot be, and that no secret is in it.


POSTGRESQL = 'store = "postgresql://farm@db.lab/farm"\n'


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FARM_STORE", "FARM_ARTIFACTS"):
        monkeypatch.delenv(name, raising=False)


def test_a_farm_is_shared_where_both_are_set(tmp_path: Path) -> None:
    shared = config(tmp_path, f'{POSTGRESQL}artifacts = "file:///mnt/farm/"\n[agent]\nname = "attic"\n')
    assert (shared.is_shared, str(shared.artifacts), shared.agent.name) == (True, "file:///mnt/farm", "attic")
    assert not config(tmp_path, POSTGRESQL).is_shared
    assert not config(tmp_path, "").is_shared


def test_files_of_a_login_are_relative_to_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "sftp://ada@nas.lab:2222/srv/farm?key_file=keys/farm&known_hosts=keys/known&ssh_config=none"
    found = config(tmp_path, f'{POSTGRESQL}artifacts = "{url}"\n').artifacts
    assert found is not None
    assert found.login is not None
    keys = tmp_path / "keys"
    assert (found.login.key_file, found.login.known_hosts) == (str(keys / "farm"), str(keys / "known"))
    assert (found.login.config, found.path, str(found)) == ("none", "/srv/farm", "sftp://ada@nas.lab:2222/srv/farm")
    minio = "https://minio.lab:9000"
    monkeypatch.setenv("FARM_ARTIFACTS", f"s3://lab-farm/main?endpoint_url={minio}&region=eu&profile=farm")
    found = config(tmp_path, f'{POSTGRESQL}artifacts = "{url}"\n').artifacts
    assert found is not None
    assert (str(found), found.endpoint_url, found.region, found.profile) == ("s3://lab-farm/main", minio, "eu", "farm")


def test_sqlite_and_files_of_many_hosts_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = 'artifacts = "file:///mnt/farm"\n'
    for text in (artifacts, f'store = "sqlite:////data/farm.db"\n{artifacts}'):
        with pytest.raises(ConfigError, match="artifacts: the store is SQLite, and files that several hosts share"):
            config(tmp_path, text)
    with pytest.raises(ConfigError, match="agent: an agent is for a farm that several hosts share: set store and"):
        config(tmp_path, "[agent]\nbuild = true\n")
    with pytest.raises(ConfigError, match="agent.name"):
        config(tmp_path, f'{POSTGRESQL}{artifacts}[agent]\nname = "the attic"\n')
    monkeypatch.setenv("FARM_ARTIFACTS", "file:///mnt/farm")
    with pytest.raises(UsageError, match="FARM_ARTIFACTS is set, and the store is SQLite"):
        config(tmp_path, "")
    monkeypatch.delenv("FARM_ARTIFACTS")
    # A local run uses the user's own store.
    monkeypatch.setenv("FARM_STORE", str(tmp_path / "mine.db"))
    alone = config(tmp_path, f"{POSTGRESQL}{artifacts}[agent]\nbuild = true\n")
    assert (alone.is_shared, alone.artifacts) == (False, None)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("/mnt/farm", "is no place"),
        ("file://nas/farm", "three slashes"),
        ("file:///mnt/../etc", "without '..'"),
        ("file:///", "expected a folder"),
        ("sftp://nas", "expected a folder"),
        ("sftp://-oProxyCommand=x/farm", "expected user@host"),
        ("sftp://nas:99999/farm", "is no address"),
        ("sftp://nas/farm?keyfile=x", "did you mean 'key_file'"),
        ("sftp://ada:hunter2@nas/farm", "holds a password"),
        ("s3://hunter2@bucket/x", "holds a password"),
        ("s3://Bucket_/x", "expected a bucket"),
        ("s3://bucket/../x", "expected a bucket"),
        ("s3://bucket/x?endpoint_url=https://me:hunter2@minio.lab", "endpoint_url: expected"),
        ("s3://bucket/x?secret=hunter2", "unknown option of s3://"),
        ("", "is no place"),
    ],
)
def test_an_address_that_cannot_be_is_refused_in_a_line_without_secrets(
    address: str, says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read_artifacts(address, lambda value: tmp_path / value)
    assert "hunter2" not in str(caught.value).casefold()
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="farm.toml: artifacts: "):
        config(tmp_path, f'{POSTGRESQL}artifacts = "{address}"\n')
