"""`farm perf bisect --commits`: symptoms, and a bisect over real git with invented answers of comparisons."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from compare.made import broken, job, moved, passed, report, side
from executorch_checkout import commit, make_checkout, make_repository, run_git
from in_process import call
from log_lines import LogLines

from farm.base.config.settings import load_config
from farm.base.config.toolchains import ToolchainConfig
from farm.base.errors import FarmError, InfraError, MissingToolError, NativeBuildError, UnknownNameError, UsageError
from farm.builds.toolchains.worktrees import Checkout, require_built, worktree
from farm.numbers.compare.commit_bisect import (
    BisectOutcome,
    CommitAnswer,
    GitBisect,
    answer_of,
    bisect_commits,
    bisected_toolchain,
    commits_of,
    require_compared,
    symptom_of,
)
from farm.numbers.compare.sides import ComparisonRequest, SideRequest, config_of
from farm.report.model.compare import ComparedJob

# Symptom of a bad commit, and the answers that comparisons with other commits give about it.


GOOD, BAD, SKIP = CommitAnswer

FAILS = job(passed("p"), side("q", "failed", "sqnr 2 dB < 30 dB"))
BREAKS = job(passed("p"), broken("ValueError: no input"))
SLOWER = job(passed("p"), passed("q"), moved(change=0.3, low=0.28, high=0.32))
ON_THE_CPU = job(passed("p"), passed("q", fallback_ops={"aten.relu": 2}), moved(change=0.3))
LESS_EXACT = job(passed("p"), passed("q"), moved("sqnr_fp32[0]", -math.inf, pairs=1, low=-math.inf, high=math.inf))


@pytest.mark.parametrize(
    ("bad", "metric", "text", "needs_device"),
    [
        (FAILS, "", "numerics: sqnr 2 dB < 30 dB", True),
        (BREAKS, "", "build: ValueError: no input", False),
        (ON_THE_CPU, "", "aten.relu 0 -> 2 on the CPU", False),
        (SLOWER, "", "htp_cycles", True),
        (LESS_EXACT, "", "sqnr_fp32[0]", True),
        (job(passed("p"), passed("q", pte_bytes=900)), "pte_size", "pte_size 1000 -> 900", False),
        (
            job(passed("p"), passed("q"), moved("latency", 0.3, low=0.28, high=0.32, decides=False)),
            "latency",
            "latency",
            True,
        ),
    ],
)
def test_a_difference_of_the_bad_commit_is_its_symptom(
    bad: ComparedJob, metric: str, text: str, needs_device: bool
) -> None:
    symptom = symptom_of(bad, metric)
    assert symptom is not None
    assert text in symptom.text
    assert symptom.needs_device is needs_device
    require_compared(bad)
    assert answer_of(bad, symptom)[0] is BAD


def test_values_of_a_program_are_compared_whatever_its_case_expects() -> None:
    refused = job(side("p", "failed", "1 partition, expected 2", stage="build"), side("q", pte_bytes=900))
    require_compared(refused, executed=False)
    with pytest.raises(UsageError, match="does not pass at the good commit"):
        require_compared(refused)
    with pytest.raises(UsageError, match="does not pass at the good commit"):
        require_compared(job(broken(), side("q")), executed=False)


@pytest.mark.parametrize(
    ("bad", "metric"),
    [
        (job(side("p"), side("p")), ""),
        (job(side("p"), side("p")), "latency"),
        (job(passed("p"), passed("q", pte_bytes=900)), ""),
        (job(passed("p"), passed("q", pte_bytes=900)), "partitions"),
        (job(passed("p"), passed("q"), moved("latency", 0.3, decides=False)), ""),
        (job(passed("p"), passed("q"), moved(change=-0.3, answer="better")), "htp_cycles"),
    ],
)
def test_a_commit_that_is_not_worse_has_no_symptom(bad: ComparedJob, metric: str) -> None:
    assert symptom_of(bad, metric) is None


def test_a_metric_that_the_job_does_not_have_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'htp_cycles'"):
        symptom_of(SLOWER, "htp_cycle")


@pytest.mark.parametrize(
    ("bad", "between", "answer"),
    [
        (FAILS, job(passed("p"), side("r", "failed", "sqnr 9 dB < 30 dB")), BAD),
        (FAILS, job(passed("p"), side("r", "failed", "no output", stage="execute")), SKIP),
        (FAILS, job(passed("p"), broken("KeyError: 'x'")), SKIP),
        (FAILS, job(passed("p"), passed("r"), moved(change=0.3)), GOOD),
        (FAILS, job(side("p"), side("p")), GOOD),
        (FAILS, job(passed("p"), side("r", "failed", "sqnr 9 dB", known_issue="#1")), SKIP),
        (BREAKS, job(side("p"), broken("ValueError: another line")), BAD),
        (BREAKS, job(side("p"), broken("ImportError: no_such_helper")), SKIP),
        (BREAKS, job(side("p"), side("r")), GOOD),
        (ON_THE_CPU, job(side("p"), side("r", fallback_ops={"aten.relu": 2})), BAD),
        (ON_THE_CPU, job(side("p"), side("r")), GOOD),
        (ON_THE_CPU, job(side("p"), broken()), SKIP),
        (SLOWER, job(passed("p"), passed("r"), moved(change=0.25, low=0.2, high=0.3)), BAD),
        # A smaller loss than half of that at the bad end is another one, confirmed or not.
        (SLOWER, job(passed("p"), passed("r"), moved(change=0.05, low=0.04, high=0.06)), GOOD),
        (SLOWER, job(passed("p"), passed("r"), moved(change=0.14, low=0.1, high=0.2, answer="unknown")), SKIP),
        (SLOWER, job(side("p"), side("p")), GOOD),
        (SLOWER, job(passed("p"), passed("r")), SKIP),
        (SLOWER, job(passed("p"), side("r", "failed", "sqnr 2 dB < 30 dB"), moved()), SKIP),
        (LESS_EXACT, job(passed("p"), passed("r"), moved("sqnr_fp32[0]", 0.0, pairs=1)), GOOD),
    ],
)
def test_a_commit_is_bad_with_the_same_symptom_only(
    bad: ComparedJob, between: ComparedJob, answer: CommitAnswer
) -> None:
    symptom = symptom_of(bad)
    assert symptom is not None
    require_compared(between)
    assert answer_of(between, symptom)[0] is answer


@pytest.mark.parametrize(
    ("tried", "error", "text"),
    [
        (job(side("p"), side("q"), left_out="no device was left"), InfraError, "no device was left"),
        (job(side("p"), side(None, "infra", "disk full", stage="build")), InfraError, "disk full"),
        (job(broken(), broken()), UsageError, "nor does the other"),
        (job(broken(), passed("q")), UsageError, "and the other does"),
    ],
)
def test_trouble_of_the_farm_or_of_the_good_commit_is_no_answer(
    tried: ComparedJob, error: type[FarmError], text: str
) -> None:
    with pytest.raises(error, match=text):
        require_compared(tried)


# `farm perf bisect --commits` over a repository of small commits: real git, invented answers of comparisons.


if TYPE_CHECKING:
    from farm.builds.toolchains.worktrees import Commit
    from farm.report.model.compare import ComparedJob, CompareReport

    Truth = Callable[[int], ComparedJob]

COUNT = 12
"""Commits after the good one; each has its number as subject."""
JOB = "smoke/add[SM8650-htp-8a8w]"
SAME = job(side("p"), side("p"))


class StubComparison:
    """Stand-in for builders and devices: knows the job at each commit, and can be killed."""

    def __init__(self, truth: Truth, *, killed_after: int = -1, facts: dict[str, str] | None = None) -> None:
        self._truth, self._killed_after, self._facts = truth, killed_after, facts
        self.compared: list[tuple[int, int]] = []

    def __call__(self, good: Commit, commit: Commit, needs_device: bool) -> CompareReport:  # noqa: ARG002
        """Compare two commits."""
        if len(self.compared) == self._killed_after:
            raise KeyboardInterrupt
        pair = int(good.subject), int(commit.subject)
        found = report(self._truth(pair[1]))
        self.compared.append(pair)
        found = msgspec.structs.replace(found, jobs=(msgspec.structs.replace(found.jobs[0], name=JOB),))
        if self._facts is None:
            return found
        a, b = found.sides
        return msgspec.structs.replace(found, sides=(msgspec.structs.replace(a, facts=self._facts), b))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    # Git and shells have to treat each part of this path as a name.
    folder = tmp_path_factory.mktemp('it\'s "a" $(touch pwned)') / "executorch"
    folder.mkdir(parents=True)
    run_git(folder, "init", "-q", "-b", "main")
    stream = "".join(
        f"commit refs/heads/main\ncommitter Ada <ada@example.org> {1_795_000_000 + number} +0000\n"
        f"data {len(str(number))}\n{number}\nM 644 inline exir/__init__.py\ndata {len(str(number))}\n{number}\n"
        "M 644 inline backends/x.py\ndata 0\n\n"
        for number in range(COUNT + 1)
    )
    subprocess.run(["git", "fast-import", "--quiet"], cwd=folder, input=stream, text=True, check=True)
    run_git(folder, "reset", "-q", "--hard")
    return Checkout(folder)


def search(
    checkout: Checkout, folder: Path, compare: StubComparison, metric: str = "", span: str = f"main~{COUNT}..main"
) -> BisectOutcome:
    return bisect_commits(checkout, commits_of(checkout, span), folder, compare, metric)


def since(first_bad: int, bad: ComparedJob, good: ComparedJob = SAME, **special: ComparedJob) -> Truth:
    return lambda number: special.get(f"at_{number}", bad if number >= first_bad else good)


def subjects(*commits: Commit | None) -> list[int]:
    return [int(one.subject) for one in commits if one is not None]


@pytest.mark.parametrize(
    ("first_bad", "bad", "metric"),
    [(1, FAILS, ""), (6, job(passed("p"), passed("q", pte_bytes=900)), "pte_size"), (12, FAILS, "")],
)
def test_the_first_bad_commit_is_found(
    checkout: Checkout, tmp_path: Path, bad: ComparedJob, metric: str, first_bad: int
) -> None:
    compare = StubComparison(since(first_bad, bad))
    outcome = search(checkout, tmp_path, compare, metric)
    assert subjects(outcome.last_good, outcome.first_bad) == [first_bad - 1, first_bad]
    assert not outcome.skipped
    assert outcome.changed_files == ("M\texir/__init__.py",)
    assert "first bad commit" in outcome.log
    # Both ends, the halves, and the evidence.
    assert len(compare.compared) <= 2 + COUNT.bit_length()
    assert compare.compared[-1] == (first_bad - 1, first_bad)


def test_the_checkout_stays_as_it_is(checkout: Checkout, tmp_path: Path) -> None:
    def state() -> tuple[str, ...]:
        asked = (("for-each-ref",), ("status", "--porcelain", "--ignored"), ("worktree", "list"))
        files = sorted(path.name for path in (checkout.folder / ".git").iterdir())
        return (*(run_git(checkout.folder, *words) for words in asked), *files)

    before = state()
    search(checkout, tmp_path / "it's; touch pwned", StubComparison(since(7, FAILS)))
    assert state() == before
    assert not list(checkout.folder.parents[1].rglob("pwned"))


def test_where_only_skipped_commits_are_left_it_is_a_range(checkout: Checkout, tmp_path: Path) -> None:
    other = job(passed("p"), broken("KeyError: 'x'"))
    truth = since(6, FAILS, at_5=other, at_6=other)

    def unbuilt_at_7(number: int) -> ComparedJob:
        if number == 7:
            raise NativeBuildError("no compiler")
        return truth(number)

    outcome = search(checkout, tmp_path, StubComparison(unbuilt_at_7))
    assert subjects(outcome.last_good, *outcome.skipped, outcome.first_bad) == [4, 5, 6, 7, 8]


def test_after_a_kill_the_same_call_goes_on(checkout: Checkout, tmp_path: Path) -> None:
    truth = since(8, FAILS)
    first, second, third = StubComparison(truth, killed_after=3), StubComparison(truth), StubComparison(truth)
    with pytest.raises(KeyboardInterrupt):
        search(checkout, tmp_path, first)
    assert subjects(search(checkout, tmp_path, second).first_bad) == [8]
    assert not set(first.compared) & set(second.compared)
    # A finished search repeats only the comparison of both commits.
    assert subjects(search(checkout, tmp_path, third).first_bad) == [8]
    assert third.compared == [(7, 8)]


def test_a_kill_before_git_has_chosen_the_next_commit_costs_no_answer(checkout: Checkout, tmp_path: Path) -> None:
    bisect = GitBisect(tmp_path / "repository", commits_of(checkout, f"main~{COUNT}..main"))
    bisect.start(checkout)
    _, _, left = bisect.range()
    first = bisect.next(left)
    bisect.mark(first, CommitAnswer.GOOD)
    run_git(bisect.folder, "update-ref", "--no-deref", "BISECT_HEAD", first.sha)
    last_good, _, left = bisect.range()
    assert last_good == first
    assert bisect.next(left) in left


def test_trouble_of_the_farm_decides_nothing(checkout: Checkout, tmp_path: Path) -> None:
    away = job(side("p"), side("q"), left_out="no device was left")
    for truth in (since(1, away), since(3, FAILS, at_6=away)):
        with pytest.raises(InfraError, match="no device was left"):
            search(checkout, tmp_path, StubComparison(truth))
    assert subjects(search(checkout, tmp_path, StubComparison(since(3, FAILS))).first_bad) == [3]


def test_a_commit_that_git_was_told_to_skip_is_left_out(checkout: Checkout, tmp_path: Path) -> None:
    def truth(number: int) -> ComparedJob:
        if number == 6:
            raise UsageError("it has no exir and backends in it")
        return FAILS if number >= 9 else SAME

    notes = LogLines()
    with pytest.raises(UsageError, match="no exir"):
        bisect_commits(checkout, commits_of(checkout, f"main~{COUNT}..main"), tmp_path, StubComparison(truth))
    # As printed, for a shell.
    done = subprocess.run(["sh", "-c", notes[-1].partition("leave it out with ")[2]], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert subjects(search(checkout, tmp_path, StubComparison(truth)).first_bad) == [9]


def test_ends_without_a_step_end_the_search(checkout: Checkout, tmp_path: Path) -> None:
    assert search(checkout, tmp_path, StubComparison(since(1, SAME))).symptom is None
    with pytest.raises(UsageError, match="does not pass at the good commit"):
        search(checkout, tmp_path, StubComparison(since(1, job(broken(), broken()))))

    def unbuilt(_: int) -> ComparedJob:
        raise NativeBuildError("no compiler")

    with pytest.raises(UsageError, match="no compiler"):
        search(checkout, tmp_path, StubComparison(unbuilt))


def test_a_toolchain_that_changed_meanwhile_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    truth = since(8, FAILS)
    with pytest.raises(KeyboardInterrupt):
        search(checkout, tmp_path, StubComparison(truth, killed_after=2, facts={"qnn": "2.49"}))
    with pytest.raises(UsageError, match=re.escape(f"qnn changed since this search began: remove {tmp_path} to")):
        search(checkout, tmp_path, StubComparison(truth, facts={"qnn": "2.51"}))
    shutil.rmtree(tmp_path)
    search(checkout, tmp_path, StubComparison(truth, facts={"qnn": "2.51"}))


def test_a_search_in_a_shallow_clone_and_across_a_merge(checkout: Checkout, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    run_git(tmp_path, "clone", "-q", "--depth=6", f"file://{checkout.folder}", str(clone))
    run_git(clone, "checkout", "-q", "-b", "side", "HEAD~2")
    commit(clone, "100", {"exir/side.py": "pass\n"})
    run_git(clone, "checkout", "-q", "main")
    run_git(clone, "merge", "-q", "--no-ff", "-m", "13", "side")
    commit(clone, "14", {"exir/__init__.py": "n = 14\n"})
    shallow = Checkout(clone)
    compare = StubComparison(since(13, FAILS, at_100=job(broken(), broken())))
    outcome = search(shallow, tmp_path / "one", compare, span="main~5..main")
    assert subjects(outcome.last_good, outcome.first_bad) == [12, 13]
    # A merged branch: the commit before its merge is older than the commit of the branch.
    outcome = search(shallow, tmp_path / "two", StubComparison(since(11, FAILS)), span="side..main")
    assert subjects(outcome.last_good, outcome.first_bad) == [100, 11]


def of_json(text: str) -> dict[str, Any]:
    """Return the document that follows the notes."""
    return json.loads(text[text.index('{ "schema"') :])


def test_the_evidence_names_commit_program_and_files(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = job(passed("p"), passed("q", fallback_ops={"aten.relu": 2}, pte_bytes=900), moved(change=0.3))
    compare = StubComparison(since(6, bad))
    monkeypatch.setattr("farm.numbers.compare.commit_bisect.comparing", lambda *_: compare)
    asked = ("--commits", f"main~{COUNT}..main", "--checkout", str(checkout.folder), JOB, "--virtual=1")
    code, text = call("perf", "bisect", *asked, "--markdown", str(tmp_path / "evidence.md"))
    first = checkout.commit(f"main~{COUNT - 6}")
    assert code == 3
    assert f"first bad: {first.short} 6, by Ada <ada@example.org>" in text
    for line in ("pte_size 1000 -> 900", "aten.relu 0 -> 2", "changed: M exir/__init__.py", "VIRTUAL"):
        assert line in text
    evidence = (tmp_path / "evidence.md").read_text()
    assert first.short in evidence
    # Names of other people are no Markdown.
    assert "<ada" not in evidence

    code, text = call("perf", "bisect", *asked, "--json")
    answer = of_json(text)
    assert (code, answer["first_bad"]["sha"], answer["exact"]) == (3, first.sha, True)
    assert answer["comparison"]["jobs"][0]["name"] == JOB
    # A different request starts a new search.
    monkeypatch.setattr("farm.numbers.compare.commit_bisect.comparing", lambda *_: StubComparison(since(1, SAME)))
    assert call("perf", "bisect", *asked, "--metric", "partitions")[0] == 0


def test_impossible_requests_are_one_line_and_exit_2(checkout: Checkout, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_repository(other, {"exir/__init__.py": "", "backends/x.py": ""})
    new, old = (checkout.commit(ref).short for ref in ("main", "main~1"))
    last = ("--commits", "HEAD~1..HEAD", "--checkout", str(checkout.folder))
    for arguments, expected in {
        ("--commits", "HEAD~1...HEAD", *last[2:], JOB): "expected GOOD..BAD",
        (*last[:2], JOB): "--checkout DIR",
        ("--commits", "HEAD..HEAD~1", *last[2:], JOB): f"it is the other way round: try {old}..{new}",
        ("--commits", "v9..HEAD", *last[2:], JOB): "has no commit 'v9'",
        (*last, "smoke/ad[SM8650-htp-8a8w]"): "did you mean 'add'",
        (*last, "--good", "x", JOB): "--good is for runs",
        (*last, "--inferences", "9", JOB): "--inferences is for runs",
        (*last, "--virtual=1", "--device", "d", JOB): "--device",
        (*last, "--build-command", "'", JOB): "--build-command",
        (*last, "--toolchain", "nope", JOB): "unknown toolchain",
        (*last, "--toolchain", "1.5.0", JOB): "1.5.0 is release 1.5.0",
        (*last, "--toolchain", str(other), JOB): f"is of {other}, not of",
        ("--good", "a", "--bad", "b", "--build-command", "make", JOB): "--build-command is for --commits",
        (JOB,): "name two runs with --good and --bad, or commits",
    }.items():
        code, output = call("perf", "bisect", *arguments)
        assert (code, expected in output) == (2, True), f"{arguments}: {code}: {output}"


def test_the_toolchain_that_is_named_compiles_the_commits(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    folder = checkout.folder
    main, other = (Path(f"/opt/{name}/bin/python") for name in ("main", "other"))
    (tmp_path / "farm.toml").write_text(
        f'[toolchain.main]\ncheckout = {json.dumps(str(folder))}\npython = "{main}"\nqnn = "2.49"\n'
        f'[toolchain.other]\npython = "{other}"\nqnn = "2.51"\n'
    )
    config = load_config(tmp_path / "farm.toml")

    def chosen(ref: str, *build: str) -> tuple[Path | None, str, tuple[str, ...]]:
        tree = worktree(bisected_toolchain(config, folder, ref, build)[0], checkout, "HEAD").toolchain
        return tree.python, tree.qnn, tree.build

    assert [chosen(ref) for ref in ("", "main", "other", "default")] == [
        (main, "2.49", ()), (main, "2.49", ()), (other, "2.51", ()), (None, "", ()),
    ]  # fmt: skip
    assert chosen("", "make", "it") == (main, "2.49", ("make", "it"))


def test_a_checkout_that_is_not_built_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "executorch"
    make_repository(folder, {"exir/__init__.py": "", "backends/x.py": ""})
    commit(folder, "Two", {"exir/__init__.py": "pass\n"})
    code, output = call("perf", "bisect", "--commits", "HEAD~1..HEAD", "--checkout", str(folder), "--virtual=1", JOB)
    expected = f"{folder}/backends/qualcomm/python has no PyQnnManagerAdaptor*.so: build it with {folder}/backends/"
    assert (code, expected in output) == (MissingToolError.exit_code, True), output

    config = load_config()
    one = SideRequest(toolchain=str(folder), base="HEAD~1")
    request = ComparisonRequest(sides=(one, SideRequest(toolchain=str(folder))), socs=("SM8650",), suites=("smoke",))
    with pytest.raises(MissingToolError, match=re.escape(expected)):
        config_of(config, request, one)
    assert not list((tmp_path / "cache").glob("toolchains/worktrees/*/*"))

    # A build of a commit brings its own libraries; the checkout's libraries serve if the sources are the same.
    built = msgspec.structs.replace(config, toolchain=ToolchainConfig(name="main", checkout=folder, build=("true",)))
    commit(folder, "Three", {"backends/qualcomm/aot.cpp": "int level = 1;\n"})
    repository = Checkout(folder)
    require_built(built, repository, repository.commit("HEAD~1"))
    with pytest.raises(MissingToolError, match=f"toolchain main: {folder}"):
        require_built(built, repository, repository.commit("HEAD"))


_SILU = "backends/qualcomm/_passes/decompose_silu.py"


@pytest.mark.whole
def test_a_commit_that_makes_outputs_wrong_is_found_in_a_real_checkout(tmp_path: Path) -> None:
    """Find it with real worktrees, builders and the simulator."""
    folder = tmp_path / "executorch"
    first = make_checkout(folder)
    silu = (folder / _SILU).read_text()
    wrong = silu.replace("(silu_node_input, sigmoid_node),", "(sigmoid_node, sigmoid_node),")
    assert wrong != silu
    commit(folder, "Docs", {"docs/index.md": "Build it.\n"})
    sha = commit(folder, "SiLU: simpler", {_SILU: wrong})
    commit(folder, "README", {"README.md": "ExecuTorch.\n"})
    code, output = call(
        "perf", "bisect", "--commits", f"{first}..HEAD", "--checkout", str(folder), "--virtual=1", "--json",
        "quantized_ops/silu[SM8650-htp-8a8w]",
    )  # fmt: skip
    answer = of_json(output)
    assert (code, answer["first_bad"]["sha"], answer["exact"]) == (3, sha, True)
    assert answer["symptom"]["stage"] == "numerics"
    assert answer["changed_files"] == [f"M\t{_SILU}"]
    assert run_git(folder, "status", "--porcelain") == ""
