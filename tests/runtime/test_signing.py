"""Headers of ELF files, and signatures of skels."""

from __future__ import annotations

import datetime
import getpass
import hashlib
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elf_maker import SIGNED, make_elf
from elftools.elf.elffile import ELFFile
from hexagon_sdk_stub import make_hexagon_sdk, processes, starts
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.base.config.settings import Config
from farm.base.errors import ConfigError, InfraError, MissingToolError, UsageError
from farm.base.socs import find_soc
from farm.builds.runtime import signing
from farm.builds.runtime.native import TARGETS
from farm.builds.runtime.parts import HEXAGON, SignRecord, read_elf, read_record, record_path
from farm.builds.runtime.runtime import Runtime, staged_runtime
from farm.builds.runtime.signing import Signing, adopt, find_elfsigner, find_python, plan_signing, sign


@pytest.mark.parametrize("wide", [False, True])
def test_the_header_is_read_in_both_widths(tmp_path: Path, wide: bool) -> None:
    path = tmp_path / "skel.so"
    path.write_bytes(make_elf(164, 0x75, wide=wide, segments=((1, 5), (0, 2 << 24))))
    header = read_elf(path)
    assert (header.machine, header.machine_name, header.hexagon_arch) == (HEXAGON, "Hexagon DSP6", 75)
    assert [segment[:2] for segment in header.segments] == [(1, 5), (0, 2 << 24)]
    assert header.segments[1].offset + header.segments[1].nbytes == header.file_bytes == path.stat().st_size
    assert header.signed
    # A signature whose bytes are not there is none.
    path.write_bytes(path.read_bytes()[:-1])
    assert not read_elf(path).signed


def test_the_architecture_is_in_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "skel.so"
    for flags, arch in ((0x68, 68), (0x81, 81), (0x8073, 73), (0x7A, 0)):
        path.write_bytes(make_elf(164, flags))
        assert read_elf(path).hexagon_arch == arch


def test_real_libraries_are_read_as_another_reader_does(qnn_wheel: Path) -> None:
    skels = {f"libQnnHtpV{arch}Skel.so": arch for arch in (68, 69, 73, 75, 79, 81)}
    for name, arch in {**skels, "libQnnHtp.so": 0, "libQnnHtpV75Stub.so": 0, "libQnnGpu.so": 0}.items():
        header = read_elf(qnn_wheel / name)
        assert (header.machine_name, header.signed) == ("Hexagon DSP6" if arch else "AArch64", False)
        with (qnn_wheel / name).open("rb") as file:
            theirs = ELFFile(file)
            assert not arch or (header.flags, header.hexagon_arch) == (theirs.header.e_flags, arch)
            raw = [segment.header for segment in theirs.iter_segments()]
        assert [one[1:] for one in header.segments] == [
            (one.p_flags, one.p_offset, one.p_filesz, one.p_align) for one in raw
        ]


def test_what_is_no_elf_file_is_refused(tmp_path: Path) -> None:
    whole, wide = make_elf(164, 0x75), make_elf(164, 0x75, wide=True)
    beyond = (whole[:42] + b"\xff\xff\xff\xff" + whole[46:], wide[:32] + b"\xff" * 8 + wide[40:])
    for content in (b"", b"\x7fELF", b"MZ" + bytes(100), whole[:60], whole[:5], *beyond):
        path = tmp_path / "broken.so"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"broken\.so: is "):
            read_elf(path)


@pytest.fixture(scope="module")
def scratch() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "hostile.so"


