"""The bridge hands one word over where a library reads it, and changes nothing else. The library here is a stub;
test_run.py shows that the real one works behind the bridge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

from farm.builds.runtime.native.build import build_native

HERE = Path(__file__).parent
SOC_MODEL = 57


def _stub(folder: Path, core_minor: int) -> Path:
    library = folder / f"libstub{core_minor}.so"
    source = HERE / "qnn_stub.cpp"
    subprocess.run(
        ["c++", "-shared", "-fPIC", f"-DCORE_MINOR={core_minor}", str(source), "-o", str(library)],
        check=True,
        timeout=120,
    )
    return library


def _create(
    bridge: Path, real: Path | str, option: int = 0, custom_option: int = 0
) -> subprocess.CompletedProcess[str]:
    script = HERE / "call_device_create.py"
    return subprocess.run(
        [sys.executable, str(script), str(bridge), str(option), str(custom_option), str(SOC_MODEL)],
        env={"FARM_QNN_REAL_HTP": str(real)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("core_minor", "words"), [(26, f"{SOC_MODEL} 0"), (35, f"{SOC_MODEL} 0"), (36, f"{SOC_MODEL} {SOC_MODEL}")]
)
def test_the_soc_model_is_where_the_library_reads_it(
    farm_cache: Path, tmp_path: Path, core_minor: int, words: str
) -> None:
    """From core API 2.36 on both places have it: QNN 2.49, core API 2.38, reads one, older and newer QNN the other."""
    done = _create(build_native(farm_cache).bridge, _stub(tmp_path, core_minor))
    assert done.stdout.strip() == f"{words} 0", done.stderr


@pytest.mark.parametrize(("option", "custom_option"), [(1, 0), (0, 1)])
def test_every_other_config_passes_as_it_is(farm_cache: Path, tmp_path: Path, option: int, custom_option: int) -> None:
    done = _create(build_native(farm_cache).bridge, _stub(tmp_path, 40), option, custom_option)
    assert done.stdout.strip() == f"{SOC_MODEL} 0 0", done.stderr


def test_a_library_that_is_not_there_is_named(farm_cache: Path) -> None:
    done = _create(build_native(farm_cache).bridge, "/nowhere/libQnnHtp.so")
    assert "cannot load the real library: /nowhere/libQnnHtp.so" in done.stderr
    assert "error 1000" in done.stderr


def test_the_bridge_shows_its_one_entry_point_and_needs_no_c_plus_plus_runtime(farm_cache: Path) -> None:
    bridge = str(build_native(farm_cache).bridge)
    symbols = run_program(["nm", "--dynamic", "--defined-only", bridge]).stdout.splitlines()
    assert [line.split()[-1] for line in symbols] == ["QnnInterface_getProviders"]
    dynamic = run_program(["readelf", "--dynamic", bridge]).stdout
    assert "Library soname: [libQnnHtp.so]" in dynamic
    assert "NODELETE" in dynamic
    assert "stdc++" not in dynamic
