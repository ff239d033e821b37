from __future__ import annotations

import cProfile
import pstats
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from farm.base.errors import ConfigError, FarmError, IllegalTargetError, UnknownNameError
from farm.base.socs import find_soc
from farm.builds.bundles.key import source_digest, suite_files
from farm.suites.manifests import find_suites, load_suite, resolve_suite
from farm.suites.suite import Case, Expectation, Features, Suite, Target, plan

MANIFEST = """
[suite]
name = "mine"
description = "a suite of a user"
precisions = ["8a8w"]
[suite.tolerance.8a8w.fp32]
sqnr_db = 20.0

[case.relu]
module = "torch.nn:ReLU"
inputs = [{ shape = [1, 8] }]

[case.conv]
module = ".ops:Conv"
kwargs = { channels = 3 }
inputs = [{ shape = [1, 3, 8, 8], distribution = "uniform", seed = 7 }]
precisions = ["8a8w", "16a16w"]
[case.conv.tolerance.8a8w.fp32]
cosine = 0.9
[[case.conv.known_issues]]
reason = "is wrong"
precisions = ["16a16w"]
socs = ["SM8350"]
"""


def _write(folder: Path, text: str = MANIFEST) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "suite.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


def _load(tmp_path: Path, text: str = MANIFEST) -> Suite:
    return load_suite(_write(tmp_path / "mine", text))


def test_a_manifest_becomes_cases_with_the_defaults_of_the_suite(tmp_path: Path) -> None:
    relu, conv = _load(tmp_path).cases
    assert (relu.name, relu.precisions) == ("relu", ("8a8w",))
    assert relu.tolerance("8a8w").fp32.sqnr_db == 20.0
    assert conv.tolerance("8a8w").fp32.cosine == 0.9
    assert conv.known_issue(Target("SM8350", "htp", "16a16w")) is not None
    assert conv.known_issue(Target("SM8650", "htp", "16a16w")) is None
    # Without a tolerance, fp32 may differ by rounding alone.
    assert (relu.tolerance("fp32").fp32.sqnr_db, relu.tolerance("fp32").fp32.mismatch) == (100.0, 0.0)
    _, conv = _load(tmp_path, MANIFEST.replace("conv.tolerance.8a8w.fp32", "conv.tolerance.fp32.fp32")).cases
    assert (conv.tolerance("fp32").fp32.sqnr_db, conv.tolerance("fp32").fp32.cosine) == (None, 0.9)


@pytest.mark.parametrize(
    ("backend", "precisions", "jobs"),
    [
        ("htp", [], ["relu[{}-htp-8a8w]", "conv[{}-htp-8a8w]", "conv[{}-htp-16a16w]"]),
        ("htp", ["16a16w"], ["conv[{}-htp-16a16w]"]),
        ("xnnpack", [], ["relu[{}-xnnpack-fp32]", "conv[{}-xnnpack-fp32]"]),
        ("xnnpack", ["fp32"], ["relu[{}-xnnpack-fp32]", "conv[{}-xnnpack-fp32]"]),
    ],
)
def test_jobs_are_cases_times_targets(tmp_path: Path, backend: str, precisions: list[str], jobs: list[str]) -> None:
    planned = plan([_load(tmp_path)], [find_soc("SM8650"), find_soc("SM8850")], backend, precisions)
    assert [job.id for job in planned] == [f"mine/{job.format(soc)}" for soc in ("SM8650", "SM8850") for job in jobs]


def test_a_case_that_declares_fp32_runs_at_it_on_the_cpu_alone(tmp_path: Path) -> None:
    both = _load(tmp_path, MANIFEST.replace('"8a8w", "16a16w"', '"8a8w", "fp32"'))
    assert [job.target.precision for job in plan([both], [find_soc("SM8650")], "htp")] == ["8a8w", "8a8w"]
    alone = MANIFEST.replace('["8a8w", "16a16w"]', '["fp32"]').replace('precisions = ["8a8w"]', 'precisions = ["fp32"]')
    with pytest.raises(IllegalTargetError, match="no precision for the htp backend: .* that only xnnpack runs"):
        plan([_load(tmp_path, alone)], [find_soc("SM8650")], "htp")