@settings(max_examples=200, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 199), st.binary(min_size=1, max_size=8)), max_size=6),
    st.integers(0, 200),
    st.binary(max_size=40),
)
def test_no_file_makes_it_crash_or_call_signed_what_has_no_such_bytes(
    scratch: Path, wide: bool, changes: list[tuple[int, bytes]], cut: int, more: bytes
) -> None:
    content = bytearray(make_elf(164, 0x75, wide=wide, segments=((1, 5), (0, 2 << 24))))
    for position, patch in changes:
        content[position : position + len(patch)] = patch
    scratch.write_bytes(bytes(content[:-cut] if cut and not more else content) + more)
    try:
        header = read_elf(scratch)
    except ConfigError:
        return
    assert header.file_bytes == scratch.stat().st_size
    assert len(header.segments) <= 512
    if header.signed:
        inside = [one for one in header.segments if one.kind == 0 and one.offset + one.nbytes <= header.file_bytes]
        assert any(one.nbytes > 0 for one in inside)


# farm setup sign against a stub of elfsigner that really adds a hash segment, and misbehaves on request.


SECRET = b"stub of a private key"


@pytest.fixture
def hexagon(tmp_path: Path) -> Path:
    return make_hexagon_sdk(tmp_path / "stub-hexagon-sdk")


def _only(config: Config) -> Signing:
    (one,) = plan_signing(config, 6)
    return one


def _sign(config: Config, hexagon: Path, one: Signing, *, timeout_s: float = 60.0) -> tuple[SignRecord, list[str]]:
    output: list[str] = []
    tool = find_elfsigner(hexagon)
    record = sign(config, one, tool=tool, python=Path(sys.executable), show=output.append, timeout_s=timeout_s)
    return record, output


def _stage(config: Config) -> Runtime:
    return staged_runtime(config, find_soc("SM8850"), "lpai", TARGETS["android-arm64"])


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _left_by_the_tool(config: Config, hexagon: Path) -> list[Path]:
    """Return the files with its key, and everything in the folder where it worked."""
    kept = [path for path in hexagon.parent.rglob("*") if path.is_file() and hexagon not in path.parents]
    return [path for path in kept if SECRET in path.read_bytes()] + list((config.cache_dir / "signing").iterdir())


def test_it_is_signed_recorded_and_staged(config: Config, hexagon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SIGNING_TOKEN", "hunter2")
    one = _only(config)
    shutil.rmtree(one.signed.parent)
    assert _only(config).reason == "missing"
    make_hexagon_sdk(hexagon, "asks twice")
    before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    record, output = _sign(config, hexagon, one)
    assert read_elf(one.signed).signed
    assert read_elf(one.signed).flags == read_elf(one.unsigned).flags
    assert (record.who, record.host, record.how) == (getpass.getuser(), platform.node(), "signed")
    assert before <= datetime.datetime.fromisoformat(record.when) <= datetime.datetime.now(datetime.UTC)
    tool = hexagon / "tools/elfsigner/elfsigner.py"
    assert (record.tool, record.tool_sha256) == (str(tool), _hash(tool))
    assert (record.input, record.input_sha256) == (str(one.unsigned), _hash(one.unsigned))
    assert record.output_sha256 == _hash(one.signed)
    assert read_record(one.signed) == record
    assert {path.name for path in one.signed.parent.iterdir()} == {one.signed.name, record_path(one.signed).name}
    assert _only(config).reason == ""
    assert _stage(config).files["libQnnLpaiSkel.so"] == one.signed
    # The output of the tool is shown in its order, with control characters made harmless.
    assert sum("Agree? [y/n]:" in line for line in output) == 2
    assert "a bell \N{SYMBOL FOR BELL} and red" in output
    assert output[-1].startswith("Signing complete!")
    (names,) = [line for line in output if line.startswith("environment:")]
    assert "MY_SIGNING_TOKEN" not in names
    assert "HEXAGON_SDK_ROOT" in names
    assert _left_by_the_tool(config, hexagon) == []


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("fails", "ended with exit code 1"),
        ("signs and fails", "ended with exit code 1"),
        ("asks without end", "ended with exit code 1"),
        ("leaves a link", "with exit code 0, and wrote no libQnnLpaiSkel.so"),
        ("leaves it unsigned", "has no segment with a signature"),
        ("is cut short", "has no segment with a signature"),
        ("signs another", r"has e_flags 0x68, and its original has 0x81"),
        ("hangs", "did not sign libQnnLpaiSkel.so in 2 s and was ended"),
    ],
)
def test_a_signing_that_fails_says_why_and_leaves_the_earlier_file(
    config: Config, hexagon: Path, mode: str, says: str
) -> None:
    one = _only(config)
    before = (one.signed.read_bytes(), record_path(one.signed).read_bytes())
    make_hexagon_sdk(hexagon, mode)
    with pytest.raises(InfraError, match=says):
        _sign(config, hexagon, one, timeout_s=2.0 if mode == "hangs" else 60.0)
    assert (one.signed.read_bytes(), record_path(one.signed).read_bytes()) == before
    assert len(list(one.signed.parent.iterdir())) == 2
    _stage(config)
    assert processes(hexagon) == []
    assert _left_by_the_tool(config, hexagon) == []


