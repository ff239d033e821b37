"""farm.toml of a farm that several hosts share: what makes it one, what cannot be, and that no secret is in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from made import config

from farm.base.config.shared import read_artifacts
from farm.base.errors import ConfigError, UsageError

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
