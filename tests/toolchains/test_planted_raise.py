"""A broken compiler turns a run red, also with an unchanged version; once mended, the cache serves its bundles."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest
from executorch_checkout import installed, make_checkout
from farm_home import FarmHome

PASS = Path("backends", "qualcomm", "_passes", "annotate_quant_attrs.py")
BEGIN = re.compile(r"^    def call\(self.*$", re.MULTILINE)
SITE = Path("lib", "python3.11", "site-packages")


def copied_wheel(folder: Path) -> Path:
    """Return a copy of the installed package, with links in place of large files."""

    def place(path: str, target: str) -> None:
        if path.endswith(".so"):
            os.symlink(path, target)
        else:
            shutil.copyfile(path, target)
            shutil.copymode(path, target)

    left_out = shutil.ignore_patterns("__pycache__", "include", "*.pyi", "*.h")
    shutil.copytree(installed(), folder, ignore=left_out, copy_function=place)
    (folder / "include").symlink_to(installed() / "include")
    return folder


def environment(folder: Path, *, editable: bool) -> tuple[Path, Path]:
    """Return the interpreter of an environment of links, and its own ExecuTorch: installed, or in editable mode."""
    site = folder / SITE
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        name = path.name.partition("-")[0]
        if name not in ("executorch", "farm", "snapdragon_farm", "_editable_impl_snapdragon_farm.pth", "__pycache__"):
            (site / path.name).symlink_to(path)
    [facts] = installed().parent.glob("executorch-*.dist-info")
    shutil.copytree(facts, site / facts.name)
    if not editable:
        return folder / "bin" / "python", copied_wheel(site / "executorch")
    (site / facts.name / "RECORD").write_text("")
    (site / "__editable__.executorch.pth").write_text(f"{folder / 'src'}\n")
    return folder / "bin" / "python", copied_wheel(folder / "src" / "executorch")


def red_when_broken(home: FarmHome, package: Path, toolchain: Path) -> None:
    def run() -> tuple[int, str]:
        done = home.farm(
            "run", "--soc", "SM8650", "--suite", "smoke", "-k", "add", "--virtual", "1", "--toolchain", str(toolchain),
            timeout_s=500,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    home.use_one_builder()
    code, text = run()
    assert code == 0, text
    file = package / PASS
    mended = file.read_text()
    file.write_text(BEGIN.sub(r"\g<0>\n        raise RuntimeError('planted')", mended))
    code, text = run()
    assert code == 1, text
    assert "AnnotateQuantAttrs" in text
    file.write_text(mended)
    code, text = run()
    assert code == 0, text
    assert "all compiled already" in text


# tests/compare/test_compare.py plants and mends an error in a checkout with -m whole.
@pytest.mark.soak
@pytest.mark.parametrize("way", ["site-packages", "checkout", "copied wheel", "editable install"])
def test_a_run_is_red_while_the_compiler_is_broken(home: FarmHome, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "executorch"
    if way == "checkout":
        make_checkout(folder)
        red_when_broken(home, folder, folder)
    elif way == "copied wheel":
        red_when_broken(home, copied_wheel(folder), folder)
    else:
        python, package = environment(tmp_path / "env", editable=way == "editable install")
        red_when_broken(home, package, python)
