"""Suite of the backend's features on the simulator: executable cases pass, all others are compiled and skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from farm_home import FarmHome

pytestmark = pytest.mark.whole

MAIN = ("run", "--soc", "SM8650", "--suite", "features", "--virtual", "1")
# Quickest case of each kind.
CHEAP = (
    "methods_part or weight_sharing or online_prepare or shared_buffer or state_cell or tensor_dump or saver "
    "or skip_node"
)


@pytest.fixture(scope="module")
def ran(farm_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = FarmHome.make(farm_cache, tmp_path_factory.mktemp("features"))
    return {job["case"]: job["attempts"][-1] for job in home.json(*MAIN, "-k", CHEAP, timeout_s=500)["jobs"]}


def test_what_the_simulator_has_passes(ran: dict[str, Any]) -> None:
    executed = ("methods_part", "shared_buffer", "state_cell", "tensor_dump", "saver", "skip_node")
    assert {case: ran[case]["verdict"] for case in executed} == dict.fromkeys(executed, "passed")


def test_what_only_devices_have_is_compiled_and_skipped(ran: dict[str, Any]) -> None:
    for case, why in (
        ("weight_sharing", "contexts that share weights are not simulated"),
        ("online_prepare", "its graph is made by the device"),
    ):
        assert (ran[case]["verdict"], ran[case]["stage"]) == ("skipped", "build")
        assert why in ran[case]["reason"]
        assert ran[case]["bundle_key"]