@pytest.mark.parametrize(
    ("says", "covers"),
    [
        ("", {"htp"}),
        ('backends = ["xnnpack"]', {"xnnpack"}),
        ('backends = ["htp", "xnnpack"]', {"htp", "xnnpack"}),
        ('precisions = ["fp32"]', {"xnnpack"}),
        ('precisions = ["8a8w"]', {"htp"}),
    ],
)
def test_a_known_issue_is_of_the_suites_backends_unless_it_says_otherwise(
    tmp_path: Path, says: str, covers: set[str]
) -> None:
    manifest = MANIFEST[: MANIFEST.index("[case.conv]")] + f'[[case.relu.known_issues]]\nreason = "is wrong"\n{says}\n'
    [relu] = _load(tmp_path, manifest).cases
    targets = (Target("SM8650", "htp", "8a8w"), Target("SM8650", "xnnpack", "fp32"))
    assert {target.backend for target in targets if relu.known_issue(target)} == covers


def test_a_known_issue_of_a_stand_in_covers_no_device(tmp_path: Path) -> None:
    stand_in, wrong = '{ reason = "HTP computes", virtual = true }', '{ reason = "is wrong", socs = ["SM8650"] }'
    issues = f"known_issues = [{stand_in}, {wrong}]\n"
    manifest = MANIFEST[: MANIFEST.index("[case.conv]")] + issues
    [relu] = _load(tmp_path, manifest).cases
    reasons = {
        (soc, virtual): issue and issue.reason
        for soc in ("SM8650", "SM8750")
        for virtual in (True, False)
        for issue in [relu.known_issue(Target(soc, "htp", "8a8w"), virtual=virtual)]
    }
    assert reasons == {
        ("SM8650", True): "HTP computes", ("SM8650", False): "is wrong",
        ("SM8750", True): "HTP computes", ("SM8750", False): None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "precision", "says"),
    [
        ("gpu", "fp16", "suite mine is not made for the gpu backend: it is for htp, xnnpack"),
        ("htp", "16a4w", "unknown precision '16a4w'.*chosen suites"),
        ("xnnpack", "16a4w", "the xnnpack backend does not run 16a4w: legal are fp32"),
    ],
)
def test_nothing_impossible_is_dropped_in_silence(tmp_path: Path, backend: str, precision: str, says: str) -> None:
    with pytest.raises((IllegalTargetError, UnknownNameError), match=says):
        plan([_load(tmp_path)], [find_soc("SM8650")], backend, [precision])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[case.relu]", "[case.ReLU]", "case.ReLU: 'ReLU' is not a name"),
        ('"torch.nn:ReLU"', '"torch.nn.ReLU"', "case.relu.module"),
        ("[{ shape = [1, 8] }]", "[]", "case.relu.inputs: at least one input"),
        (
            "shape = [1, 8]",
            'shape = [1], dtype = "float16"',
            r"relu.inputs\[0\].dtype: unknown value 'float16'",
        ),
        ("kwargs = { channels = 3 }", "kwarg = {}", "case.conv: unknown key 'kwarg': did you mean 'kwargs'"),
        ("[case.relu]", "[cases.relu]", "suite.toml: unknown key 'cases': did you mean 'case'"),
        ('["8a8w", "16a16w"]', '["8a8w", "16a17w"]', "case.conv.precisions: '16a17w' is none of"),
        ("cosine = 0.9", "cosine = 1.5", "case.conv.tolerance.8a8w.fp32.cosine: is 1.5, expected at least -1"),
        ("sqnr_db = 20.0", "sqnr_db = nan", "suite.tolerance.8a8w.fp32.sqnr_db: is nan, expected a number"),
        ("seed = 7", "low = 2.0", r"case.conv.inputs\[0\].low: is 2, expected at most high, 1"),
        ('"uniform"', '"integers", low = 3, high = 3', r"inputs\[0\].low: is 3, expected a whole number below high, 3"),
        ("shape = [1, 8]", "shape = [1], high = 9.0", r"relu.inputs\[0\].high: the distribution 'normal' takes scale"),
        ("shape = [1, 8]", "shape = [1, 8], scale = -1", r"case.relu.inputs\[0\].scale: is -1, expected at least 0"),
        (
            "8] }]",
            '8] }]\nmetrics = [{ name = "top1", least = 95 }]',
            r"metrics\[0\].least: is 95, expected at",
        ),
        ("conv.tolerance", "cnv.tolerance", "case.cnv: has neither inputs nor .*: unknown case 'cnv': did you mean"),
        ('name = "mine"', 'name = "other"', "suite.name: is 'other', expected 'mine' as the folder is called"),
        ('socs = ["SM8350"]', 'backends = ["cpu"]', "known_issues.backends: 'cpu' is none of"),
        ('socs = ["SM8350"]', 'socs = ["SM9999"]', "known_issues.socs: 'SM9999' is none of"),
        (
            '"is wrong"',
            '"x"\nstage = "build"\nvirtual = true',
            "known_issues.virtual: a build is for devices",
        ),
        ("[case.relu]", '[[include]]\nsuite = "mine"\ncases = ["relu"]\n[case.relu]', "that never ends"),
        ('module = ".ops:Conv"', 'program = "no.pt2"', "checkpoint, args and kwargs are for a module"),
        ('module = "torch.nn:ReLU"', 'program = "no.pt2"', "'no.pt2' is no file; it is looked for in"),
        ('module = "torch.nn:ReLU"', "", "case.relu: has nothing to run"),
        ('"torch.nn:ReLU"', '"a:B"\nprogram = "x.pt2"', "case.relu.program: there is a module as well"),
        ('module = "torch.nn:ReLU"', 'module = "a:B"\nexpected = [["y.npy"]]', "is for a pte that has neither"),
        ('module = "torch.nn:ReLU"', 'pte = "x.pte"\nexpected = [["y"], ["y"]]', "is for 2 samples, expected 1"),
        ('["8a8w", "16a16w"]', '["ready"]', "'ready' is for a pte alone"),
        ("{ shape = [1, 8] }", '{ dtype = "bool" }', "an input has a shape or files"),
        ("{ shape = [1, 8] }", '{ files = ["a", "b"] }', "are 2, expected one a sample"),
        ("shape = [1, 8]", "shape = [1, 8], dynamic = [{ dim = 2, greatest = 9 }]", "the shape has no dimension 2"),
        ("shape = [1, 8]", "shape = [1, 8], dynamic = [{ dim = 1, greatest = 7 }]", "expected 1 <= least <= it"),
        ("shape = [1, 8] }]", 'shape = [1, 8] }]\nmetrics = [{ name = "top5" }]', "metrics: 'top5' is none of top1"),
        ('"a suite of a user"', '"\udcff"', "suite.toml"),
        ("8] }]", f"8] }}]\nargs = {'[' * 40}{']' * 40}", rf"relu.args{re.escape('[0]') * 33}: is nested more than 32"),
        ("8] }]", "8] }]\nargs = [1, [2026-05-27]]", r"args\[1\]\[0\]: is the date or time 2026-05-27"),
        ("8] }]", "8] }]\nkwargs = { sizes = [1, { least = nan }] }", r"kwargs.sizes\[1\].least: is nan"),
        ("8] }]", "8] }]\nkwargs = { seed = 0x10000000000000000 }", "kwargs.seed: is .*, more than 64 bits"),
        ("8] }]", f"8] }}]\nargs = {'[' * 5000}{']' * 5000}", "suite.toml: lists or tables are nested too deeply"),
    ],
)
def test_a_broken_manifest_names_file_and_key(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in MANIFEST
    with pytest.raises(ConfigError, match=says) as caught:
        _load(tmp_path, MANIFEST.replace(old, new))
    assert str(tmp_path / "mine" / "suite.toml") in str(caught.value)


FEATURES = (
    MANIFEST[: MANIFEST.index("[case.conv]")]
    + """
method = "encode"
features = { use_multi_contexts = true, skip_node_ops = ["aten.add.Tensor"] }

[case.relu.methods]
encode = {}
decode = { inputs = [{ shape = [1, 4] }] }

[[case.relu.expect]]
least_spill_fill_bytes = 4096
"""
)

PACKAGED = (
    "op_packages = [{ name = 'P', operator = 'my_ops.mul3.default', qnn_operator = 'Mul3', interface_provider = 'Get', "
    "library = 'x.so', %s }], skip_node_ops"
)


def test_a_case_names_features_and_methods(tmp_path: Path) -> None:
    [relu] = _load(tmp_path, FEATURES).cases
    assert relu.features.named == ("use_multi_contexts", "skip_node_ops")
    assert (relu.method, list(relu.methods), relu.methods["decode"].inputs[0].shape) == (
        "encode", ["encode", "decode"], (1, 4),
    )  # fmt: skip
    expected = relu.expectation(Target("SM8650", "htp", "8a8w"))
    assert expected is not None
    assert expected.least_spill_fill_bytes == 4096
    # Both are in the key, and cases without them keep theirs.
    usual = msgspec.structs.replace(relu, method="forward", methods={}, features=Features())
    changes: list[dict[str, Any]] = [
        {}, {"method": "encode"}, {"methods": relu.methods}, {"features": relu.features},
        {"features": Features(split=2)},
    ]  # fmt: skip
    definitions = {repr(msgspec.structs.replace(usual, **change).definition) for change in changes}
    assert len(definitions) == len(changes)
    assert "Features" not in repr(usual.definition)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("use_multi", "use_multy", "case.relu.features: unknown key 'use_multy_contexts': did you mean"),
        ("use_multi_contexts = true", "split = 4", "case.relu.features: split makes several contexts, which want"),
        ("skip_node_ops", "online_prepare = true, skip_node_ops", "online_prepare makes one context on the device"),
        ('method = "encode"', 'method = "encoed"', "case.relu.method: unknown method 'encoed': did you mean 'encode'"),
        ('method = "encode"', 'method = "../x"', "case.relu.method: '../x' is no name of a method"),
        ("encode = {}", "encode = { inputs = [{ shape = [2] }] }", "takes the inputs of the case: leave these out"),
        ("[{ shape = [1, 4] }]", "[{ shape = [0] }]", "case.relu.methods.decode.inputs: every dimension is at least 1"),
        ("use_multi_contexts", "dump_intermediate_outputs", "ExecuTorch writes the layers of one method"),
        ("use_multi_contexts = true", "split = -4", r"case.relu.features.split: Expected `int` >= 0"),
        ("bytes = 4096", f"bytes = {10**30}", r"least_spill_fill_bytes: Expected `int` <= 9007199254740992"),
        ("least_spill_fill_bytes = 4096", "fallback_ops = { a = -1 }", r"fallback_ops.a: Expected `int` >= 1"),
        ('module = "torch.nn:ReLU"', 'pte = "suite.toml"', "methods and features are for compiled cases"),
        ('module = "torch.nn:ReLU"', 'program = "suite.toml"', "an exported program has one method, forward"),
        ("skip_node_ops", "op_packages = [{ name = 'P' }], skip_node_ops", "case.relu.features.op_packages"),
        ("skip_node_ops", PACKAGED % "android = 'x.so'", "op_packages: .* beside android there is no hex"),
        ("skip_node_ops", PACKAGED % "hexagon = { v75 = 'x.so' }", "beside hexagon there is no android"),
        ("skip_node_ops", PACKAGED % "hexagon = { 75 = 'x.so' }", "hexagon.75 is no architecture: name the DSP's as"),
        ("skip_node_ops", PACKAGED % "android = ''", "case.relu: 'x.so' is no file"),
    ],
)
def test_features_and_methods_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in FEATURES
    with pytest.raises(ConfigError, match=says):
        _load(tmp_path, FEATURES.replace(old, new, 1))


