from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from farm.errors import ConfigError
from farm.runtime.elf import HEXAGON, read_elf
from farm.runtime.packages import package_folder


@pytest.mark.parametrize("wide", [False, True])
def test_the_header_is_read_in_both_widths(elf: Any, tmp_path: Path, wide: bool) -> None:
    path = tmp_path / "skel.so"
    path.write_bytes(elf(164, 0x75, wide=wide, segments=((1, 5), (0, 2 << 24))))
    header = read_elf(path)
    assert (header.machine, header.machine_name, header.hexagon_arch) == (HEXAGON, "Hexagon DSP6", 75)
    assert header.segments == ((1, 5), (0, 2 << 24))
    assert header.signed


@pytest.mark.parametrize(("flags", "arch"), [(0x68, 68), (0x75, 75), (0x81, 81), (0x8073, 73), (0x7A, 0)])
def test_the_architecture_is_in_the_flags(elf: Any, tmp_path: Path, flags: int, arch: int) -> None:
    path = tmp_path / "skel.so"
    path.write_bytes(elf(164, flags))
    assert read_elf(path).hexagon_arch == arch


def test_a_library_of_this_machine_is_read_and_not_signed() -> None:
    header = read_elf(package_folder("executorch", "lib/libexecutorch.so", "build") / "lib" / "libexecutorch.so")
    assert header.machine_name == "x86-64"
    assert len(header.segments) > 3
    assert not header.signed


def test_what_is_no_elf_file_is_refused(tmp_path: Path, elf: Any) -> None:
    whole = elf(164, 0x75)
    broken = [b"", b"\x7fELF", b"MZ" + bytes(100), whole[:60], whole[:42] + b"\xff\xff\xff\xff" + whole[46:], whole[:5]]
    for content in broken:
        path = tmp_path / "broken.so"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"broken\.so: is "):
            read_elf(path)


def test_a_table_beyond_the_file_is_refused(tmp_path: Path, elf: Any) -> None:
    content = bytearray(elf(164, 0x75, wide=True))
    content[32:40] = b"\xff" * 8
    path = tmp_path / "broken.so"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        read_elf(path)
