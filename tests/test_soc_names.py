"""Profiles of SoCs, and names that devices report and no profile has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from executorch.backends.qualcomm.serialization.qc_schema import _soc_info_table
from made import config as configured
from made import device
from shared_rows import facts

from farm.base import socs
from farm.base.errors import ConfigError, IllegalTargetError, UnknownNameError
from farm.base.paths import data_folder
from farm.base.socs import check_target, find_soc, is_soc, load_socs, set_like
from farm.cli.setup.suites import socs_command
from farm.devices.device import Device
from farm.devices.discovery import Scan
from farm.devices.facts import reported_soc
from farm.dispatch.cluster.agent.host_devices import described
from farm.dispatch.cluster.client.devices import Wanted
from farm.dispatch.cluster.client.devices import choose as choose_of_agents
from farm.dispatch.pool.fleet import Choice, choose
from farm.dispatch.pool.inventory import DeviceRow, find_rows
from farm.store.store import open_store


def test_the_profiles_are_executorchs_own_table() -> None:
    table = {
        chip.name: [
            int(chip), int(info.htp_info.htp_arch), info.htp_info.vtcm_size_in_mb,
            info.lpai_info and int(info.lpai_info.lpai_hardware_version),
        ]
        for chip, info in _soc_info_table.items()
    }  # fmt: skip
    ours = {soc.name: [soc.soc_id, soc.htp_arch, soc.vtcm_mb, soc.lpai_version] for soc in load_socs().values()}
    assert len(ours) == 21
    assert ours == table


def test_lpai_is_a_backend_exactly_where_there_is_an_lpai() -> None:
    for soc in load_socs().values():
        assert ("lpai" in soc.backends) == (soc.lpai_version is not None)
        assert "htp" in soc.backends


def test_every_soc_has_a_cpu_though_no_profile_says_so() -> None:
    for soc in load_socs().values():
        assert soc.backends[-1] == "xnnpack"
        check_target(soc, "xnnpack", "fp32")


def test_a_soc_is_found_in_any_case_and_the_nearest_is_offered() -> None:
    assert find_soc("sm8650").name == "SM8650"
    with pytest.raises(UnknownNameError, match="unknown SoC 'SM8651': did you mean 'SM8650'"):
        find_soc("SM8651")


@pytest.mark.parametrize(
    ("soc", "backend", "precision", "says"),
    [
        ("SM8650", "lpai", "8a8w", "SM8650 has no lpai backend: legal are htp, gpu, xnnpack"),
        ("SM8650", "gpu", "8a8w", "gpu backend does not run 8a8w"),
        ("SM8650", "htp", "fp32", "htp backend does not run fp32: legal are 8a8w, .*; fp32 is for gpu, xnnpack"),
        ("SM8650", "xnnpack", "16a4w", "xnnpack backend does not run 16a4w: legal are fp32; 16a4w is for htp"),
        ("SM8650", "hpt", "8a8w", "unknown backend 'hpt': did you mean 'htp'"),
        ("SM8650", "htp", "8a9w", "unknown precision '8a9w'"),
    ],
)
def test_an_illegal_target_says_what_is_legal(soc: str, backend: str, precision: str, says: str) -> None:
    with pytest.raises((IllegalTargetError, UnknownNameError), match=says):
        check_target(find_soc(soc), backend, precision)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = 'SM1'\n", "required field"),
        ("name = 'SM2'\nsoc_id = 1\nhtp_arch = 75\nvtcm_mb = 8\nbackends = ['htp']\n", "expected 'SM1'"),
        ("name = 'SM1'\nsoc_id = 1\nhtp_arch = 75\nvtcm_mb = 8\nbackends = ['npu']\n", "'npu' is none of"),
        ("name = 'SM1'\nsoc_id = 1\nhtp_arch = 75\nvtcm_mb = 8\nbackends = ['xnnpack']\n", "every SoC has xnnpack"),
        ("name = \n", "SM1.toml"),
    ],
)
def test_a_broken_profile_names_file_and_problem(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "SM1.toml").write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_socs(tmp_path)
    assert "SM1.toml" in str(caught.value)


# Names of SoCs that devices report and no profile has.


PHONE = device("a1", "")


@pytest.fixture(autouse=True)
def no_names_of_other_tests() -> Iterator[None]:
    set_like({})
    yield
    set_like({})


def chosen(reported: str, soc: str) -> tuple[list[Device], list[str]]:
    device = msgspec.structs.replace(PHONE, soc=reported_soc({"ro.soc.model": reported})[1])
    return choose(Scan([device], [], []), {}, [find_soc(soc).name], Choice())


@pytest.mark.parametrize(
    ("reported", "nearest"), [("QCS6490", "QCM6490"), ("SA8775P", "SA8255"), ("SM8650_AC", "SM8650")]
)
def test_a_name_without_a_profile_is_refused_with_the_lines_to_write(reported: str, nearest: str) -> None:
    lines = rf'\[soc\.{reported}\] and below it like = "\w+"'
    with pytest.raises(UnknownNameError, match=lines):
        find_soc(reported.lower())
    devices, [refused] = chosen(reported, nearest)
    assert devices == []
    assert f"a1 ({reported}: farm has no profile for {reported}: " in refused
    assert f"[soc.{reported}]" in refused
    # A profile that is as near as none fits no device.
    assert {soc for soc in load_socs() if chosen("ZZ1", soc)[0]} == set()


@pytest.mark.parametrize(
    ("reported", "asked"), [("QCS6490", "qcs6490"), ("qcs6490", "QCM6490"), ("QCS6490-X", "QCS6490")]
)
def test_farm_toml_gives_a_name_its_profile_in_both_directions(tmp_path: Path, reported: str, asked: str) -> None:
    configured(tmp_path, '[soc.QCS6490]\nlike = "QCM6490"\n[[device]]\nserial = "a1"\nsoc = "QCS6490"\n')
    devices, refused = chosen(reported, asked)
    assert ([device.soc for device in devices], refused) == (["QCM6490"], [])
    # A bin has one line for both spellings.
    configured(tmp_path, '[soc.SM8650_AC]\nlike = "SM8750"\n')
    assert {reported_soc({"ro.soc.model": name})[1] for name in ("SM8650-AC", "SM8650_AC", "sm8650-ac")} == {"SM8750"}
    assert find_soc("SM8650-AC").name == "SM8750"


def test_an_empty_or_hostile_name_is_no_soc_and_matches_none() -> None:
    for model in ("", " ", "0", "$(reboot)", "SM8650; x"):
        assert reported_soc({"ro.soc.model": model})[1] == ""
    assert chosen("", "SM8750") == ([], ["a1 (: the device reports no SoC)"])


def test_farm_toml_gives_names_in_the_device_tree_and_of_rows_their_profile(tmp_path: Path) -> None:
    config = configured(tmp_path, '[soc.SA8775P]\nlike = "qcs9100"\n[[device]]\nserial = "a1"\nsoc = "sa8775p"\n')
    assert config.devices[0].soc == "QCS9100"
    assert reported_soc({"compatible": "qcom,sa8775p-ride qcom,sa8775p"})[1] == "QCS9100"
    row = DeviceRow(id="a1", serial="a1", soc="QCS9100")
    assert find_rows([row], ["SA8775P"]) == [row]
    assert is_soc("SA8775p")
    # The names of another farm.toml are not kept.
    configured(tmp_path, "")
    assert not is_soc("SA8775P")
    assert reported_soc({"compatible": "qcom,sa8775p"})[1] == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[soc.QCS6490]\nlike = "QCM649"\n', r"soc\.QCS6490\.like: unknown profile .*did you mean 'QCM6490'"),
        ('[soc.A1]\nlike = "SM8650"\n[soc.B1]\nlike = "A1"\n', r"soc\.B1\.like: unknown profile"),
        ('[soc.sm8650]\nlike = "SM8750"\n', r"soc\.sm8650: has a profile, SM8650: leave it out"),
        ('[soc."SM 8650"]\nlike = "SM8650"\n', r"expected letters, digits"),
        ('[soc.A1]\nlike = "SM8650"\n[soc.a1]\nlike = "SM8750"\n', r"soc\.a1: A1 is the name of one before"),
    ],
)
def test_what_no_name_can_mean_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        configured(tmp_path, text)


def test_profiles_have_other_names_that_no_second_profile_has(tmp_path: Path) -> None:
    profile = 'soc_id = 1\nhtp_arch = 75\nvtcm_mb = 8\nbackends = ["htp"]\n'
    (tmp_path / "AA1.toml").write_text(f'name = "AA1"\nalso = ["AA2"]\n{profile}')
    assert load_socs(tmp_path)["AA1"].also == ("AA2",)
    (tmp_path / "AA2.toml").write_text(f'name = "AA2"\n{profile}')
    load_socs.cache_clear()
    with pytest.raises(ConfigError, match="also: AA2 is a name of AA2 as well"):
        load_socs(tmp_path)


def test_a_bin_that_a_device_reports_can_be_asked_for() -> None:
    """A name of a device, SM8650-1, is none."""
    assert (find_soc("SM8650-AC").name, find_soc("sm8650-ab").name) == ("SM8650", "SM8650")
    for name in ("SM8650-1", "SM8650-left", "SM8650_AC", "QCS6490-AA"):
        with pytest.raises(UnknownNameError):
            find_soc(name)
    assert not is_soc("SM8650-AC")


def test_other_names_of_a_profile_are_taken_by_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = tmp_path / "device_profiles"
    profiles.mkdir()
    for path in data_folder("device_profiles").glob("*.toml"):
        also = 'also = ["QCS6490"]\n' if path.stem == "QCM6490" else ""
        (profiles / path.name).write_text(path.read_text() + also)
    monkeypatch.setattr(socs, "data_folder", lambda _: profiles)
    load_socs.cache_clear()
    try:
        assert chosen("QCS6490", "QCS6490")[0][0].soc == "QCM6490"
        with pytest.raises(ConfigError, match=r"soc\.QCS6490: has a profile, QCM6490: leave it out"):
            configured(tmp_path, '[soc.QCS6490]\nlike = "SM8650"\n')
        listed = CliRunner().invoke(socs_command, ["--json"])
        assert [one["name"] for one in json.loads(listed.stdout)["socs"] if one["also"] == ["QCS6490"]] == ["QCM6490"]
    finally:
        load_socs.cache_clear()


def test_two_hosts_of_a_shared_farm_read_their_own_names(tmp_path: Path, new_store: Callable[[str], str]) -> None:
    with open_store(new_store("soc_names")) as store:
        for host, text in (("h1", '[soc.QCS6490]\nlike = "QCM6490"\n'), ("h2", "")):
            configured(tmp_path, text)
            soc = reported_soc({"ro.soc.model": "QCS6490"})[1]
            device = msgspec.structs.replace(PHONE, serial=f"{host}-0", soc=soc, host=host)
            answer = described(device, None, load_socs()).facts
            store.cluster.register(host, msgspec.structs.replace(facts(host), devices=(answer,)), 60, user="farm")
        # The client's farm.toml has the name, or the profile's is asked for.
        configured(tmp_path, '[soc.QCS6490]\nlike = "QCM6490"\n')
        for asked in ("QCS6490", "QCM6490"):
            wanted = Wanted(store, [find_soc(asked).name], Choice())
            assert wanted.find(wait=False) == []
            assert [one.id for one in wanted.devices] == ["h1-0"]
        _, [refused] = choose_of_agents(store.cluster.agents(), {}, ["QCM6490"], Choice())
        assert "h2-0 (QCS6490 of h2: farm has no profile for QCS6490: if the part is a QCM6490" in refused
        assert "[soc.QCS6490] and below it like = " in refused
