from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from elf_maker import make_elf
from elftools.elf.elffile import ELFFile
from hypothesis import given, settings
from hypothesis import strategies as st

from farm.base.errors import ConfigError
from farm.builds.runtime.native.elf import HEXAGON, read_elf


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
