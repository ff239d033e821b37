"""Address of a bundle: what decides it, and what does not."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
from pathlib import Path

import made
import msgspec
import pytest

from farm.base.backends.registry import BACKENDS
from farm.base.errors import ConfigError, IllegalTargetError
from farm.base.socs import find_soc
from farm.builds.bundles import key as key_module
from farm.builds.bundles.key import (
    HOST_CPU,
    bundle_key,
    forget_sources,
    named_files,
    recipe_files,
    relevant_versions,
    shares_weights,
)
from farm.suites.generate import Generate, Mode
from farm.suites.manifests import load_suite
from farm.suites.suite import (
    Case,
    InputSpec,
    Job,
    KnownIssue,
    Limits,
    State,
    Suite,
    Target,
    Tolerance,
    plan,
    state_problem,
)

ROOT = Path(__file__).parents[2]
VERSIONS = {"executorch": "1.5.1", "torch": "2.13.0", "torchao": "0.18.0", "qnn": "2.51"}
ATTACHED, VIRTUAL = {**VERSIONS, HOST_CPU: "arm"}, {**VERSIONS, HOST_CPU: "x86"}


@pytest.fixture(autouse=True)
def _as_in_a_new_process() -> None:
    forget_sources()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "ops.py").write_text("class Relu: ...\n")
    return made.job("relu", module=".ops:Relu", folder=str(tmp_path))


def changed(job: Job, **fields: object) -> Job:
    return Job(msgspec.structs.replace(job.case, **fields), job.target)


def test_what_is_compiled_decides_the_key(job: Job) -> None:
    keys = {
        bundle_key(job, VERSIONS),
        bundle_key(job, {**VERSIONS, "qnn": "2.50"}),
        bundle_key(changed(job, seed=1), VERSIONS),
        bundle_key(changed(job, kwargs={"inplace": True}), VERSIONS),
        bundle_key(changed(job, inputs=(InputSpec(shape=(1, 4), seed=1),)), VERSIONS),
        bundle_key(changed(job, samples=2), VERSIONS),
        bundle_key(Job(job.case, Target("SM8750", "htp", "8a8w")), VERSIONS),
        bundle_key(Job(job.case, Target("SM8650", "htp", "16a16w")), VERSIONS),
    }
    assert len(keys) == 8


def test_options_decide_when_they_are_compiled_in(job: Job) -> None:
    plain = bundle_key(job, VERSIONS)

    def key(*options: tuple[str, str]) -> str:
        return bundle_key(Job(job.case, Target("SM8650", "htp", "8a8w", options)), VERSIONS)

    assert key(("htp_performance_mode", "burst")) == plain
    assert key(("htp_performance_mode", "burst"), ("use_dlbc", "true")) == key(("use_dlbc", "true")) != plain
    assert key(("use_dlbc", "false")) not in {plain, key(("use_dlbc", "true"))}


def test_lpai_bundles_of_virtual_devices_are_their_own(job: Job) -> None:
    lpai = Job(job.case, Target("SM8850", "lpai", "8a8w"))
    assert bundle_key(lpai, ATTACHED) != bundle_key(lpai, VIRTUAL)
    assert bundle_key(job, ATTACHED) == bundle_key(job, VIRTUAL)
    assert relevant_versions("lpai", VIRTUAL)["host_cpu"] == "x86"
    assert "host_cpu" not in relevant_versions("htp", VIRTUAL)


def _of_text(job: Job, mode: Mode = "kv", **names: str) -> Job:
    generate = msgspec.structs.replace(Generate(mode=mode, prompt_lengths=(4,)), **names)
    return changed(job, module="", inputs=(), generate=generate)


@pytest.mark.parametrize(("mode", "is_shared"), [("kv", False), ("hybrid", True), ("lookahead", True)])
def test_methods_share_weights_on_attached_devices_alone(job: Job, mode: Mode, *, is_shared: bool) -> None:
    text = _of_text(job, mode)
    assert (bundle_key(text, ATTACHED) != bundle_key(text, VIRTUAL)) == is_shared
    assert (shares_weights(text, ATTACHED), shares_weights(text, VIRTUAL)) == (is_shared, False)
    assert ("host_cpu" in relevant_versions("htp", VIRTUAL, text.case)) == is_shared
    assert not shares_weights(changed(text, pte="ops.py"), ATTACHED)


def test_every_file_and_folder_of_a_decoder_decides_by_its_content(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    files = [tmp_path / "prompts.json", tmp_path / "score.json", folder / "config.json", folder / "a.safetensors"]
    readme = folder / "README.md"
    for file in (*files, readme):
        file.write_text("1")
    text = _of_text(job, hugging_face="hf", prompts_file="prompts.json", score_file="score.json")
    assert set(named_files(text.case)) == set(files)
    keys = [bundle_key(text, VERSIONS)]
    for file in (*files, readme):
        file.write_text("2")
        forget_sources()
        keys.append(bundle_key(text, VERSIONS))
    assert len(set(keys)) == 1 + len(files)
    assert keys[-1] == keys[-2]


def test_how_text_is_compiled_leaves_the_bundles_of_other_cases(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    of_text = {path.name for path in recipe_files("htp")} - {path.name for path in recipe_files("htp", text=False)}
    assert {"generate.py", "prompts.py"} <= of_text
    before = bundle_key(job, VERSIONS), bundle_key(_of_text(job), VERSIONS)
    monkeypatch.setattr(key_module, "_RECIPE_OF_TEXT", ("suites/prompts.py",))
    key_module.recipe_digest.cache_clear()
    after = bundle_key(job, VERSIONS), bundle_key(_of_text(job), VERSIONS)
    key_module.recipe_digest.cache_clear()
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_what_is_only_judged_does_not(job: Job) -> None:
    other = changed(
        job,
        suite="t",
        name="other",
        tolerances={"8a8w": Tolerance(fp32=Limits(cosine=0.5))},
        known_issues=(KnownIssue(reason="wrong"),),
    )
    assert bundle_key(other, VERSIONS) == bundle_key(job, VERSIONS)


def test_qnn_decides_nothing_of_what_runs_on_the_cpu(job: Job) -> None:
    cpu = Job(job.case, Target("SM8650", "xnnpack", "fp32"))
    key = bundle_key(cpu, VERSIONS)
    assert key != bundle_key(job, VERSIONS)
    assert key == bundle_key(cpu, {**VERSIONS, "qnn": "2.50"})
    assert key != bundle_key(cpu, {**VERSIONS, "executorch": "1.6.0"})
    assert key != bundle_key(Job(job.case, Target("SM8750", "xnnpack", "fp32")), VERSIONS)


def test_a_change_of_the_suites_code_does_also_in_a_linked_folder(
    job: Job, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shared = tmp_path_factory.mktemp("shared")
    (shared / "net.py").write_text("class Net: ...\n")
    (shared / "back").symlink_to(tmp_path)
    (tmp_path / "models").symlink_to(shared)
    keys = [bundle_key(job, VERSIONS)]
    for file, text in (
        (tmp_path / "ops.py", "from .models.net import Net as Relu\n"),
        (shared / "net.py", "Net = 1\n"),
    ):
        file.write_text(text)
        forget_sources()
        keys.append(bundle_key(job, VERSIONS))
    assert len(set(keys)) == 3
    assert tmp_path / "models" / "net.py" in key_module.suite_files(job.case)


@pytest.mark.parametrize(
    ("imports", "package"), [("import os, yaml", "PyYAML"), ("from numpy.linalg import norm", "numpy")]
)
def test_another_version_of_what_that_code_imports_does(
    job: Job, monkeypatch: pytest.MonkeyPatch, imports: str, package: str
) -> None:
    Path(job.case.folder, "ops.py").write_text(f"{imports}\nclass Relu: pass\n")
    before = bundle_key(job, VERSIONS)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99" if name == package else version(name))
    forget_sources()
    assert bundle_key(job, VERSIONS) != before


@pytest.mark.parametrize(
    "edited", ["mine/blocks.py", "mine/table.json", "mine_too.py", "mine_second.py", "mine_inline.py", "linked/net.py"]
)
def test_an_edit_of_what_that_code_imports_from_a_folder_does(
    edited: str, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "editable"
    (code / "mine").mkdir(parents=True)
    (code / "linked").mkdir()
    imports = "    import mine_too\nimport os.path as path, \\\n    mine_second as two\nif path: import mine_inline\n"
    for name, text in (
        ("mine/__init__.py", ""), ("mine/blocks.py", imports), ("mine/table.json", "[]"), ("linked/net.py", ""),
        ("mine_too.py", "one = 1\n"), ("mine_second.py", ""), ("mine_inline.py", ""), ("not_mine.py", ""),
    ):  # fmt: skip
        (code / name).write_text(text)
    (code / "mine" / "nets").symlink_to(code / "linked")
    # As `pip install -e` leaves it.
    (code / "mine-1.dist-info").mkdir()
    (code / "mine-1.dist-info" / "METADATA").write_text("Name: mine\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(code))
    Path(job.case.folder, "ops.py").write_text("from mine.blocks import Relu\n")
    direct = changed(job, module="mine.blocks:Relu", folder="")
    keys = []
    before = (code / edited).read_text()
    for text in (before, before + "\n#", before):
        (code / edited).write_text(text)
        (code / "not_mine.py").write_text(text)
        forget_sources()
        keys.append((bundle_key(job, VERSIONS), bundle_key(direct, VERSIONS)))
    assert keys[0] == keys[2]
    assert not set(keys[0]) & set(keys[1])


@functools.cache
def _imports(path: Path) -> set[Path]:
    """Return the files of farm that a file imports when it runs."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    files = (ROOT / f"{name.replace('.', '/')}.py" for name in names)
    return {file for file in files if file.is_file()}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_file_that_takes_part_in_a_bundle_decides_its_key(backend: str) -> None:
    # Their values are in the key, or decide the place of a bundle and not its content.
    by_value = {"builds/bundles/key.py"}
    left, seen = list(recipe_files(backend)), set[Path]()
    while left:
        path = left.pop()
        seen.add(path)
        left += _imports(path) - seen
    rooms = {("builds", "compile"), ("builds", "bundles"), ("builds", "program")}
    taking_part = {path for path in seen if path.relative_to(ROOT / "farm").parts[:2] in rooms}
    # The prompts and decoder parameters of a case are computed during its compile.
    of_text = {*recipe_files(backend)} - {*recipe_files(backend, text=False)}
    worked_out = {path for path in of_text if path.is_relative_to(ROOT / "farm" / "suites")}
    assert taking_part | worked_out == {*recipe_files(backend), *(ROOT / "farm" / name for name in by_value)}


