"""Ids of toolchains: build hosts with the same toolchain by content, at any path, make the bundles of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from log_lines import LogLines
from made_environments import make_environment

from farm.base.backends.registry import BACKENDS
from farm.base.config.settings import load_config
from farm.base.errors import NoDeviceError
from farm.dispatch.cluster.agent.builds import HostToolchains
from farm.dispatch.cluster.toolchain_id import offered, require_offered, toolchain_id
from farm.store.cluster.records import Agent, AgentFacts

VERSIONS = {
    "executorch": "1.5.1", "torch": "2.13.0", "torchao": "0.18.0", "qnn": "2.51", "host_cpu": "arm",
    "executorch_content": "e" * 64, "torch_content": "f" * 64, "qnn_content": "a" * 64,
}  # fmt: skip


def build_host(name: str, versions: Mapping[str, str], *, alive: bool = True) -> Agent:
    answer = offered("default", versions)
    facts = AgentFacts(
        host=name, pid=1, version="1.2", protocol=1, toolchains=tuple({one.id for one in answer}), offered=answer
    )
    return Agent(name, "farm", 0, 0, alive, facts)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_what_decides_about_a_bundle_decides_about_the_id(backend: str) -> None:
    first = toolchain_id(VERSIONS, backend)
    assert toolchain_id(dict(reversed(VERSIONS.items())), backend) == first
    for name in ("executorch", "torch_content", "executorch_content"):
        assert toolchain_id(VERSIONS | {name: "another"}, backend) != first
    assert (toolchain_id(VERSIONS | {"qnn_content": "b" * 64}, backend) == first) == (backend == "xnnpack")
    if backend == "lpai":
        assert toolchain_id(VERSIONS | {"host_cpu": "x86"}, backend) == first


def test_a_run_has_the_living_hosts_of_its_toolchain_or_hears_what_is_different_there() -> None:
    other = build_host("other", VERSIONS | {"executorch": "1.5.0", "executorch_content": "d" * 64})
    dead = build_host("dead", VERSIONS, alive=False)
    agents = [build_host("build-2", VERSIONS), build_host("build-1", VERSIONS), dead, other]
    assert require_offered(agents, VERSIONS, "htp") == ["build-1", "build-2"]
    with pytest.raises(NoDeviceError, match=r"other \(default: executorch: 1\.5\.0 -> 1\.5\.1\).*--build-on here"):
        require_offered([other], VERSIONS, "htp")
    with pytest.raises(NoDeviceError, match="no build host lives"):
        require_offered([dead], VERSIONS, "htp")


def test_another_farm_on_a_build_host_is_named_as_such() -> None:
    host = build_host("build-1", VERSIONS)
    answer = [
        msgspec.structs.replace(one, id="0" * 64, facts=one.facts | {"recipe": "0" * 16}) for one in host.facts.offered
    ]
    facts = msgspec.structs.replace(host.facts, toolchains=("0" * 64,), offered=tuple(answer))
    with pytest.raises(NoDeviceError, match=r"farm's recipe is another: farm 1\.2"):
        require_offered([msgspec.structs.replace(host, facts=facts)], VERSIONS, "xnnpack")


def test_a_host_offers_what_is_there_now_and_says_once_what_cannot_be(tmp_path: Path) -> None:
    broken = make_environment(tmp_path / "broken")
    file = tmp_path / "farm.toml"
    file.write_text(f'[toolchain.broken]\npython = "{broken}"\n')
    notes = LogLines()
    toolchains = HostToolchains(load_config(file))
    assert toolchains.offered == ()
    toolchains.look()
    toolchains.look(at_once=True)
    assert {one.name for one in toolchains.offered} == {"default"}
    assert [note for note in notes if "broken" in note] == [
        f"toolchain broken is not offered: toolchain broken: {broken} has no torch: {broken} -m pip install torch"
    ]
    assert toolchains.find(toolchains.ids[0]) is not None
    assert toolchains.find("0" * 64) is None
