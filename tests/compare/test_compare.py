"""`farm perf compare`: its request, a comparison of real bundles, findings, and its pages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from compare.made import HOSTILE, broken, compiled, everything, job, moved, passed, report, side
from executorch_checkout import commit, make_checkout, make_repository
from farm_home import FarmHome, wait_for_no_process
from in_process import refused
from report_pages import Page

from farm.base.config.settings import load_config
from farm.base.errors import UsageError
from farm.builds.toolchains.toolchain import Compiler, Toolchain
from farm.numbers.compare.compare import require_no_lone_stub, side_result
from farm.numbers.compare.sides import (
    BuiltJob,
    ComparisonRequest,
    SideRequest,
    config_of,
    jobs_of_side,
    own_options,
    shares,
    sides_of,
)
from farm.report.formats.github import add_summary
from farm.report.formats.review import (
    NEW,
    NOT_YOURS,
    REGRESSED,
    compare_commands,
    compare_json,
    compare_markdown,
    compare_review,
)
from farm.report.html.page import render_compare
from farm.report.model.compare import (
    ComparedJob,
    CompareGroup,
    CompareSide,
    SideResult,
    compile_cost,
    overview,
    sentence,
    turns_text,
)
from farm.report.terminal.compare import compare_lines
from farm.suites.suite import Case, InputSpec, Job, Target

# Requests of `farm perf compare`: sides, and refusals before anything is compiled.


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        # Once is for both sides, twice for A and B.
        ((("main",), ("2.49", "2.51"), ()), ("main, QNN 2.49", "main, QNN 2.51")),
        ((("1.4.1", "1.5.1"), (), ()), ("1.4.1", "1.5.1")),
        (((), (), ("", "use_dlbc=true")), ("default", "use_dlbc=true")),
    ],
)
def test_names_of_the_sides(arguments: tuple[tuple[str, ...], ...], names: tuple[str, str]) -> None:
    toolchains, qnns, options = arguments
    assert tuple(side.name for side in sides_of(toolchains, qnns, options, "", "")) == names


def test_the_gate_of_a_pull_request_compares_a_commit_with_the_checkout_as_it_is() -> None:
    a, b = sides_of((), (), (), ".", "origin/main")
    assert (a.toolchain, a.base, b.toolchain, b.base) == (str(Path.cwd()), "origin/main", str(Path.cwd()), "")


def test_a_checkout_and_its_commit_differ_in_nothing_but_their_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "executorch"
    make_repository(folder, {"exir/__init__.py": "", "backends/x.py": "", ".gitignore": "*.so\n"})
    (folder / "backends/qualcomm/python").mkdir(parents=True)
    (folder / "backends/qualcomm/python/PyQnnManagerAdaptor.so").touch()
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "farm.toml").write_text(
        f'[toolchain.main]\ncheckout = "{folder}"\npython = "/opt/python"\nqnn = "2.49"\nbuild = ["make"]\n'
        f'native = {{ android-arm64 = "{folder}/build" }}\n'
    )
    config = load_config(tmp_path / "farm.toml")
    # The test does not check that a toolchain exists.
    select = "farm.builds.toolchains.selection.select"
    monkeypatch.setattr(select, lambda config, toolchain: msgspec.structs.replace(config, toolchain=toolchain))
    for given in (folder, tmp_path / "link"):
        sides = sides_of((), (), (), str(given), "HEAD")
        asked = ComparisonRequest(sides=sides, socs=("SM8650",), suites=("smoke",))
        a, b = (config_of(config, asked, side).toolchain for side in sides)
        assert (b.name, b.checkout, b.python, b.qnn) == (str(given), folder, Path("/opt/python"), "2.49")
        assert msgspec.structs.replace(a, name=b.name, checkout=b.checkout) == b


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (((), (), (), "", ""), "both sides are the same"),
        ((("1.5.0", "1.5.0"), (), (), "", ""), "both sides are the same"),
        ((("a", "b", "c"), (), (), "", ""), "--toolchain is given 3 times"),
        (((), (), (), ".", ""), "--checkout DIR and --base COMMIT belong together"),
        (((), (), (), "", "main"), "--checkout DIR and --base COMMIT belong together"),
        ((("a",), (), (), ".", "main"), "leave --toolchain out"),
    ],
)
def test_what_are_no_two_sides_is_refused(arguments: tuple[tuple[str, ...], ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        sides_of(*arguments)  # type: ignore[arg-type]


def request(*options: str, common: tuple[str, ...] = ()) -> ComparisonRequest:
    a, b = (SideRequest(options=text) for text in options)
    return ComparisonRequest(sides=(a, b), socs=("SM8650",), suites=("smoke",), options=common, keyword="add")


def test_jobs_have_one_name_on_both_sides_and_their_own_options() -> None:
    asked = request("", "use_dlbc=true", common=("htp_performance_mode=burst",))
    a, b = (jobs_of_side(load_config(), asked, side) for side in asked.sides)
    assert list(a) == list(b) == ["smoke/add[SM8650-htp-8a8w-htp_performance_mode=burst]"]
    assert [dict(job.target.options) for side in (a, b) for job in side.values()] == [
        {"htp_performance_mode": "burst"}, {"htp_performance_mode": "burst", "use_dlbc": "true"},
    ]  # fmt: skip
    assert [own_options(asked, side) for side in asked.sides] == [{}, {"use_dlbc": "true"}]


@pytest.mark.parametrize(
    ("options", "common", "problem"),
    [
        (("use_dlbc=true,false", ""), (), "makes 2 targets"),
        (("use_dlbc=true", ""), ("use_dlbc=false",), "use_dlbc is given by --option"),
    ],
)
def test_options_that_are_no_side_are_refused(options: tuple[str, ...], common: tuple[str, ...], problem: str) -> None:
    asked = request(*options, common=common)
    with pytest.raises(UsageError, match=problem):
        jobs_of_side(load_config(), asked, asked.sides[0])


@pytest.mark.parametrize(
    ("builders", "requests", "widths"),
    [(4, (100, 100), [2, 2]), (4, (100, 0), [4, 0]), (4, (100, 1), [3, 1]), (2, (9, 1), [1, 1]), (1, (5, 5), [1, 1])],
)
def test_builders_are_shared_by_how_much_each_side_compiles(
    builders: int, requests: tuple[int, int], widths: list[int]
) -> None:
    assert shares(builders, requests) == widths


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--suite smoke", "both sides are the same"),
        ("--suite smoke --option use_dlbc=true --option use_dlbc=false", "--option is for both sides, --options parts"),
        ("--suite smoke --toolchain nope --toolchain 1.5.0", "unknown toolchain 'nope'"),
        ("--suite smoke --options= --options nope=1", "unknown option of the htp backend 'nope'"),
        ("--suite smoke --options= --options use_dlbc=true --programs-only --max-devices 1", "is for execution"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(words: str, problem: str) -> None:
    assert problem in refused("perf", "compare", *words.split())


# `farm perf compare` on real bundles and the simulator.


SMOKE = ("--suite", "smoke", "--soc", "SM8650")


@pytest.mark.whole
def test_options_of_the_runner_are_measured_on_one_program(home: FarmHome, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ("--options", "", "--options", "htp_performance_mode=burst")
    answer = home.farm(
        "perf", "compare", *SMOKE, "-k", "smoke/add", *options, "--virtual", "1", "--html", str(page), timeout_s=300
    )
    assert answer.returncode in (0, 3), answer.stderr
    [folder] = (home.state / "compares").iterdir()
    data = json.loads((folder / "compare.json").read_bytes())
    [job] = data["jobs"]
    assert (job["name"], job["same"], job["executed"]) == ("smoke/add[SM8650-htp-8a8w]", True, True)
    assert job["b"]["job_id"] == "smoke/add[SM8650-htp-8a8w-htp_performance_mode=burst]"
    metrics = {one["metric"]: one for one in job["metrics"]}
    assert metrics["htp_cycles"]["pairs"] >= 6
    assert metrics["htp_cycles"]["decides"]
    assert not metrics["latency"]["decides"]
    assert metrics["sqnr_fp32[0]"]["a"] == metrics["sqnr_fp32[0]"]["b"]
    assert page.read_text() == (folder / "compare.html").read_text()
    assert "htp_performance_mode=burst" in page.read_text()
    # A comparison is no run.
    assert home.json("runs", "list")["total"] == 0
    assert wait_for_no_process(home) == {}


@pytest.mark.whole
def test_a_pull_request_is_stopped_by_a_pass_that_raises_and_by_nothing_else(home: FarmHome, tmp_path: Path) -> None:
    home.use_one_builder()
    checkout = tmp_path / "executorch"
    make_checkout(checkout)
    commit(checkout, "Say what it is", {"README.md": "a checkout\n"})
    arguments = ("perf", "compare", *SMOKE, "-k", "smoke/add or smoke/softmax", "--checkout", str(checkout), "--json")
    arguments += ("--programs-only", "--base")

    answer = home.farm(*arguments, "HEAD~1", timeout_s=500, code=0)
    assert json.loads(answer.stdout)["sentence"] == "B changes no program of these 2 jobs"

    builder = checkout / "backends/qualcomm/builders/op_softmax.py"
    text = builder.read_text()
    assert text.count("def define_node(") == 1
    head, _, tail = text.partition("        input_node = ")
    builder.write_text(f'{head}        raise RuntimeError("planted")\n        input_node = {tail}')
    answer = home.farm(*arguments, "HEAD", timeout_s=500, code=3)
    data = json.loads(answer.stdout)
    groups = {job["name"].partition("[")[0]: (job["group"], job["text"]) for job in data["jobs"]}
    assert groups["smoke/add"] == ("same", "")
    assert groups["smoke/softmax"][0] == "newly_failing"
    assert "planted" in groups["smoke/softmax"][1]
    assert data["sides"][1]["facts"]["dirty"] == "yes"

    # Taken back, nothing is compiled again.
    builder.write_text(text)
    answer = home.farm(*arguments, "HEAD", timeout_s=500, code=0)
    assert "compiling" not in answer.stderr


# Findings of a comparison of two sides: pure values.


FAILED = {"verdict": "failed", "reason": "output 0: sqnr 12 dB < 20 dB"}
MUL_ADD = {"aten.mul.Tensor": 1, "aten.add.Tensor": 1}


@pytest.mark.parametrize(
    ("one", "group"),
    [
        (job(side("p"), side("p")), CompareGroup.SAME),
        (job(passed("p"), passed("q")), CompareGroup.DIFFERENT),
        (job(passed("p"), broken()), CompareGroup.NEWLY_FAILING),
        (job(passed("p"), side("q", **FAILED)), CompareGroup.NEWLY_FAILING),
        (job(broken(), broken("another reason")), CompareGroup.FAILING),
        (job(broken(), passed("q")), CompareGroup.NEWLY_PASSING),
        # A known issue is no news on either side.
        (job(passed("p"), side("q", **FAILED, known_issue="#12"), moved(answer="none")), CompareGroup.DIFFERENT),
        (job(side("p", **FAILED, known_issue="#12"), side("q", **FAILED, known_issue="#12")), CompareGroup.FAILING),
        (job(side("p", **FAILED, known_issue="#12"), passed("q")), CompareGroup.NEWLY_PASSING),
        # A failure other than the known one is news.
        (job(side("p", **FAILED, known_issue="#12"), broken()), CompareGroup.NEWLY_FAILING),
        (job(passed("p"), passed("q"), moved()), CompareGroup.WORSE),
        (job(passed("p"), passed("q"), moved("latency", decides=False)), CompareGroup.DIFFERENT),
        (job(passed("p"), passed("q"), moved(answer="better", change=-0.1)), CompareGroup.BETTER),
        (job(passed("p"), passed("q"), moved(), moved(answer="better")), CompareGroup.WORSE),
        (job(side("p"), side("q", fallback_ops={"aten.add.Tensor": 1})), CompareGroup.WORSE),
        (job(side("p", fallback_ops={"aten.add.Tensor": 2}), side("q")), CompareGroup.BETTER),
        # A fusion: less in delegates, or two operators on the CPU that became one. Neither is worse.
        (job(side("p", delegated_ops=72, partitions=2), side("q", delegated_ops=60)), CompareGroup.DIFFERENT),
        (job(side("p", fallback_ops=MUL_ADD), side("q", fallback_ops={"aten.addmm": 1})), CompareGroup.DIFFERENT),
        (job(side("p", fallback_ops={"aten.addmm": 1}), side("q", fallback_ops=MUL_ADD)), CompareGroup.WORSE),
        # Trouble of the farm and jobs that were not reached count against neither side.
        (job(side("p"), side("q", "infra", "the device is gone")), CompareGroup.NOT_COMPARED),
        (job(side(None, "infra", "no builder"), broken()), CompareGroup.NOT_COMPARED),
        (job(side("p"), side("q"), left_out="interrupted"), CompareGroup.NOT_COMPARED),
        (job(broken(), side("q"), left_out="no device"), CompareGroup.NOT_COMPARED),
        # Differences of the programs alone are known without a device.
        (job(side("p"), side("q", fallback_ops={"aten.add.Tensor": 1}), left_out="no device"), CompareGroup.WORSE),
        # Both modes of a program compute the same; of two toolchains other bytes are no finding.
        (job(passed("p"), passed("q"), outputs=(3, 4), modes_alone=True), CompareGroup.WORSE),
        (job(passed("p"), passed("q"), outputs=(3, 4)), CompareGroup.DIFFERENT),
        # The same program can run worse with another runner.
        (job(passed("p"), passed("p"), moved()), CompareGroup.WORSE),
    ],
)
def test_group_of_a_job(one: ComparedJob, group: CompareGroup) -> None:
    assert one.group is group
    assert report(one).is_worse is (group in (CompareGroup.NEWLY_FAILING, CompareGroup.WORSE))


def test_a_program_that_lacks_a_write_fails_without_an_execution() -> None:
    planned = Job(Case("ops", "add", "torch.nn:ReLU", (InputSpec((1,)),)), Target("SM8650", "xnnpack", "fp32"))

    def result(*lost: str) -> SideResult:
        bundle: Any = SimpleNamespace(manifest=SimpleNamespace(partitions=1, lost_writes=lost))
        return side_result(planned, BuiltJob(bundle=bundle), None, compiled(data=str(lost)))

    assert job(result(), result()).group is CompareGroup.SAME
    worse = job(result(), result("input x"))
    assert (worse.group, worse.b.stage) == (CompareGroup.NEWLY_FAILING, "build")
    assert "does not write to its input x" in worse.text


@pytest.mark.parametrize(
    ("one", "text"),
    [
        (
            job(
                passed("p", fallback_ops={"aten.mul.Tensor": 1}),
                passed("q", fallback_ops={"aten.add.Tensor": 2, "aten.mul.Tensor": 1}),
                moved(change=0.0953),
            ),
            "htp_cycles 1,000 -> 1,100 cycles, +10.0 % (+4.9 % to +21.0 %); aten.add.Tensor 0 -> 2 on the CPU",
        ),
        (
            job(side("p", fallback_ops=MUL_ADD), side("q", fallback_ops={"aten.addmm": 1})),
            "aten.add.Tensor 1 -> 0 on the CPU; aten.addmm 0 -> 1 on the CPU; aten.mul.Tensor 1 -> 0 on the CPU",
        ),
        (job(passed("p"), broken("ValueError: no")), "build: ValueError: no"),
        (job(broken("old"), broken("new")), "build: new; A: build: old"),
        (
            job(broken("old"), side("q", **FAILED, known_issue="#12")),
            "numerics: output 0: sqnr 12 dB < 20 dB (known issue: #12); A: build: old",
        ),
    ],
)
def test_the_reason_names_stage_numbers_and_operators(one: ComparedJob, text: str) -> None:
    assert one.text == text


def test_changes_are_counted_in_one_sentence_by_what_needs_a_look_first() -> None:
    same = job(side("p"), side("p"))
    assert sentence(report(same, same)) == "B changes no program of these 2 jobs"
    jobs = (same, job(passed("p"), broken()), job(passed("p"), passed("q"), moved()))
    assert sentence(report(*jobs)) == "3 jobs: 1 newly failing, 1 worse, 1 the same program"
    # Other inputs or references are another job, although the program is the same.
    assert not job(side("p"), side("p", data="others")).same


def test_compile_time_is_that_of_bundles_made_side_by_side_where_there_are_some() -> None:
    old = job(side("p", cached=True, seconds={"total": 100.0}), side("q", seconds={"total": 1.0}))
    new = job(
        side("r", seconds={"lower": 3.0, "total": 4.0}, peak_bytes=10),
        side("s", seconds={"lower": 5.0, "total": 6.0}, peak_bytes=20),
    )
    cost = compile_cost([old, new])
    assert cost is not None
    assert (cost.jobs, cost.fresh, cost.seconds, cost.peak_bytes) == (1, True, (4.0, 6.0), (10, 20))
    assert cost.steps == (("lower", 3.0, 5.0),)
    kept = compile_cost([old])
    assert (kept is not None, kept and kept.fresh) == (True, False)
    assert compile_cost([job(side("p"), side("p"))]) is None


def test_overview_has_sizes_partitions_and_the_median_of_changes() -> None:
    jobs = [job(passed("p"), passed("q", pte_bytes=1100), moved(change=change)) for change in (-0.1, 0.0, 0.3)]
    rows = {row.what: row for row in overview(report(*jobs))}
    assert (rows["size of programs"].a, rows["size of programs"].change) == ("3.0 kB", "+10.0 %")
    assert rows["partitions"].change == "same"
    assert rows["HTP cycles"].change == "+0.0 % in the median"
    assert rows["HTP cycles"].over == "3 jobs run in turns, -9.5 % to +35.0 %"


def test_outputs_that_are_not_equal_are_counted_in_text_overview_and_page() -> None:
    equal = job(passed("p"), passed("q"), outputs=(4, 4), modes_alone=True)
    other = job(passed("p"), passed("q"), outputs=(3, 4), modes_alone=True)
    assert other.text == "1 of 4 outputs not equal byte for byte"
    [row] = [one for one in overview(report(equal, other)) if "outputs" in one.what]
    assert (row.change, row.over) == ("1 of 2 differ", "2 jobs run on both sides")
    [row] = [one for one in overview(report(equal)) if "outputs" in one.what]
    assert row.change == "equal"
    page = render_compare(report(equal, other))
    assert "1 of 2 jobs equal byte for byte" in page
    assert page.count("outputs not equal byte for byte") == 1
    assert "byte for byte</span>" not in render_compare(report(job(side("p"), side("q"))))


# The same comparison for a terminal, a browser, a program and GitHub.


def test_terminal_has_what_needs_a_look_first_in_eighty_columns() -> None:
    lines = compare_lines(everything(), limit=20)
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line or "\u202e" in line for line in lines)
    titles = [line for line in lines if line.isupper() or line.partition(":")[0].isupper()]
    order = ["NEWLY FAILING: 1", "WORSE: 1", "NOT COMPARED: 1", "NEWLY PASSING: 1", "BETTER: 1", "FAILING ON BOTH: 1"]
    assert [line for line in titles if line in order] == order
    assert "B: here: executorch 1.5.1, torch 2.13.0, qnn v2.51, commit 1a2b3c1a2b3c with" in lines
    assert "1 of 8 programs are the same" in lines
    # Columns of the overview stand below each other.
    head = next(line for line in lines if line.split() == ["A", "B", "change"])
    assert next(line for line in lines if line.startswith("partitions"))[head.index("A")] == "5"


def test_jobs_that_are_run_in_turns_are_told_with_what_differs() -> None:
    runners = "the runners or QNN libraries"
    for counts, text in {
        (1, 1, 1): "the program of 1 job is the same, the runners or QNN libraries differ: running it in turns",
        (8, 8, 8): "the programs of 8 jobs are the same, the runners or QNN libraries differ: running them in turns",
        (8, 8, 6): "2 of 8 programs differ, and so do the runners or QNN libraries: running them in turns",
        (2, 8, 0): "2 of 8 jobs differ: running them in turns",
        (1, 1, 0): "1 of 1 job differs: running it in turns",
    }.items():
        assert turns_text(*counts, runners) == text


def test_page_says_it_all_once_and_escapes_it() -> None:
    page = render_compare(everything())
    parsed = Page(page)
    assert len(parsed.all("script")) == 2  # our own
    assert "&lt;script&gt;alert(1)" in page
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {"newly_failing", "worse", "not_compared", "newly_passing", "better", "failing"} <= set(parsed.ids)
    assert {link[1:] for link in parsed.links if link.startswith("#")} <= set(parsed.ids)
    assert "✗ B is worse" in page


def test_page_of_what_is_special() -> None:
    same, left_out, infra = (
        job(side("p"), side("p")),
        job(side("p"), side("q"), left_out="interrupted"),
        job(passed(), side(None, "infra", "gone")),
    )
    for one, word in (
        (report(same), "✓ B is not worse"),
        (report(left_out, interrupted=True), "… interrupted"),
        (report(infra), '<header class="top infra">'),
        (report(infra), "△ not every job was compared"),
        (report(same, kind="", devices=()), "Programs alone."),
        (report(), "No job was compiled on both sides."),
    ):
        assert word in render_compare(one)
    assert compare_markdown(report(same)).startswith("### farm perf compare: B is not worse\n")


def test_every_form_of_a_comparison_over_a_stub_has_the_label() -> None:
    usual = report(job(passed(), passed("q"), moved()))
    stub = msgspec.structs.replace(
        usual,
        sides=tuple(msgspec.structs.replace(one, facts={**one.facts, "qnn_product": "stub"}) for one in usual.sides),
    )
    assert "<strong>STUB.</strong>" in render_compare(stub)
    assert "STUB: " in "\n".join(compare_lines(stub, 10))
    assert "STUB: " in compare_markdown(stub)
    for text in (render_compare(usual), "\n".join(compare_lines(usual, 10)), compare_markdown(usual)):
        assert "stub" not in text.lower()


@pytest.mark.parametrize(("products", "label"), [(("stub", ""), "A"), (("QAIRT", "stub"), "B")])
def test_a_stub_is_not_compared_with_qualcomms_libraries(products: tuple[str, str], label: str) -> None:
    def tools(product: str) -> Toolchain:
        return Toolchain({"qnn": "2.51"}, Compiler("", {}), "runner", qnn_product=product)

    with pytest.raises(UsageError, match=rf"side {label} has a stub of QNN \(stub\).*--programs-only"):
        require_no_lone_stub([tools(product) for product in products])
    for product in ("", "QAIRT", "stub"):
        require_no_lone_stub([tools(product), tools(product)])


def test_json_has_the_findings_and_every_number() -> None:
    data = json.loads(compare_json(everything()))
    assert (data["schema"], data["worse"], data["same_programs"]) == (1, True, 1)
    assert data["groups"]["newly_failing"] == 1
    assert [one["group"] for one in data["jobs"]][:2] == ["newly_failing", "worse"]
    assert data["jobs"][1]["metrics"][0]["answer"] == "worse"
    assert data["jobs"][1]["fallback_changes"] == {HOSTILE: [0, 2]}


def test_github_gets_a_summary_and_an_annotation_for_each_job_that_is_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    add_summary(lambda: compare_markdown(everything()))
    text = (tmp_path / "summary").read_text()
    assert text.startswith("### farm perf compare: B is worse")
    assert "#### Newly failing: 1" in text
    assert "<script>" not in text
    assert "](http" not in text
    commands = compare_commands(everything())
    assert [line.partition("::")[2].partition(" ")[0] for line in commands] == ["error", "error"]


def test_the_review_of_a_pull_request_proves_what_is_not_its_fault() -> None:
    review = compare_review(everything())
    assert review.state == "failed"
    assert review.sections[NEW]
    assert any("%" in what for _, what in review.sections[REGRESSED])
    proofs = [proof for _, proof in review.sections[NOT_YOURS]]
    assert any(proof.startswith("the base fails too: ") for proof in proofs)
    assert "not compared: no device was left" in proofs
    newer = CompareSide(label="B", name="b", facts={"torch": "2.14.1"})
    older = CompareSide(label="A", name="a", facts={"torch": "2.13.0"})
    assert "torch changed as well: 2.13.0 -> 2.14.1" in compare_review(report(sides=(older, newer))).facts
    assert compare_review(report()).state == "passed"
