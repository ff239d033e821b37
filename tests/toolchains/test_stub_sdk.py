"""A stub of a QNN SDK by its product name: part of the fingerprint, and a branch of its own."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from farm.base.config.settings import load_config
from farm.base.config.toolchains import ToolchainConfig
from farm.builds.bundles.key import stub_of
from farm.builds.runtime.qnn_sdk import sdk_product, sdk_version
from farm.builds.toolchains.prepare import branch_of
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.dispatch.request.recording import run_record
from farm.store.store import open_store
from farm.store.view import Purpose, RunToolchain


@pytest.fixture
def sdk(tmp_path: Path) -> Path:
    (tmp_path / "sdk").mkdir()
    return tmp_path / "sdk"


@pytest.mark.parametrize(
    ("text", "product", "stub"),
    [
        ("product: stub\nversion: 2.51.0.1\n", "stub", "stub"),
        ("product: 'LPAI Stub'\nversion: 2.51.0.1\n", "LPAI Stub", "LPAI Stub"),
        ("product: QAIRT\nversion: 2.51.0.1\n", "QAIRT", ""),
        ("version: 2.51.0.1\n", "", ""),
        ("product: \x1b[2Jstub\nversion: 2.51.0.1\n", "stub", "stub"),
    ],
)
def test_the_product_of_an_sdk_is_that_of_its_file(sdk: Path, text: str, product: str, stub: str) -> None:
    (sdk / "sdk.yaml").write_text(text)
    assert sdk_product(sdk) == product
    assert sdk_version(sdk) == "2.51.0.1"
    tools = Toolchain({"qnn": "2.51"}, Compiler("", {}), "runner", qnn_product=product)
    facts = tools.fingerprint("virtual")
    assert facts.get("qnn_product", "") == product
    assert stub_of(facts) == stub


def test_no_sdk_has_no_product(sdk: Path) -> None:
    assert (sdk_product(None), sdk_product(sdk)) == ("", "")


def test_runs_over_a_stub_have_a_line_of_their_own(sdk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    config = load_config(folder=tmp_path)
    main = ToolchainConfig(name="main", named=True)
    assert (branch_of(config), branch_of(config, main)) == ("", "main")
    (sdk / "sdk.yaml").write_text("product: stub\nversion: 2.51.0.1\n")
    config = msgspec.structs.replace(config, sdk_root=sdk)
    assert (branch_of(config), branch_of(config, main)) == ("stub", "main stub")


@pytest.mark.parametrize(
    ("then", "now", "branch"),
    [("main", "", "main"), ("main", "stub", "stub"), ("stub", "", ""), ("main stub", "stub", "main stub")],
)
def test_a_program_that_is_run_again_over_a_stub_is_not_compared_with_the_line_of_qualcomms_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, now: str, branch: str
) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    config = load_config(folder=tmp_path)
    tools = Toolchain({"executorch": "1.5.1"}, Compiler("", {}), "runner", branch=now)
    with open_store(config.store_url) as store:
        again = RunToolchain(name="main", branch=then)
        record = run_record(
            config, store, tools, command="farm jobs rerun", facts={}, purpose=Purpose.LOCAL, again=again
        )
    assert (record.toolchain.branch, record.toolchain.private) == (branch, True)