def test_a_feature_is_for_backends_that_have_it_and_left_out_on_the_cpu(tmp_path: Path) -> None:
    text = FEATURES.replace('precisions = ["8a8w"]', 'backends = ["htp", "lpai"]\nprecisions = ["8a8w"]', 1)
    suite = _load(tmp_path, text)
    assert len(plan([suite], [find_soc("SM8650")], "htp")) == len(plan([suite], [find_soc("SM8650")], "xnnpack")) == 1
    with pytest.raises(IllegalTargetError, match="mine/relu: use_multi_contexts is for htp, not for the lpai backend"):
        plan([suite], [find_soc("SM8850")], "lpai")


def test_op_packages_are_in_the_key_by_content_and_not_for_direct_mode(tmp_path: Path) -> None:
    features = FEATURES.replace("skip_node_ops", PACKAGED % "android = 'a.so', hexagon = { v75 = 'h.so' }")
    path = _write(tmp_path / "mine", features)
    libraries = [path.parent / name for name in ("x.so", "a.so", "h.so")]
    for library in libraries:
        library.write_bytes(b"one")
    [relu] = (suite := load_suite(path)).cases
    digests = {source_digest(relu)}
    for library in libraries:
        library.write_bytes(b"two")
        digests.add(source_digest(relu))
    assert len(digests) == 1 + len(libraries)
    with pytest.raises(IllegalTargetError, match="mine/relu: op_packages is not for direct mode"):
        plan([suite], [find_soc("SM8650")], "htp", option_sets=((("direct_mode", "true"),),))


