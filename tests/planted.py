"""Planted regression of the compiler: another release of torchao, which compiles the same case to one layer more.

The release changes two things: a version in the key of every bundle, and code in the builder. The case and its
version stay. A package that the case itself imports would not do, as it is part of the case's version.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from farm_home import FarmHome

JOB = "planted/layers[SM8650-htp-8a8w]"
LAYERS = 12
"""So one more is about 8 % of them."""

_NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        made = [torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(layers)]
        # The last one changes nothing, so that one more of it changes no number.
        torch.nn.init.dirac_(made[-1].weight)
        torch.nn.init.zeros_(made[-1].bias)
        self.layers = torch.nn.ModuleList(made)

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x
"""

_SUITE = f"""
[suite]
name = "planted"
description = "equal layers"

[case.layers]
module = ".nets:Net"
kwargs = {{ layers = {LAYERS} }}
inputs = [{{ shape = [1, 4, 8, 8] }}]
tolerance = {{ "8a8w" = {{ fp32 = {{ sqnr_db = 20.0 }} }} }}
"""

# Python imports it at its start; torch is patched only where a builder imports it.
_HOOK = """
import sys, importlib.abc, importlib.machinery

TIMES = {times}

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torchao.quantization.pt2e.quantize_pt2e":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            prepare = module.prepare_pt2e
            module.prepare_pt2e = lambda graph, quantizer: prepare(repeated(graph), quantizer)
        spec.loader.exec_module = exec_module
        return spec

def repeated(graph_module):
    nodes = list(graph_module.graph.nodes)
    convs = [node for node in nodes if node.op == "call_function" and "conv2d" in str(node.target)]
    if not convs:
        return graph_module
    conv = convs[-1]
    relu = next(iter(conv.users))
    last = relu
    for _ in range(TIMES):
        with graph_module.graph.inserting_after(last):
            again = graph_module.graph.node_copy(conv)
        with graph_module.graph.inserting_after(again):
            after = graph_module.graph.node_copy(relu, lambda node: again if node is conv else node)
        last.replace_all_uses_with(after, delete_user_cb=lambda user: user not in (again, after))
        again.replace_input_with(conv.args[0], last)
        last = after
    graph_module.recompile()
    return graph_module

sys.meta_path.insert(0, Finder())
"""


def write_suite(folder: Path) -> Path:
    """Write the suite and return its folder."""
    folder.mkdir(parents=True)
    (folder / "nets.py").write_text(_NET)
    (folder / "suite.toml").write_text(_SUITE)
    return folder


def write_release(folder: Path, version: str, layers: int) -> Path:
    """Write a torchao `version` that adds `layers`; return the folder for the front of PYTHONPATH."""
    about = folder / f"torchao-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torchao\nVersion: {version}\n")
    # The code of the installed release: metadata alone describe no package.
    installed = importlib.util.find_spec("torchao")
    assert installed is not None
    assert installed.submodule_search_locations
    (folder / "torchao").symlink_to(installed.submodule_search_locations[0])
    (folder / "sitecustomize.py").write_text(_HOOK.replace("{times}", str(layers)))
    return folder


@dataclass(frozen=True)
class Planted:
    """A home with runs of one job, and releases of a compiler."""

    home: FarmHome
    folder: Path
    suite: Path
    releases: dict[int, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Let one builder compile job and health check: each release has builders of its own, which import torch."""
        self.home.use_one_builder()

    def run(self, layers: int = 0, *options: str, nightly: bool = True) -> str:
        """Run the job as compiled by the release that adds `layers`; return the run's id."""
        words = ["run", "--soc", "SM8650", "--suite", str(self.suite), "--virtual", "1", *options]
        words += ["--purpose", "nightly"] if nightly else []
        return str(self.home.json(*words, timeout_s=400, env=self.env(layers))["id"])

    def env(self, layers: int) -> dict[str, str]:
        """Return the environment for compiles with the release that adds `layers`."""
        if not layers:
            return {}
        if layers not in self.releases:
            self.releases[layers] = write_release(self.folder / f"r{layers}", f"0.18.{layers}", layers)
        paths = [str(self.releases[layers]), os.environ.get("PYTHONPATH", "")]
        return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def json(self, *arguments: str, code: int | None) -> dict[str, Any]:
        """Return the JSON of a command. The code None allows 0 and 3, as pairs of equals may differ by chance."""
        done = self.home.farm(*arguments, "--json", timeout_s=400)
        assert done.returncode in ((0, 3) if code is None else (code,)), done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer
