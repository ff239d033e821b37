"""ELF headers, folders that look like SDKs and builds as far as the runtime looks, and the wheel's real skels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from elf_maker import SIGNED, UNSIGNED, make_elf

from farm.base.config.settings import Config, load_config
from farm.builds.runtime.packages import fetch_wheel
from farm.builds.runtime.signing import adopt


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content + path.name.encode())


def _processor(root: Path, *names: str, machine: int = 183) -> None:
    for name in names:
        _write(root / name, make_elf(machine, wide=True))


def _hexagon(root: Path, arch: int, *names: str, segments: tuple[tuple[int, int], ...] = UNSIGNED) -> None:
    for name in names:
        _write(root / name, make_elf(164, int(str(arch), 16), segments=segments))


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    """A stub of an SDK, complete for SM8650 (V75), SM8850 (V81) and the latter's LPAI (v6), with a signed skel."""
    root = tmp_path / "stub-sdk"
    names = [f"libQnn{name}.so" for name in ("System", "Htp", "HtpPrepare", "HtpV75Stub", "HtpV81Stub", "Gpu")]
    names += ["libQnnLpai.so", "libQnnLpaiStub.so"]
    for folder in ("aarch64-android", "aarch64-oe-linux-gcc9.3", "aarch64-oe-linux-gcc11.2"):
        _processor(root / "lib" / folder, *names)
    for arch in (75, 81):
        files = (f"libQnnHtpV{arch}Skel.so", f"libQnnHtpV{arch}.so", "libQnnSystem.so")
        _hexagon(root / "lib" / f"hexagon-v{arch}" / "unsigned", arch, *files)
    lpai = root / "lib" / "lpai-v6"
    _hexagon(lpai / "unsigned", 81, "libQnnLpaiSkel.so", "libQnnLpai.so")
    _hexagon(lpai / "signed", 81, "libQnnLpaiSkel.so", segments=SIGNED)
    adopt(lpai / "unsigned" / "libQnnLpaiSkel.so", lpai / "signed" / "libQnnLpaiSkel.so")
    (root / "sdk.yaml").write_text("product: stub\nversion: 2.40.0.1\n")
    _processor(root / "lib" / "x86_64-linux-clang", "libQnnHtp.so", machine=62)
    return root


@pytest.fixture
def sdk_for_host(sdk: Path) -> Path:
    """The same, with libraries for the LPAI on this machine."""
    names = ("libQnnLpai.so", "libQnnLpaiPrepare_v6.so", "libQnnSystem.so", "libc++.so.1")
    _processor(sdk / "lib" / "x86_64-linux-clang", *names, machine=62)
    return sdk


@pytest.fixture
def config(tmp_path: Path, sdk: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration with that SDK and stubs of ExecuTorch's builds and of the Hexagon tools."""
    for name in ("ANDROID_NDK_ROOT", "HEXAGON_SDK_ROOT", "HEXAGON_TOOLS_ROOT"):
        monkeypatch.delenv(name, raising=False)
    for kind in ("android", "linux"):
        build = tmp_path / f"stub-build-{kind}"
        _processor(build / "examples/qualcomm/executor_runner", "qnn_executor_runner")
        _processor(build / "backends/qualcomm", "libqnn_executorch_backend.so")
        names = ("qnn_executor_direct_runner", "libqnn_executorch_stub.so")
        _processor(build / "examples/qualcomm/direct_executor_runner", *names)
    direct = tmp_path / "stub-build-direct"
    _hexagon(direct / "backends/qualcomm", 75, "libqnn_executorch_backend.so")
    _hexagon(direct / "backends/qualcomm/qnn_executorch/direct_mode", 75, "libqnn_executorch_skel.so")
    tools = tmp_path / "stub-tools"
    for arch in (75, 81):
        folder = tools / "Tools/target/hexagon/lib" / f"v{arch}" / "G0/pic"
        _hexagon(folder, arch, "libc++.so.1", "libc++abi.so.1")
    return msgspec.structs.replace(
        load_config(folder=tmp_path),
        cache_dir=tmp_path / "own-cache",
        sdk_root=sdk,
        executorch_build=tmp_path / "stub-build-android",
        executorch_linux_build=tmp_path / "stub-build-linux",
        executorch_direct_build=direct,
        hexagon_tools_root=tools,
    )


@pytest.fixture(scope="session")
def qnn_wheel(farm_cache: Path) -> Path:
    """The libraries of the aarch64 wheel of onnxruntime-qnn: real ones of Qualcomm, with unsigned skels."""
    return fetch_wheel(farm_cache, "onnxruntime-qnn") / "onnxruntime_qnn"