def test_a_new_backend_leaves_the_bundles_of_the_others(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bundle_key(job, VERSIONS)
    stub = msgspec.structs.replace(BACKENDS["xnnpack"], name="stub")
    monkeypatch.setitem(BACKENDS, "stub", stub)
    key_module.recipe_digest.cache_clear()
    assert bundle_key(job, VERSIONS) == before
    flows = {path.name for path in recipe_files("xnnpack")}
    assert "xnnpack.py" in flows
    assert "qualcomm.py" not in flows


def test_a_module_that_is_not_installed_is_looked_for_in_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_module, "_wheels", lambda: pytest.fail("all wheels are looked through"))
    case = Case("suite", "case", "not_there_at_all:Net", (InputSpec((1,)),))
    assert key_module.source_digest(case) == key_module.source_digest(case)


# An output that is an input of the next inference, in manifests, keys and plans.

SUITE = """
[suite]
name = "kept"
description = "state"
precisions = ["8a8w"]
[suite.tolerance.8a8w]
fp32 = {{ sqnr_db = 30.0 }}
[case.sums]
module = "torch.nn:ReLU"
samples = {samples}
state = {state}
inputs = [{{ shape = [2] }}, {{ shape = [2], distribution = "constant", low = 0.0 }}]
"""
KEPT = "[{ output = 1, input = 1 }]"