def test_what_has_changed_since_is_refused_until_it_is_signed_again(config: Config, hexagon: Path) -> None:
    one = _only(config)
    _sign(config, hexagon, one)
    one.unsigned.write_bytes(one.unsigned.read_bytes() + b"newer")
    with pytest.raises(
        ConfigError, match=r"was signed on \d{4}-\d\d-\d\d from another libQnnLpaiSkel.so .*farm setup sign"
    ):
        _stage(config)
    assert _only(config).reason == "outdated"
    _sign(config, hexagon, _only(config))
    assert _stage(config).files["libQnnLpaiSkel.so"] == one.signed


def test_a_file_that_no_record_vouches_for_is_refused_until_it_is_adopted(config: Config) -> None:
    one = _only(config)
    record_path(one.signed).unlink()
    with pytest.raises(
        ConfigError, match=r"is signed, but not by 'farm setup sign'.*: farm setup sign --lpai v6 --adopt$"
    ):
        _stage(config)
    assert _only(config).reason == "foreign"
    record = adopt(one.unsigned, one.signed)
    assert (record.how, record.tool, record.tool_sha256) == ("adopted", "", "")
    _stage(config)
    # The record is valid for the adopted file alone.
    one.signed.write_bytes(one.signed.read_bytes() + b"another")
    with pytest.raises(ConfigError, match=r"is not the file that was adopted on \d{4}.*its hash is another"):
        _stage(config)


def test_a_record_that_is_none_vouches_for_nothing(config: Config) -> None:
    one = _only(config)
    for content in (b"", b"[]", b'{"how": "stolen"}', b"\xff" * 70_000, b'{"who":"\xff"}', b'{"x":' + b"[" * 60_000):
        record_path(one.signed).write_bytes(content)
        with pytest.raises(ConfigError, match="is signed, but not by 'farm setup sign'"):
            _stage(config)


def test_a_record_for_another_architecture_is_refused(config: Config) -> None:
    one = _only(config)
    record = adopt(one.unsigned, one.signed)
    one.unsigned.write_bytes(make_elf(164, 0x79))
    forged = msgspec.structs.replace(record, input_sha256=_hash(one.unsigned))
    record_path(one.signed).write_bytes(msgspec.json.encode(forged))
    with pytest.raises(ConfigError, match="has e_flags 0x81, and its original has 0x79"):
        _stage(config)


def test_what_is_not_signed_or_made_for_something_else_cannot_be_adopted(config: Config) -> None:
    one = _only(config)
    shutil.copy(one.unsigned, one.signed)
    with pytest.raises(ConfigError, match="has no segment with a signature"):
        adopt(one.unsigned, one.signed)
    one.signed.write_bytes(make_elf(183, wide=True))
    with pytest.raises(ConfigError, match="is made for AArch64, expected Hexagon"):
        adopt(one.unsigned, one.signed)
    one.signed.write_bytes(make_elf(164, 0x68, segments=((0, 2 << 24),)))
    with pytest.raises(ConfigError, match="has e_flags 0x68, and its original has 0x81"):
        adopt(one.unsigned, one.signed)


