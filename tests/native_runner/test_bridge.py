"""The bridge hands one word over where a library reads it, and changes nothing else. The library here is a stub;
test_run.py shows that the real one works behind the bridge."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from built_stub import qnn_stub
from programs import run_program

from farm.builds.runtime.native.build import build_native

HERE = Path(__file__).parent
SOC_MODEL = 57


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


def test_the_soc_model_is_where_the_library_reads_it_and_other_configs_pass_as_they_are(farm_cache: Path) -> None:
    """From core API 2.36 on both places have it: QNN 2.49, core API 2.38, reads one, older and newer QNN the other."""
    bridge = build_native(farm_cache).bridge
    for core_minor, options, words in (
        (26, (), f"{SOC_MODEL} 0"),
        (35, (), f"{SOC_MODEL} 0"),
        (36, (), f"{SOC_MODEL} {SOC_MODEL}"),
        (36, (1, 0), f"{SOC_MODEL} 0"),
        (36, (0, 1), f"{SOC_MODEL} 0"),
    ):
        done = _create(bridge, qnn_stub(farm_cache, core_minor), *options)
        assert done.stdout.strip() == f"{words} 0", done.stderr


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
