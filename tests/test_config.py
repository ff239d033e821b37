from __future__ import annotations

from pathlib import Path

import pytest

from farm.config import load_config
from farm.errors import ConfigError, UsageError


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
    config = load_config(folder=deep)
    assert config.suite_folders == (tmp_path / "mine",)
    assert (config.cache_dir, config.state_dir) == (tmp_path / "c", tmp_path / "s")
    assert config.store_url == f"sqlite:///{tmp_path / 's' / 'farm.db'}"
    assert (config.builders, config.sdk_root) == (3, tmp_path / "sdk")


def test_the_environment_beats_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "farm.toml").write_text('[paths]\ncache = "c"\n[qnn]\nsdk_root = "sdk"\n')
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("QNN_SDK_ROOT", str(tmp_path / "other"))
    config = load_config(tmp_path / "farm.toml")
    assert (config.cache_dir, config.sdk_root) == (tmp_path / "elsewhere", tmp_path / "other")


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
    (tmp_path / "farm.toml").write_text(f'[qnn]\n{key} = "told/here"\n')
    assert getattr(load_config(tmp_path / "farm.toml"), key) == tmp_path / "told" / "here"
    monkeypatch.setenv(variable, str(tmp_path / "there"))
    assert getattr(load_config(tmp_path / "farm.toml"), key) == tmp_path / "there"
    (tmp_path / "farm.toml").write_text("")
    monkeypatch.delenv(variable)
    assert getattr(load_config(tmp_path / "farm.toml"), key) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("suite = ['x']\n", "unknown field `suite`"),
        ("[build]\nbuilders = 'two'\n", "build.builders"),
        ("[build]\nbuilders = 0\n", "build.builders: is 0, expected at least 1"),
        ("suites = [", "farm.toml"),
    ],
)
def test_a_broken_file_names_itself_and_the_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "farm.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_config(tmp_path / "none.toml")
