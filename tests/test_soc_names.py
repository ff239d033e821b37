"""Names of SoCs that devices report and no profile has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from farm.config.settings import Config, load_config
from farm.devices.device import AdbAddress, Device
from farm.devices.discovery import Scan
from farm.devices.identity import read_soc
from farm.errors import ConfigError, UnknownNameError
from farm.pool.fleet import Choice, choose
from farm.pool.inventory import DeviceRow, find_rows
from farm.suites.socs import find_soc, is_soc, load_socs, set_like

PHONE = Device(serial="a1", soc="", kind="hardware", build="", address=AdbAddress(5037), product="")


@pytest.fixture(autouse=True)
def no_names_of_other_tests() -> Iterator[None]:
    set_like({})
    yield
    set_like({})


def configured(folder: Path, text: str) -> Config:
    (folder / "farm.toml").write_text(text)
    return load_config(folder / "farm.toml")


def chosen(reported: str, soc: str) -> tuple[list[Device], list[str]]:
    device = msgspec.structs.replace(PHONE, soc=read_soc({"ro.soc.model": reported}))
    return choose(Scan([device], [], []), {}, [find_soc(soc).name], Choice())


@pytest.mark.parametrize(
    ("reported", "nearest"),
    [
        ("QCS6490", "QCM6490"),
        ("SA8295P", "SA8295"),
        ("SA8255P", "SA8255"),
        ("SA8775P", "SA8255"),
        ("SM8750P", "SM8750"),
        ("SM8650_AC", "SM8650"),
    ],
)
def test_a_name_without_a_profile_is_refused_with_the_lines_to_write(reported: str, nearest: str) -> None:
    lines = rf'\[soc\.{reported}\] and below it like = "\w+"'
    with pytest.raises(UnknownNameError, match=lines):
        find_soc(reported.lower())
    devices, [refused] = chosen(reported, nearest)
    assert devices == []
    assert f"a1 ({reported}: farm has no profile for {reported}: " in refused
    assert f"[soc.{reported}]" in refused


@pytest.mark.parametrize("reported", ["SM8735", "CQ8750S", "QCS9075", "QCS8550", "ZZ1"])
def test_a_name_without_a_profile_never_matches(reported: str) -> None:
    for soc in load_socs():
        devices, [refused] = chosen(reported, soc)
        assert devices == []
        assert f"[soc.{reported}]" in refused


@pytest.mark.parametrize("reported", ["QCS6490", "qcs6490", "QCS6490-X"])
@pytest.mark.parametrize("asked", ["QCS6490", "QCM6490", "qcs6490"])
def test_farm_toml_gives_a_name_its_profile_in_both_directions(tmp_path: Path, reported: str, asked: str) -> None:
    configured(tmp_path, '[soc.QCS6490]\nlike = "QCM6490"\n[[device]]\nserial = "a1"\nsoc = "QCS6490"\n')
    devices, refused = chosen(reported, asked)
    assert ([device.soc for device in devices], refused) == (["QCM6490"], [])


def test_farm_toml_gives_names_in_the_device_tree_and_of_rows_their_profile(tmp_path: Path) -> None:
    config = configured(tmp_path, '[soc.SA8775P]\nlike = "qcs9100"\n[[device]]\nserial = "a1"\nsoc = "sa8775p"\n')
    assert config.devices[0].soc == "QCS9100"
    assert read_soc({"compatible": "qcom,sa8775p-ride qcom,sa8775p"}) == "QCS9100"
    row = DeviceRow(id="a1", serial="a1", soc="QCS9100")
    assert find_rows([row], ["SA8775P"]) == [row]
    assert is_soc("SA8775p")
    # The names of another farm.toml are not kept.
    configured(tmp_path, "")
    assert not is_soc("SA8775P")
    assert read_soc({"compatible": "qcom,sa8775p"}) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[soc.QCS6490]\nlike = "QCM649"\n', r"soc\.QCS6490\.like: unknown profile .*did you mean 'QCM6490'"),
        ('[soc.A1]\nlike = "SM8650"\n[soc.B1]\nlike = "A1"\n', r"soc\.B1\.like: unknown profile"),
        ('[soc.sm8650]\nlike = "SM8750"\n', r"soc\.sm8650: has a profile, SM8650: leave it out"),
        ('[soc."SM 8650"]\nlike = "SM8650"\n', r"expected letters, digits"),
        ('[soc.""]\nlike = "SM8650"\n', r"expected letters, digits"),
        ('[soc.A1]\nlike = "SM8650"\n[soc.a1]\nlike = "SM8750"\n', r"soc\.a1: A1 is the name of one before"),
    ],
)
def test_what_no_name_can_mean_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configured(tmp_path, text)


def test_a_device_without_a_name_of_an_soc_matches_none() -> None:
    assert chosen("", "SM8750") == ([], ["a1 (: the device reports no SoC)"])


@pytest.mark.parametrize("model", ["", " ", "0", "$(reboot)", "SM8650; x"])
def test_an_empty_or_hostile_name_is_no_soc(model: str) -> None:
    assert read_soc({"ro.soc.model": model}) == ""


def test_profiles_have_other_names_that_no_second_profile_has(tmp_path: Path) -> None:
    profile = 'soc_id = 1\nhtp_arch = 75\nvtcm_mb = 8\nbackends = ["htp"]\n'
    (tmp_path / "AA1.toml").write_text(f'name = "AA1"\nalso = ["AA2"]\n{profile}')
    assert load_socs(tmp_path)["AA1"].also == ("AA2",)
    (tmp_path / "AA2.toml").write_text(f'name = "AA2"\n{profile}')
    load_socs.cache_clear()
    with pytest.raises(ConfigError, match="also: AA2 is a name of AA2 as well"):
        load_socs(tmp_path)