def read_suite(folder: Path, *, samples: int = 3, state: str = KEPT) -> Suite:
    (folder / "kept").mkdir(exist_ok=True)
    (folder / "kept" / "suite.toml").write_text(SUITE.format(samples=samples, state=state))
    return load_suite(folder / "kept" / "suite.toml")


def test_what_cannot_be_a_state_is_known_without_the_module() -> None:
    assert state_problem((), 1, 1) == ""
    assert "give the case samples = 2 or more" in state_problem((State(0, 0),), 1, 1)
    assert "names input 2, and there are 2" in state_problem((State(0, 2),), 2, 3)
    assert "gives input 1 two outputs" in state_problem((State(0, 1), State(1, 1)), 2, 3)


def test_a_manifest_names_it_and_another_state_is_another_bundle(tmp_path: Path) -> None:
    (case,), (other,) = (read_suite(tmp_path, state=state).cases for state in (KEPT, "[]"))
    assert case.state == (State(output=1, input=1),)
    assert len({bundle_key(Job(one, Target("SM8650", "htp", "8a8w")), {"qnn": "1"}) for one in (case, other)}) == 2
    with pytest.raises(ConfigError, match=r"case\.sums\.state: goes from one sample to the next, and there is one"):
        read_suite(tmp_path, samples=1)


def test_direct_mode_has_no_state(tmp_path: Path) -> None:
    with pytest.raises(IllegalTargetError, match="passes none between samples"):
        plan([read_suite(tmp_path)], [find_soc("SM8650")], "htp", option_sets=[(("direct_mode", "true"),)])
