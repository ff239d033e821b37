from __future__ import annotations

from pathlib import Path

import pytest
from executorch.backends.qualcomm.serialization.qc_schema import _soc_info_table

from farm.base.errors import ConfigError, IllegalTargetError, UnknownNameError
from farm.base.socs import check_target, find_soc, load_socs


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
