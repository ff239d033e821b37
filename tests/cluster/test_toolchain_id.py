"""Ids of toolchains: build hosts with the same toolchain by content, at any path, make the bundles of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from log_lines import LogLines
from made_environments import make_environment, make_source_tree

from farm.base.backends.registry import BACKENDS
from farm.base.config.settings import load_config
from farm.base.errors import NoDeviceError
from farm.builds.toolchains.prepare import prepare
from farm.builds.toolchains.select import use_toolchain
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


def test_one_toolchain_compiles_for_lpai_of_both_kinds() -> None:
    assert toolchain_id(VERSIONS | {"host_cpu": "x86"}, "lpai") == toolchain_id(VERSIONS, "lpai")


def test_a_run_has_the_living_hosts_of_its_toolchain() -> None:
    agents = [
        build_host("build-2", VERSIONS),
        build_host("build-1", VERSIONS),
        build_host("dead", VERSIONS, alive=False),
        build_host("other", VERSIONS | {"torch": "2.14.0"}),
    ]
    assert require_offered(agents, VERSIONS, "htp") == ["build-1", "build-2"]


def test_who_has_no_build_host_hears_what_is_different_on_those_there_are() -> None:
    agents = [build_host("build-1", VERSIONS | {"executorch": "1.5.0", "executorch_content": "d" * 64})]
    with pytest.raises(NoDeviceError) as raised:
        require_offered(agents, VERSIONS, "htp")
    assert "build-1 (default: executorch: 1.5.0 -> 1.5.1)" in str(raised.value)
    assert "--build-on here" in str(raised.value)
    with pytest.raises(NoDeviceError, match="no build host lives"):
        require_offered([build_host("dead", VERSIONS, alive=False)], VERSIONS, "htp")


def test_another_farm_on_a_build_host_is_named_as_such() -> None:
    host = build_host("build-1", VERSIONS)
    answer = [
        msgspec.structs.replace(one, id="0" * 64, facts=one.facts | {"recipe": "0" * 16}) for one in host.facts.offered
    ]
    facts = msgspec.structs.replace(host.facts, toolchains=("0" * 64,), offered=tuple(answer))
    with pytest.raises(NoDeviceError, match=r"farm's recipe is another: farm 1\.2"):
        require_offered([msgspec.structs.replace(host, facts=facts)], VERSIONS, "xnnpack")


def test_the_same_wheels_elsewhere_are_the_same_toolchain(tmp_path: Path) -> None:
    config = load_config()
    ids = []
    for place in ("ada", "build-host"):
        python = make_environment(tmp_path / place / "venv", ("torch", "torchao", "executorch"))
        tools = prepare(use_toolchain(config, str(python)))
        ids.append([one.id for one in offered("", tools.versions)])
    assert ids[0] == ids[1]
    [site] = (tmp_path / "ada" / "venv").glob("lib/python*/site-packages")
    (site / "torch" / "__init__.py").write_text("edited = True\n")
    tools = prepare(use_toolchain(config, str(tmp_path / "ada" / "venv")))
    assert not set(ids[1]) & {one.id for one in offered("", tools.versions)}


def test_a_checkout_of_the_same_content_is_the_same_toolchain(tmp_path: Path) -> None:
    config = load_config()
    found = []
    for place in ("ada", "build-host"):
        python = make_environment(tmp_path / place / "venv", ("torch", "torchao"))
        tree = make_source_tree(tmp_path / place / "executorch", "1.5.0", built=True)
        (tree / ".venv").symlink_to(python.parents[1])
        found.append(prepare(use_toolchain(config, str(tree))).versions)
    assert toolchain_id(found[0], "xnnpack") == toolchain_id(found[1], "xnnpack")


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