@pytest.mark.parametrize(
    ("module", "left_out"), [("..nets:Sum", {"other.py"}), ("..layers:Sum", {"nets.py", "other.py"})]
)
def test_code_beside_a_suite_counts_with_all_that_it_imports(tmp_path: Path, module: str, left_out: set[str]) -> None:
    """An edit of these files makes another bundle."""
    code = {
        "nets.py": "from .layers import Sum\n",
        "layers/__init__.py": "from .deep.sums import Sum\n",
        "layers/deep/sums.py": "from ...shared import one\nfrom ... import plain\n",
        "shared/__init__.py": "one = 1\n",
        "plain.py": "",
        "other.py": "",
    }
    for name, text in code.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    case = Case("mine", "sum", module, (), folder=str(tmp_path / "mine"))
    assert {str(path.relative_to(tmp_path)) for path in suite_files(case)} == code.keys() - left_out
    digests = {source_digest(case)}
    for name, text in code.items():
        (tmp_path / name).write_text(f"{text}edited = 1\n")
        digests.add(source_digest(case))
    assert len(digests) == 1 + len(code) - len(left_out)


def test_arguments_reach_the_builder_as_they_are_written(tmp_path: Path) -> None:
    written = 'args = [[1, [2.5, "x"]], { on = true }, 18446744073709551615]\nkwargs = { deep = [[[[1]]]] }\n'
    suite = _load(tmp_path, MANIFEST.replace("[case.conv]", f"{written}\n[case.conv]"))
    relu = msgspec.json.decode(msgspec.json.encode(suite.cases[0]), type=Case)
    assert relu.args == ([1, [2.5, "x"]], {"on": True}, 18446744073709551615)
    assert relu.kwargs == {"deep": [[[[1]]]]}


