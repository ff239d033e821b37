"""ExecuTorch's own LPAI tests under `farm pytest`: the SDK that their `SimpleADB` looks into, and one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farm.pytest_plugin.upstream import TARGET, lay_out_sdk
from farm.suites.socs import find_soc

if TYPE_CHECKING:
    from pathlib import Path


def test_what_the_sdk_has_for_a_phone_stays_visible_beside_the_stubs(tmp_path: Path) -> None:
    sdk = tmp_path / "sdk"
    files = ("sdk.yaml", f"lib/{TARGET}/libQnnLpai.so", f"lib/{TARGET}/libQnnNew.so", "lib/lpai-v6/unsigned/a.so",
             "lib/lpai-v6/signed/libQnnLpaiSkel.so", "lib/hexagon-v81/unsigned/libQnnSystem.so",
             "lib/x86_64-linux-clang/libQnnLpai.so")  # fmt: skip
    for name in files:
        (sdk / name).parent.mkdir(parents=True, exist_ok=True)
        (sdk / name).write_text(name)
    laid_out = lay_out_sdk(tmp_path / "laid-out", sdk, find_soc("SM8850"))
    assert {name: (laid_out / name).read_text() for name in files} == {name: name for name in files}
    for name in (f"{TARGET}/libQnnLpaiStub.so", f"{TARGET}/libQnnHtp.so", "hexagon-v81/unsigned/libQnnHtpV81Skel.so"):
        assert "stub" in (laid_out / "lib" / name).read_text()
    # The SDK itself is as it was.
    assert {str(path.relative_to(sdk)) for path in sdk.rglob("*") if path.is_file()} == set(files)
