"""Mutations of the features in docs/evidence/upstream.md, each with a test of that page that was seen failing on it.

    python tests/upstream_mutations.py            apply each in a copy of this checkout and run its test there
    python tests/upstream_mutations.py 3 7        only these
    python tests/upstream_mutations.py --slow     also mutations that build the runner or compile programs

A line for each mutation has the first line of pytest's error. The exit code is 1 where a test passed.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_LIMIT_S = 900.0


class Mutation(NamedTuple):
    """A wrong change, and the test of docs/evidence/upstream.md that fails on it."""

    row: str
    """Subject, the shortened first column of the page."""
    test: str
    file: str
    old: str
    """Text that is there once."""
    new: str
    effect: str
    """Error of the test, as it was observed."""
    slow: bool = False
    """The runner is built anew, or programs are compiled."""

    def applied(self, tree: Path = ROOT) -> str:
        """Return the file with the change. Raises ValueError where its place is not there once."""
        text = (tree / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has the place of the mutation {text.count(self.old)} times: {self.old!r}")
        return text.replace(self.old, self.new)


MUTATIONS = (
    Mutation(
        "LPAI's words are those of ExecuTorch",
        "tests/test_options.py::test_words_are_those_of_executorch",
        "farm/base/backends/lpai.py",
        '{"real_time": 1, "non_real_time": 2}',
        '{"real_time": 2, "non_real_time": 1}',
        "the words of LPAI have each other's numbers",
    ),
    Mutation(
        "options at run time: fps, ftrt_ratio and the others",
        "tests/test_options.py::test_options_go_to_the_compiler_or_to_the_runner_as_numbers",
        "farm/base/backends/lpai.py",
        '**_options("run", "lpai_")',
        '**_options("compile", "lpai_")',
        "lpai_fps and lpai_client_perf_type are compiled in",
    ),
    Mutation(
        "direct mode: domain_id 0, audio DSP, for LPAI",
        "tests/runtime/test_file_lists.py::test_direct_mode_runs_jobs_one_by_one",
        "farm/base/backends/lpai.py",
        "direct_domain=0",
        "direct_domain=3",
        "domain_id is 3 for LPAI, expected 0",
    ),
    Mutation(
        "direct mode is for the DSPs",
        "tests/runtime/test_file_lists.py::test_direct_mode_is_for_the_dsps",
        "farm/builds/runtime/device_files.py",
        "    if not backend.direct_library:\n",
        "    if backend.direct_library is None:\n",
        "GPU is not refused: its files are looked for",
    ),
    Mutation(
        "the skel is signed, by a script",
        "tests/runtime/test_signing.py::test_it_is_signed_recorded_and_staged",
        "farm/builds/runtime/signing/sign.py",
        "output_sha256=sha256_of(made)",
        "output_sha256=sha256_of(source or made)",
        "the record has the hash of the unsigned skel",
    ),
    Mutation(
        "the runner must be root: by su where adbd cannot",
        "tests/devices/test_root.py::test_su_makes_commands_root_where_adbd_cannot",
        "farm/devices/adb/transport.py",
        '(("su", "0", "sh", "-c"), ("su", "-c"))',
        '(("sh", "-c"), ("sh", "-c"))',
        "no way to root is found: '... it has one'",
    ),
    Mutation(
        "SimpleADB asks for the DSP's log (.farf)",
        "tests/execution/test_session.py::test_the_dsp_logs_for_the_runner_that_has_a_skel",
        "farm/devices/execution/workspace.py",
        '{PurePosixPath(runtime.runner).name}.farf"',
        '{PurePosixPath(runtime.runner).name}.log"',
        "no serve_stub.py.farf beside the runner",
    ),
    Mutation(
        "bool, int and text reach get_runtime_spec",
        "tests/test_options.py::test_xnnpack_gets_a_number_a_switch_and_a_text",
        "farm/base/backends/xnnpack.py",
        '"per_model": 1, "global": 2',
        '"per_model": 2, "global": 1',
        "one of the two option sets is left",
    ),
    Mutation(
        "feature.TensorDump: intermediate outputs",
        "tests/results/test_judge.py::test_a_dump_has_as_many_layers_as_the_case_expects",
        "farm/results/judge.py",
        "    per_inference = set(counts)\n",
        "    per_inference = {expected.intermediate_outputs for count in counts if count}\n",
        "passed with one layer, expected 'failed'",
    ),
    Mutation(
        "feature.SpillFill: what the contexts share",
        "tests/results/test_judge.py::test_what_a_feature_gives_has_to_be_what_the_case_expects",
        "farm/results/judge.py",
        "manifest.spill_fill_bytes or 0",
        "manifest.spill_fill_bytes or 1 << 40",
        "passed with nothing shared, expected 'failed'",
    ),
    Mutation(
        "feature.OnlinePrepare: compiled, run on a device alone",
        "tests/results/test_judge.py::test_what_no_simulator_executes_is_skipped_where_its_build_is_right",
        "farm/results/judge.py",
        "    if problem := delegation_problem(job, bundle) or write_problem(bundle):\n        return build_failure(job",
        "    if problem := write_problem(bundle):\n        return build_failure(job",
        "skipped, expected 'failed' for a wrong partition",
    ),
    Mutation(
        "features of a case",
        "tests/test_suites.py::test_a_case_names_features_and_methods",
        "farm/suites/suite.py",
        '"methods": self.methods, "features": self.features}',
        '"methods": self.methods, "features": Features()}',
        "3 keys of cases, expected 5",
    ),
    Mutation(
        "feature.Performance: one process an option set",
        "tests/test_options.py::test_a_sweep_makes_the_plan_wider_and_keeps_each_set_together",
        "farm/suites/suite.py",
        "for soc, options, suite in itertools.product(socs, option_sets, suites):\n        for case in suite.cases:\n",
        "for soc, suite in itertools.product(socs, suites):\n"
        "        for case, options in itertools.product(suite.cases, option_sets):\n",
        "the jobs of two option sets stand in turns",
    ),
    Mutation(
        "a CSV file of the layers",
        "tests/cli/test_debug.py::test_csv_says_of_every_layer_what_its_tensor_is",
        "farm/report/formats/layers_csv.py",
        '"shape": "x".join(',
        '"shape": ",".join(',
        "the shape is 1,3, expected 1x3",
    ),
    Mutation(
        "an SVG of the graph, coloured by error",
        "tests/report/test_layer_graph.py",
        "farm/report/html/layer_graph.py",
        'box.attrib |= {"stroke": "#b00020", "stroke-width": "3"} if diverging else',
        'box.attrib |= {"stroke": "#b00020", "stroke-width": "3"} if not diverging else',
        "all boxes but that of the wrong layer have the red frame",
    ),
    Mutation(
        "operators have their modules and those of the exported program",
        "tests/cli/test_debug.py::test_operators_ahead_of_time_and_at_run_time_are_a_table",
        "farm/cli/running/debug.py",
        '" ".join(layer.ran) or "-"',
        '" ".join(layer.exported) or "-"',
        "the operators of the exported program stand at run time",
    ),
    Mutation(
        "Module::load copies the options",
        "tests/native_runner/test_configure.py::test_a_loader_that_does_not_copy_its_options_is_refused",
        "native_runner/cmake/executorch.cmake",
        "if(NOT copies)\n",
        "if(NOT EXECUTORCH_INCLUDE_DIRS)\n",
        "exit code 0 of cmake, expected another",
    ),
    Mutation(
        "options at run time reach the backend",
        "tests/native_runner/test_contract.py::test_runtime_options_of_lpai_reach_the_backend",
        "native_runner/src/backend_options.cpp",
        '"lpai_core_selection", flags.lpai_core_selection',
        '"lpai_core_selection", flags.lpai_affinity',
        "core_selection is 2, expected 3",
        slow=True,
    ),
    Mutation(
        "a load that fails leaves the earlier options",
        "tests/native_runner/test_load_options.py::"
        "test_a_load_that_fails_after_it_read_the_options_keeps_them_for_the_next",
        "native_runner/src/program.cpp",
        "check(options.size() > 0 ? module_->load(options, kVerification)",
        "static bool first = true;\n  check(std::exchange(first, false) ? module_->load(options, kVerification)",
        "the second and the third load get no options",
        slow=True,
    ),
    Mutation(
        "several inputs in any order",
        "tests/compile/test_debug.py::test_several_inputs_in_another_order_keep_their_handles",
        "farm/builds/compile/debug/compiler.py",
        'write_tensors(bundle / INPUTS, "input", [inputs],',
        'write_tensors(bundle / INPUTS, "input", [inputs[::-1]],',
        "the reference of the sigmoid's layer is far from the simulator's value",
        slow=True,
    ),
    Mutation(
        "operators ahead of time",
        "tests/compile/test_debug.py::test_a_layer_has_its_module_its_line_and_operators_ahead_of_time_and_at_run_time",
        "farm/builds/compile/debug/reference.py",
        "_OPERATOR.fullmatch(str(source.target)) else last",
        "not last else last",
        "the node's edge operator with its whole schema stands ahead of time",
        slow=True,
    ),
    Mutation(
        "debug handles: what a layer's tensor is",
        "tests/compile/test_debug.py::test_a_layer_says_what_its_tensor_is",
        "farm/builds/compile/debug/reference.py",
        "(most - least).bit_length()",
        "(most - least).bit_length() + 1",
        "the dtype is uint9, expected uint8",
        slow=True,
    ),
    Mutation(
        "six files more are signed for direct mode",
        "tests/cli/test_sign.py::test_all_that_upstreams_build_signed_is_adopted_by_one_command",
        "farm/builds/runtime/signing/sign.py",
        "    for part, path in there:\n        adopt(part.path, path)\n",
        "    for part, path in there[:1]:\n        adopt(part.path, path)\n",
        "the skel alone is adopted, expected six files more with their records",
    ),
    Mutation(
        "direct mode: the runner's times",
        "tests/execution/test_one_shot.py",
        "farm/devices/execution/one_shot.py",
        "mean = float(total[1]) / lines",
        "mean = float(total[1])",
        "6 ms for an inference of 2 ms",
    ),
    Mutation(
        "heap before the first context and after the last",
        "tests/results/test_heap.py::test_a_number_is_one_that_exactly_one_line_states",
        "farm/results/heap.py",
        '{b"DSP:before_context_created": "before", b"DSP:after_context_freed": "after"}',
        '{b"DSP:before_context_created": "after", b"DSP:after_context_freed": "before"}',
        "before and after have each other's numbers",
    ),
    Mutation(
        "the file of the heap is what a crash leaves of it",
        "tests/results/test_heap.py::test_no_file_crashes_it_or_makes_it_tell_a_number_that_is_not_there",
        "farm/results/heap.py",
        "(stated[0] if len(stated) == 1 else None for",
        "(stated[0] if stated else None for",
        "a number is told that two lines state",
    ),
    Mutation(
        "known issues in its Wiki",
        "tests/results/test_known_troubles.py",
        "farm/results/known_troubles.py",
        "|transportStatus(?: ?=|:) ?-1\\b",
        "|transportStatus=-1\\b",
        "the reason stays 'Loading of method forward failed', without the trouble",
    ),
    Mutation(
        "lpai_version of a profile",
        "tests/test_profiles.py",
        "device_profiles/SM8850.toml",
        "lpai_version = 6",
        "lpai_version = 5",
        "SM8850 has LPAI v5, expected v6",
    ),
)


def main(words: list[str]) -> int:
    """Apply mutations in a copy of the checkout; return 1 where the test of one passed."""
    sys.path[:0] = [str(ROOT / "tools")]
    from mutants import Bench

    numbers = {int(word) for word in words if word.isdecimal()}
    passed = 0
    with tempfile.TemporaryDirectory(prefix="upstream-mutations-") as folder:
        bench = Bench(ROOT, Path(folder))
        for number, mutation in enumerate(MUTATIONS, start=1):
            if (numbers and number not in numbers) or (mutation.slow and not numbers and "--slow" not in words):
                continue
            original = (bench.tree / mutation.file).read_text()
            (bench.tree / mutation.file).write_text(mutation.applied(bench.tree))
            code, log = bench.pytest(["-q", "-x", mutation.test], _LIMIT_S)
            (bench.tree / mutation.file).write_text(original)
            error = re.search(r"^E +(.*)$", log, re.MULTILINE)
            print(f"{number}: {mutation.test}: exit {code}: {error[1] if error else log[-200:]}", flush=True)  # noqa: T201
            passed += code != 1
    return int(passed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