def test_many_cases_are_read_in_a_time_that_grows_with_their_number(tmp_path: Path) -> None:
    def steps(count: int) -> int:
        """Return how many calls reading so many cases takes."""
        cases = "".join(f'[case.c{n}]\nmodule = "a:B"\ninputs = [{{ shape = [1] }}]\n' for n in range(count))
        path = _write(tmp_path / "mine", MANIFEST[: MANIFEST.index("[case.relu]")] + cases)
        with cProfile.Profile() as profile:
            assert len(load_suite(path).cases) == count
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    assert steps(200) < 2.2 * steps(100)


def test_an_include_takes_cases_of_a_sibling_under_their_names(tmp_path: Path) -> None:
    _write(tmp_path / "mine")
    quick = '[suite]\nname = "quick"\ndescription = "some"\n[[include]]\nsuite = "mine"\ncases = ["{}"]\n'
    suite = load_suite(_write(tmp_path / "quick", quick.format("conv")))
    assert [(case.suite, case.name) for case in suite.cases] == [("quick", "conv")]
    with pytest.raises(ConfigError, match="did you mean 'conv'"):
        load_suite(_write(tmp_path / "quick", quick.format("convv")))


def test_an_include_without_names_takes_all_but_some_and_fills_in_tolerances(tmp_path: Path) -> None:
    _write(tmp_path / "mine")
    other = """
[suite]
name = "other"
description = "some"
[suite.tolerance.8a8w]
fp32 = { sqnr_db = 1.0 }
[suite.tolerance.fp16]
fp32 = { sqnr_db = 50.0 }
[[include]]
suite = "mine"
precisions = ["fp16"]
without = { conv = "takes long" }
"""
    [relu] = load_suite(_write(tmp_path / "other", other)).cases
    assert (relu.suite, relu.name, relu.precisions) == ("other", "relu", ("fp16",))
    assert relu.tolerance("fp16").fp32.sqnr_db == 50.0
    assert relu.tolerance("8a8w").fp32.sqnr_db == 20.0
    with pytest.raises(ConfigError, match="did you mean 'conv'"):
        load_suite(_write(tmp_path / "other", other.replace("conv =", "convv =")))