def test_a_file_that_was_adopted_is_never_told_to_be_signed_over(config: Config) -> None:
    one = _only(config)
    original = one.unsigned.read_bytes()
    one.unsigned.unlink()
    # Without its original it is not outdated by one.
    assert adopt(one.unsigned, one.signed).input_sha256 == ""
    one.unsigned.write_bytes(original)
    assert _only(config).reason == ""
    _stage(config)
    adopt(one.unsigned, one.signed)
    one.unsigned.write_bytes(original + b"newer")
    assert (_only(config).reason, _only(config).adopted) == ("outdated", True)
    with pytest.raises(ConfigError, match=r"was adopted on .* from another .*: have .*--adopt', or .*--force"):
        _stage(config)


def test_direct_mode_has_six_files_more(config: Config, hexagon: Path) -> None:
    plan = plan_signing(config, 6, 81)
    names = "libQnnLpaiSkel.so libQnnLpai.so libQnnSystem.so libqnn_executorch_backend.so libqnn_executorch_skel.so"
    assert [one.signed.name for one in plan] == [*names.split(), "libc++.so.1", "libc++abi.so.1"]
    assert [one.reason for one in plan] == ["", *["missing"] * 6]
    _sign(config, hexagon, plan[1])
    # A signed file, as the build of upstream leaves six.
    for one in plan[2:]:
        flags = int.from_bytes(one.unsigned.read_bytes()[36:40], "little")
        one.signed.write_bytes(make_elf(164, flags, segments=SIGNED))
        adopt(one.unsigned, one.signed)
    assert not any(one.reason for one in plan_signing(config, 6, 81))
    runtime = staged_runtime(config, find_soc("SM8850"), "lpai", TARGETS["android-arm64"], "direct")
    assert (len(runtime.files), runtime.needs_root) == (8, True)


def test_versions_that_no_soc_has_and_missing_parts_are_named(config: Config, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no SoC with LPAI v6 has a Hexagon V75: legal are --htp v81"):
        plan_signing(config, 6, 75)
    with pytest.raises(MissingToolError, match="set QNN_SDK_ROOT"):
        plan_signing(msgspec.structs.replace(config, sdk_root=None), 6)
    bare = msgspec.structs.replace(config, executorch_direct_build=None, hexagon_tools_root=None)
    with pytest.raises(MissingToolError, match=r"set FARM_EXECUTORCH_DIRECT_BUILD.*set HEXAGON_TOOLS_ROOT"):
        plan_signing(bare, 6, 81)
    with pytest.raises(MissingToolError, match=r"tools/elfsigner/elfsigner\.py is not there: set HEXAGON_SDK_ROOT"):
        find_elfsigner(tmp_path)


def test_a_python_that_the_tool_runs_on_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(signing.sys, "version_info", (3, 13, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingToolError, match=r"older than 3\.12 .*--python"):
        find_python()
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\n")
    old.chmod(0o755)
    assert find_python() == old


def test_a_real_skel_is_signed_as_its_own_tools_see_it(config: Config, hexagon: Path, qnn_wheel: Path) -> None:
    one = _only(config)
    shutil.copy(qnn_wheel / "libQnnHtpV81Skel.so", one.unsigned)
    _sign(config, hexagon, one)
    with one.unsigned.open("rb") as before, one.signed.open("rb") as after:
        source, made = ELFFile(before), ELFFile(after)
        assert made.header.e_flags == source.header.e_flags == 0x81
        assert made.num_segments() == source.num_segments() + 2
        kinds = [segment.header.p_type for segment in made.iter_segments()]
        assert kinds[:2] == ["PT_NULL", "PT_NULL"]
        for old, new in zip(source.iter_segments(), list(made.iter_segments())[2:], strict=True):
            # The first segment starts with the ELF header itself, which refers to another table now.
            skip = 52 if old.header.p_offset == 0 else 0
            assert old.data()[skip:] == new.data()[skip:]
    _stage(config)
    assert starts(hexagon) == 1