def test_suites_are_found_by_name_by_folder_and_by_path(tmp_path: Path) -> None:
    path = _write(tmp_path / "mine")
    known = find_suites([tmp_path])
    assert {"mine", "quantized_ops", "smoke"} <= set(known)
    assert find_suites([tmp_path / "mine"])["mine"] == path
    for name in ("mine", str(tmp_path / "mine"), str(path)):
        assert resolve_suite(name, known).name == "mine"
    with pytest.raises(UnknownNameError, match="did you mean 'quantized_ops'"):
        resolve_suite("quantised_ops", known)
    with pytest.raises(FarmError, match="is no suite and holds none"):
        find_suites([tmp_path / "nowhere"])
    with pytest.raises(ConfigError, match="No such file"):
        resolve_suite("./nowhere", known)
    _write(tmp_path / "smoke", MANIFEST.replace('name = "mine"', 'name = "smoke"'))
    with pytest.raises(ConfigError, match="there is a suite 'smoke' already"):
        find_suites([tmp_path])


def test_the_shipped_suites_have_what_they_promise() -> None:
    known = find_suites()
    operators = load_suite(known["quantized_ops"])
    assert sum("8a8w" in case.precisions for case in operators.cases) >= 190
    assert sum("16a8w" in case.precisions for case in operators.cases) >= 140
    for precision in ("8a4w", "16a16w", "16a4w"):
        assert sum(precision in case.precisions for case in operators.cases) >= 12
    assert len(load_suite(known["smoke"]).cases) == 8


def test_listing_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom farm.suites.suite import plan\nfrom farm.suites.manifests import find_suites, resolve_suite\n"
        "from farm.base.socs import find_soc\n"
        "plan([resolve_suite('quantized_ops', find_suites())], [find_soc('SM8650')], 'htp')\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'executorch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path, timeout=60).returncode == 0


def test_what_a_backend_has_to_take_is_the_first_that_fits(tmp_path: Path) -> None:
    text = MANIFEST.replace("[case.relu]", "[suite.expect]\npartitions = 1\n\n[case.relu]").replace(
        "[case.conv.tolerance", '[[case.conv.expect]]\nprecisions = ["16a16w"]\npartitions = 2\n[case.conv.tolerance'
    )
    relu, conv = _load(tmp_path, text).cases
    eight, sixteen = Target("SM8650", "htp", "8a8w"), Target("SM8650", "htp", "16a16w")
    assert [case.expectation(target) for case in (relu, conv) for target in (eight, sixteen)] == [
        Expectation(1), Expectation(1), Expectation(1), Expectation(2, precisions=("16a16w",)),
    ]  # fmt: skip
    assert relu.expectation(Target("SM8650", "xnnpack", "fp32")) is None
    # The expectation of a suite is for included cases as well.
    head = '[suite]\nname = "other"\ndescription = "d"\n[suite.expect]\npartitions = 3\n'
    _load(tmp_path)
    other = _write(tmp_path / "other", f'{head}[[include]]\nsuite = "mine"\n')
    assert [case.expectation(eight) for case in load_suite(other).cases] == [Expectation(3)] * 2
    with pytest.raises(ConfigError, match=r"expect.precisions: '8a8' is none of"):
        _load(tmp_path, MANIFEST.replace("[case.relu]", '[suite.expect]\nprecisions = ["8a8"]\n\n[case.relu]'))


@pytest.mark.parametrize(
    "limit", ['metrics = [{ name = "top1", least = 0.9 }]', 'tolerance = { "8a8w" = { fp32 = { sqnr_db = 20.0 } } }']
)
def test_limits_that_nothing_could_be_compared_with_are_refused(tmp_path: Path, limit: str) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("x.pte", "y.npy"):
        (tmp_path / "mine" / name).touch()
    head = '[suite]\nname = "mine"\ndescription = "d"\n[case.net]\npte = "x.pte"\ninputs = [{ shape = [1] }]\n'
    key = limit.partition(" ")[0]
    with pytest.raises(ConfigError, match=rf"case.net.{key}: there is no reference for the outputs of the pte"):
        _load(tmp_path, f"{head}{limit}\n")
    _load(tmp_path, f'{head}expected = [["y.npy"]]\n{limit}\n')


def test_a_suite_that_many_includes_name_is_read_once(tmp_path: Path) -> None:
    """A foreign suite keeps a server busy for ever otherwise: 20 levels with 20 includes each."""
    case = '[case.c{}]\nmodule = "torch.nn:ReLU"\ninputs = [{{ shape = [1] }}]\n'
    for level in range(21):
        includes = f'[[include]]\nsuite = "s{level + 1}"\nwithout = {{c{level + 1} = "x"}}\n' * 20 * (level < 20)
        text = f'[suite]\nname = "s{level}"\ndescription = "d"\n{case.format(level)}{includes}'
        last = _write(tmp_path / f"s{level}", text)
    assert [one.name for one in load_suite(tmp_path / "s0" / "suite.toml").cases] == ["c0"]
    last.write_text(last.read_text() + "#" * (1 << 20))
    assert load_suite(last).cases
    with pytest.raises(ConfigError, match="is larger than"):
        load_suite(last, inside=tmp_path)


def test_a_ready_program_runs_at_what_it_says_or_at_no_precision_of_ours(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x.pte").touch()
    text = MANIFEST.replace('module = "torch.nn:ReLU"', 'pte = "x.pte"')
    relu, _ = _load(tmp_path, text).cases
    assert (relu.precisions, relu.precisions_on("htp"), relu.precisions_on("xnnpack")) == (("ready",),) * 3
    labelled = text.replace('pte = "x.pte"', 'pte = "x.pte"\nprecisions = ["8a8w"]')
    relu, _ = _load(tmp_path, labelled).cases
    assert (relu.precisions_on("htp"), relu.precisions_on("xnnpack")) == (("8a8w",), ())
    jobs = plan([_load(tmp_path, text)], [find_soc("SM8650")], "htp", ("ready",))
    assert [job.id for job in jobs] == ["mine/relu[SM8650-htp-ready]"]
