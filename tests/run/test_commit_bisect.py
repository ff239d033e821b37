"""The first bad commit of made-up histories: what is compiled and run for it, what is skipped, and after a kill."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner
from executorch_checkout import commit, make_repository

from farm.analysis.confirmation import Answer, Confirmation
from farm.cli.main import cli
from farm.compare.request import ComparisonRequest, SideRequest, config_of
from farm.config.settings import load_config
from farm.config.toolchains import ToolchainConfig
from farm.errors import FarmError, InfraError, MissingToolError, NeedsDeviceError, UnknownNameError
from farm.regressions.commit_bisect import CommitBisection
from farm.regressions.commit_evidence import markdown, text_lines
from farm.regressions.commit_lab import WorktreeLab
from farm.regressions.commit_records import (
    BuildState,
    CommitBuild,
    CommitRun,
    CommitsRequest,
    CommitsState,
    JobSearch,
    QuestionKind,
    read_state,
    write_state,
)
from farm.regressions.commit_session import CommitsOutcome, with_toolchain
from farm.results.attempt import Direction, Measurement, Verdict
from farm.results.measurements import counted
from farm.suites.suite import Case, InputSpec, Job, Target
from farm.toolchains.commits import Checkout, Commit
from farm.toolchains.worktrees import require_built, worktree

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from farm.analysis.scale import Series

COUNT = 24
JOB = Job(Case("s", "relu", module="torch.nn:ReLU", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w"))
OTHER = Job(
    Case("s", "tanh", module="torch.nn:Tanh", inputs=(InputSpec(shape=(1, 3)),)), Target("SM8650", "htp", "8a8w")
)


class Truth(msgspec.Struct, frozen=True):
    """What a job is at a commit."""

    program: str = "p"
    state: BuildState = BuildState.COMPILED
    reason: str = ""
    fails: str = ""
    """Reason of its failure on the device."""
    verdict: Verdict = Verdict.FAILED
    """Where there is such a reason."""
    cycles: float = 1000.0
    fallback: int = 0
    size: int = 5000


@dataclass
class StubLab:
    """A stand-in for worktrees, builders and a device: it knows the truth about each commit and job."""

    truth: Callable[[int, str], Truth]
    built: list[tuple[int, str]] = field(default_factory=list)
    ran: list[tuple[int, str]] = field(default_factory=list)
    compared: list[int] = field(default_factory=list)
    fail_after: int = -1
    """So many commits are built before it is killed."""

    def build(self, commit: Commit, jobs: Sequence[Job]) -> Mapping[str, CommitBuild]:
        """As `CommitLab.build`."""
        if len({index for index, _ in self.built}) == self.fail_after:
            raise KeyboardInterrupt
        found = {}
        for job in jobs:
            truth = self.truth(int(commit.subject), job.id)
            self.built.append((int(commit.subject), job.id))
            if truth.state is not BuildState.COMPILED:
                found[job.id] = CommitBuild(state=truth.state, reason=truth.reason)
                continue
            numbers = {"fallback_ops": truth.fallback, "pte_size": truth.size, "delegated_ops": 9 - truth.fallback}
            found[job.id] = CommitBuild(
                state=BuildState.COMPILED,
                bundle=f"{commit.sha}",
                program=f"{job.id} {truth.program}",
                operators={"aten.relu.default": 1 + truth.fallback},
                measurements=tuple(counted(metric, value) for metric, value in numbers.items()),
            )
        return found

    def has(self, build: CommitBuild) -> bool:
        """As `CommitLab.has`."""
        return bool(build.bundle)

    def warnings(self, commit: Commit) -> tuple[str, ...]:
        """As `CommitLab.warnings`."""
        return ("libraries of another commit",) if commit.subject == "12" else ()

    def run(self, job: Job, build: CommitBuild, commit: Commit) -> CommitRun:  # noqa: ARG002
        """As `CommitLab.run`."""
        truth = self.truth(int(commit.subject), job.id)
        self.ran.append((int(commit.subject), job.id))
        verdict = truth.verdict if truth.fails else Verdict.PASSED
        cycles = Measurement("htp_cycles", "cycles", Direction.LOWER, (truth.cycles,))
        return CommitRun(verdict=verdict, stage="numerics", reason=truth.fails, device="d", measurements=(cycles,))

    def pairs(
        self,
        job: Job,
        good: tuple[CommitBuild, Commit],
        new: tuple[CommitBuild, Commit],
        series: Series,  # noqa: ARG002
        gate: float | None,
    ) -> Confirmation:
        """As `CommitLab.pairs`."""
        was, now = (self.truth(int(one.subject), job.id).cycles for _, one in (good, new))
        self.compared.append(int(new[1].subject))
        change = now / was - 1.0
        answer = Answer.CONFIRMED if change > (gate or 0.02) else Answer.REFUTED
        return Confirmation(answer, f"{change:+.1%}", 10, change, change, change, 0.001)


def commits() -> tuple[Commit, ...]:
    return tuple(
        Commit(f"{n:040x}", (), "Ada <ada@example.org>", "2026-11-01T00:00:00+00:00", n, str(n))
        for n in range(COUNT + 1)
    )


def state_of(*jobs: Job, content: Sequence[str] | None = None, metric: str = "") -> CommitsState:
    all_ = commits()
    ids = tuple(job.id for job in jobs)
    request = CommitsRequest(checkout="/c", good=all_[0].sha, bad=all_[-1].sha, jobs=ids, metric=metric, virtual=True)
    return CommitsState(
        id="20261101-000000-abcdef",
        request=request,
        identity={"executorch": "1.5.1"},
        commits=all_,
        content=tuple(content or (str(n) for n in range(COUNT + 1))),
        searches={job_id: JobSearch(definition="d") for job_id in ids},
    )


def search(state: CommitsState, lab: StubLab, *jobs: Job) -> None:
    CommitBisection(state, jobs, lab, lambda: None, lambda _: None).run()


class VirtualLab(StubLab):
    """A stand-in that has a virtual device, which does not run JOB."""

    def run(self, job: Job, build: CommitBuild, commit: Commit) -> CommitRun:
        if job is not JOB:
            return super().run(job, build, commit)

        def judge(_: object) -> None:
            raise NeedsDeviceError("its graph is made by the device", "SM8650")

        bench = SimpleNamespace(device=SimpleNamespace(serial="v", kind="virtual"), judge=judge)
        lab: Any = SimpleNamespace(_bench=lambda _: bench, _note=lambda _: None, _side=lambda *_: None)
        return WorktreeLab.run(lab, job, build, commit)


def test_a_job_that_no_virtual_device_runs_is_left_out_and_the_others_are_searched_for() -> None:
    state = state_of(JOB, OTHER)
    search(state, VirtualLab(since(7, Truth("q", fails="wrong"))), JOB, OTHER)
    left_out, searched = (state.searches[job.id].question for job in (JOB, OTHER))
    assert left_out is not None
    assert searched is not None
    assert (left_out.kind, searched.kind) == (QuestionKind.REFUSED, QuestionKind.VERDICT)
    assert left_out.reason.endswith("no virtual device runs it: its graph is made by the device; attach a SM8650")
    assert state.range_of(OTHER.id).bad == 7


def since(first_bad: int, bad: Truth, **special: Truth) -> Callable[[int, str], Truth]:
    def truth(index: int, _job: str) -> Truth:
        return special.get(f"at_{index}") or (bad if index >= first_bad else Truth())

    return truth


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (Truth("q", fails="sqnr 2 dB < 30 dB"), QuestionKind.VERDICT),
        (Truth("q", cycles=1300.0), QuestionKind.PAIRS),
        (Truth("q", fallback=1), QuestionKind.EXACT),
        (Truth("q", size=9000), QuestionKind.EXACT),
        (Truth(state=BuildState.NOT_COMPILED, reason="AssertionError: no input"), QuestionKind.COMPILE),
        (Truth(state=BuildState.NOT_IMPORTED, reason="ImportError: no_such_helper"), QuestionKind.IMPORT),
    ],
)
@pytest.mark.parametrize("first_bad", [1, 9, 16, 24])
def test_what_is_wrong_at_the_end_is_found_out_and_searched_for(bad: Truth, kind: QuestionKind, first_bad: int) -> None:
    # Another commit does not import: it cannot tell.
    broken = Truth(state=BuildState.NOT_IMPORTED, reason="SyntaxError: invalid syntax")
    state, lab = state_of(JOB), StubLab(since(first_bad, bad, at_12=broken))
    search(state, lab, JOB)
    question, span = state.searches[JOB.id].question, state.range_of(JOB.id)
    assert question is not None
    assert question.kind is kind
    assert (span.good, span.bad, span.is_exact) == (first_bad - 1, first_bad, True)
    assert len(state.compiled) <= 8
    assert len(set(lab.built)) == len(lab.built)


def test_a_program_that_is_known_is_not_run_again() -> None:
    state, lab = state_of(JOB), StubLab(since(7, Truth("q", fails="wrong")))
    search(state, lab, JOB)
    assert lab.ran == [(0, JOB.id), (24, JOB.id)]
    assert state.range_of(JOB.id).bad == 7


def test_commits_of_the_same_content_are_not_even_compiled() -> None:
    content = [str(n // 6) for n in range(COUNT + 1)]
    state, lab = state_of(JOB, content=content), StubLab(lambda n, _: Truth("q", fails="wrong") if n >= 12 else Truth())
    search(state, lab, JOB)
    assert state.range_of(JOB.id).bad == 12
    assert len(state.compiled) == 4


def test_jobs_share_what_is_built_and_each_has_its_own_answer() -> None:
    def truth(index: int, job: str) -> Truth:
        return Truth("q", fails="wrong") if index >= (5 if job == JOB.id else 7) else Truth()

    state, lab = state_of(JOB, OTHER), StubLab(truth)
    search(state, lab, JOB, OTHER)
    assert [state.range_of(job.id).bad for job in (JOB, OTHER)] == [5, 7]
    assert len(state.compiled) <= 9


def test_only_commits_that_cannot_tell_are_left() -> None:
    broken = Truth(state=BuildState.NOT_BUILT, reason="no compiler")
    special = {f"at_{n}": broken for n in (10, 11, 12)}
    state, lab = state_of(JOB), StubLab(since(12, Truth("q", fails="wrong"), **special))
    search(state, lab, JOB)
    span = state.range_of(JOB.id)
    assert (span.good, span.bad, span.skipped) == (9, 13, (10, 11, 12))
    text = "\n".join(text_lines(CommitsOutcome(state, Path("/f"), {})))
    assert "a range, as only commits that cannot tell are left" in text


def test_a_failure_of_another_kind_cannot_tell() -> None:
    other = Truth(state=BuildState.NOT_COMPILED, reason="KeyError: 'x'")
    bad = Truth(state=BuildState.NOT_COMPILED, reason="AssertionError: no input")
    state, lab = state_of(JOB), StubLab(since(15, bad, at_12=other))
    search(state, lab, JOB)
    assert state.range_of(JOB.id).bad == 15
    assert state.searches[JOB.id].trials[12].answer == "skip"


@pytest.mark.parametrize(
    ("truth", "kind", "reason"),
    [
        (lambda *_: Truth(), QuestionKind.NONE, "both ends have the same program"),
        (lambda *_: Truth(fails="wrong"), QuestionKind.NONE, "the same program"),
        (lambda n, _: Truth(str(n)), QuestionKind.NONE, "no number of it is worse"),
        (lambda n, _: Truth(str(n), fails="wrong"), QuestionKind.REFUSED, "does not pass, nor does the bad one: wrong"),
        (
            lambda n, _: Truth(str(n), fails="" if n else "wrong"),
            QuestionKind.REFUSED,
            "does not pass, and the bad one does: wrong",
        ),
        (
            lambda n, _: Truth(str(n), fails="" if n else "attach a SM8650", verdict=Verdict.SKIPPED),
            QuestionKind.REFUSED,
            "could not be tried: attach a SM8650",
        ),
        (
            lambda n, _: Truth(state=BuildState.NOT_COMPILED, reason="KeyError") if n == 0 else Truth(),
            QuestionKind.REFUSED,
            "does not compile: KeyError",
        ),
    ],
)
def test_ends_between_which_nothing_can_be_searched(
    truth: Callable[[int, str], Truth], kind: QuestionKind, reason: str
) -> None:
    state, lab = state_of(JOB), StubLab(truth)
    search(state, lab, JOB)
    question = state.searches[JOB.id].question
    assert question is not None
    assert question.kind is kind
    assert reason in question.reason
    assert state.compiled == [0, 24]


def test_a_metric_that_is_named_is_what_decides() -> None:
    def truth(index: int, _job: str) -> Truth:
        return Truth(str(index), cycles=1500.0 if index >= 20 else 1000.0, fallback=int(index >= 4))

    found = {}
    for metric in ("htp_cycles", "fallback_ops", "delegated_ops", ""):
        state, lab = state_of(JOB, metric=metric), StubLab(truth)
        search(state, lab, JOB)
        found[metric] = state.range_of(JOB.id).bad
    # Neither more nor fewer nodes in delegates are worse, but somebody may want to know since when.
    assert found == {"htp_cycles": 20, "fallback_ops": 4, "delegated_ops": 4, "": 4}
    with pytest.raises(UnknownNameError, match="did you mean 'htp_cycles'"):
        search(state_of(JOB, metric="htp_cycle"), StubLab(truth), JOB)


@pytest.mark.parametrize("killed_after", range(1, 7))
def test_a_kill_costs_one_step(tmp_path: Path, killed_after: int) -> None:
    truth = since(17, Truth("q", cycles=1300.0))
    whole = state_of(JOB)
    search(whole, StubLab(truth), JOB)
    first, state = StubLab(truth, fail_after=killed_after), state_of(JOB)
    try:
        CommitBisection(state, [JOB], first, lambda: write_state(tmp_path, state), lambda _: None).run()
    except KeyboardInterrupt:
        state = read_state(tmp_path)
    second = StubLab(truth)
    search(state, second, JOB)
    assert not set(first.built) & set(second.built)
    assert state.range_of(JOB.id) == whole.range_of(JOB.id)
    assert sorted(state.compiled) == sorted(whole.compiled)


def test_trouble_of_the_farm_decides_nothing(tmp_path: Path) -> None:
    class Away(StubLab):
        def run(self, *_: object) -> CommitRun:
            raise InfraError("the device is away")

    state = state_of(JOB)
    lab = Away(since(3, Truth("q", fails="wrong")))
    with pytest.raises(InfraError, match="away"):
        CommitBisection(state, [JOB], lab, lambda: write_state(tmp_path, state), lambda _: None).run()
    again = read_state(tmp_path)
    search(again, StubLab(lab.truth), JOB)
    assert again.range_of(JOB.id).bad == 3


def test_the_evidence_names_commit_author_program_and_what_was_looked_at() -> None:
    bad = Truth("q", fallback=2)
    state, lab = state_of(JOB), StubLab(since(13, bad))
    search(state, lab, JOB)
    outcome = CommitsOutcome(state, Path("/f"), {state.commits[13].sha: ("M\texir/emit.py",)})
    text = markdown(outcome, "https://example.org/{commit}")
    sha = state.commits[13].sha
    assert f"is worse since [`{sha[:10]}`](https://example.org/{sha})" in text
    assert "Ada \\<ada" in text
    assert "fallback_ops 0 -> 2" in text
    assert "built by QNN: aten.relu.default 1 -> 3" in text
    assert "M exir/emit.py" in text
    assert f"compiled {len(state.compiled)} of them" in text
    assert "warning at" in text
    assert text.count("| good |") + text.count("| bad |") == len(state.searches[JOB.id].trials)
    lines = list(text_lines(outcome))
    assert any(line.startswith("  first bad: 000") for line in lines)


def found_outcome(**request: object) -> CommitsOutcome:
    """Return what is known after a search that found a commit which changes a file."""
    state = state_of(JOB)
    state.request = msgspec.structs.replace(state.request, **request)
    search(state, StubLab(since(13, Truth("q", fails="wrong"))), JOB)
    return CommitsOutcome(state, Path("/f"), {state.commits[13].sha: ("M\texir/emit.py",)})


@pytest.mark.parametrize(
    "template",
    [
        "https://x/{commit}?a={b}",
        "https://x/{commit",
        "{0}",
        "javascript:alert('{commit}')",
        "https://me:key@x/{commit}",
    ],
)
def test_a_commit_url_of_any_kind_costs_no_evidence(template: str) -> None:
    outcome = found_outcome()
    text = markdown(outcome, template)
    sha = outcome.first_bad(JOB.id).sha
    assert f"is worse since [`{sha[:10]}`](https://x/{sha}?a={{b}})" in text if "?" in template else "](" not in text
    for char, plain in (("(", "%28"), (")", "%29"), ("|", "%7C"), ("<", "%3C"), (">", "%3E")):
        assert f"](https://x/{plain}/{sha})" in markdown(outcome, f"https://x/{char}/{{commit}}")


def blocks(text: str) -> list[list[str]]:
    """Return the lines of each fenced block, as CommonMark has it."""
    found: list[list[str]] = []
    fence = ""
    for line in re.split(r"\r\n|\r|\n", text):
        is_fence = len(line) >= 3 and not line.strip("`")
        if fence and is_fence and len(line) >= len(fence):
            fence = ""
        elif fence:
            found[-1].append(line)
        elif is_fence:
            fence = line
            found.append([])
    assert not fence
    return found


@pytest.mark.parametrize("name", ["a\n```\n# pwned", "a```b\n```", "````", "x\r```", "\u2028```", "\udce9"])
def test_no_name_of_a_file_and_no_command_ends_its_block(name: str) -> None:
    outcome = found_outcome(build=("sh", "-c", f"make\n```\n# {name}"))
    outcome = msgspec.structs.replace(outcome, changed_files={outcome.first_bad(JOB.id).sha: (f"A\t{name}", "A\tend")})
    text = markdown(outcome)
    text.encode()
    files, command = blocks(text)
    assert (len(files), files[1]) == (2, "A end")
    assert command[0].startswith("farm bisect --commits")
    assert command[-1].endswith(f"'{JOB.id}'")


def test_the_command_to_do_it_again_has_all_that_was_asked() -> None:
    def command(**request: object) -> list[str]:
        [line] = [line for line in markdown(found_outcome(**request)).splitlines() if line.startswith("farm bisect")]
        return shlex.split(line)

    plain = command()
    assert not {"--toolchain", "--device", "--pairs", "--inferences"} & {word.partition("=")[0] for word in plain}
    asked = {"pairs": 20, "inferences": 7, "least_inferences": 7}
    words = command(toolchain="nightly main", virtual=False, device="d1", metric="latency", **asked)
    expected = ["--toolchain=nightly main", "--device=d1", "--pairs=20", "--inferences=7", "--metric=latency"]
    assert set(expected) < set(words)
    assert words[-1] == JOB.id


def test_a_search_that_is_refused_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_STORE", f"sqlite:///{tmp_path / 'farm.db'}")
    checkout = tmp_path / "executorch"
    make_repository(checkout, {"exir/__init__.py": "", "backends/x.py": ""})
    good = Truth()
    does_not_compile = Truth(state=BuildState.NOT_COMPILED, reason="KeyError")
    codes: list[int] = []
    for of_job, of_other in (
        (does_not_compile, good),
        (does_not_compile, None),
        (good, good),
    ):

        def truth(index: int, job: str, one: Truth = of_job, other: Truth | None = of_other) -> Truth:
            if job == JOB.id:
                return one
            return other or (Truth("q", fails="wrong") if index >= 9 else good)

        state = state_of(JOB, OTHER)
        state.request = msgspec.structs.replace(state.request, checkout=str(checkout))
        search(state, StubLab(truth), JOB, OTHER)
        # A commit of the repository, whose changes are shown.
        sha = commit(checkout, "Next", {"exir/__init__.py": f"n = {len(codes)}\n"})
        state.commits = tuple(msgspec.structs.replace(one, sha=sha) for one in state.commits)
        folder = tmp_path / "state" / "bisects" / state.id
        folder.mkdir(parents=True, exist_ok=True)
        write_state(folder, state)
        code, said = farm("--resume", state.id)
        codes.append(code)
        assert ("cannot be searched: the good commit" in said) is (of_job is does_not_compile)
    assert codes == [2, 3, 0]


def farm(*arguments: str) -> tuple[int, str]:
    """Return the exit code of `farm bisect`, and what it printed on one line."""
    result = CliRunner().invoke(cli, ["bisect", *arguments], standalone_mode=False)
    if isinstance(result.exception, FarmError):
        return result.exception.exit_code, f"{result.output} {result.exception}"
    assert result.exception is None, result.exception
    return result.return_value, " ".join(result.output.split())


def test_what_cannot_be_asked_is_one_line_and_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_STORE", f"sqlite:///{tmp_path / 'farm.db'}")
    checkout, job = tmp_path / "executorch", "smoke/add[SM8650-htp-8a8w]"
    make_repository(checkout, {"exir/__init__.py": "", "backends/x.py": ""})
    newer = commit(checkout, "Two", {"exir/__init__.py": "pass\n"})
    older = commit_before(checkout, newer)
    other = tmp_path / "other"
    make_repository(other, {"exir/__init__.py": "", "backends/x.py": ""})
    here = ("--checkout", str(checkout))
    refusals = {
        ("--commits", "HEAD~1", *here, job): "expected GOOD..BAD",
        ("--commits", "HEAD~1...HEAD", *here, job): "expected GOOD..BAD",
        ("--commits", "HEAD~1..HEAD", *here): "name one job",
        ("--commits", "HEAD~1..HEAD", job): "--checkout DIR",
        ("--commits", "HEAD..HEAD~1", *here, job): f"it is the other way round: try {older[:10]}..{newer[:10]}",
        ("--commits", "v9..HEAD", *here, job): "has no commit 'v9'",
        ("--commits", "HEAD~1..HEAD", *here, "smoke/ad[SM8650-htp-8a8w]"): "did you mean 'add'",
        ("--commits", "HEAD~1..HEAD", "--good", "x", *here, job): "--good is for runs",
        ("--commits", "HEAD~1..HEAD", "--build", "'", *here, job): "--build",
        ("--commits", "HEAD~1..HEAD", "--toolchain", "nope", *here, job): "unknown toolchain",
        ("--commits", "HEAD~1..HEAD", "--toolchain", "1.5.0", *here, job): "1.5.0 is release 1.5.0",
        ("--commits", "HEAD~1..HEAD", "--toolchain", "1.5.0", job): "1.5.0 is release 1.5.0",
        ("--commits", "HEAD~1..HEAD", "--toolchain", str(other), *here, job): f"is of {other}, not of {checkout}",
        ("--resume",): "there is no bisection",
        ("--resume", "../../etc"): "there is no bisection",
        ("--resume", "latest", job): "leave jobs and everything else out",
        ("--good", "a", "--bad", "b", "--anew", job): "--anew is for --commits",
        (job,): "name two runs with --good and --bad, or commits",
    }
    for arguments, expected in refusals.items():
        code, said = farm(*arguments)
        assert (code, expected in said) == (2, True), f"{arguments}: {code}: {said}"


def test_the_toolchain_that_is_named_compiles_the_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "executorch"
    make_repository(folder, {"exir/__init__.py": "", "backends/x.py": ""})
    main, other = (Path(f"/opt/{name}/bin/python") for name in ("main", "other"))
    (tmp_path / "farm.toml").write_text(
        f'[toolchain.main]\ncheckout = "{folder}"\npython = "{main}"\nqnn = "2.49"\n'
        f'[toolchain.other]\npython = "{other}"\nqnn = "2.51"\n'
    )
    config = load_config(tmp_path / "farm.toml")
    checkout, asked = Checkout(folder), state_of(JOB).request

    def chosen(ref: str) -> tuple[Path | None, str]:
        request = msgspec.structs.replace(asked, toolchain=ref)
        tree = worktree(with_toolchain(config, checkout, request), checkout, "HEAD").toolchain
        return tree.python, tree.qnn

    assert [chosen(ref) for ref in ("", "main", "other", "default")] == [
        (main, "2.49"), (main, "2.49"), (other, "2.51"), (None, ""),
    ]  # fmt: skip


def test_a_checkout_that_is_not_built_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FARM_STORE", f"sqlite:///{tmp_path / 'farm.db'}")
    folder = tmp_path / "executorch"
    make_repository(folder, {"exir/__init__.py": "", "backends/x.py": ""})
    commit(folder, "Two", {"exir/__init__.py": "pass\n"})
    code, said = farm(
        "--commits", "HEAD~1..HEAD", "--checkout", str(folder), "--virtual=1", "smoke/add[SM8650-htp-8a8w]"
    )
    expected = f"{folder}/backends/qualcomm/python has no PyQnnManagerAdaptor*.so: build it with {folder}/backends/"
    assert (code, expected in said) == (MissingToolError.exit_code, True), said

    config, checkout = load_config(), Checkout(folder)
    side = SideRequest(toolchain=str(folder), base="HEAD~1")
    request = ComparisonRequest(sides=(side, SideRequest(toolchain=str(folder))), socs=("SM8650",), suites=("smoke",))
    with pytest.raises(MissingToolError, match=re.escape(expected)):
        config_of(config, request, side, lambda _: None)
    assert not list((tmp_path / "cache").glob("toolchains/worktrees/*/*"))

    # A build of a commit brings its own libraries; those of the checkout serve where the sources are the same.
    built = msgspec.structs.replace(config, toolchain=ToolchainConfig(name="main", checkout=folder, build=("true",)))
    commit(folder, "Three", {"backends/qualcomm/aot.cpp": "int level = 1;\n"})
    checkout = Checkout(folder)
    require_built(built, checkout, checkout.commit("HEAD~1"))
    with pytest.raises(MissingToolError, match=f"toolchain main: {folder}"):
        require_built(built, checkout, checkout.commit("HEAD"))


def test_a_request_that_changed_is_refused_and_a_finished_one_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FARM_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FARM_STORE", f"sqlite:///{tmp_path / 'farm.db'}")
    checkout = tmp_path / "executorch"
    make_repository(checkout, {"exir/__init__.py": "", "backends/x.py": ""})
    second = commit(checkout, "Two", {"exir/__init__.py": "pass\n"})
    job = "smoke/add[SM8650-htp-8a8w]"
    state = state_of(JOB)
    first = state.commits[0]
    request = msgspec.structs.replace(
        state.request, checkout=str(checkout), good=commit_before(checkout, second), bad=second, jobs=(job,)
    )
    folder = tmp_path / "state" / "bisects" / state.id
    folder.mkdir(parents=True)
    write_state(folder, msgspec.structs.replace(state, request=request))
    span = ("--commits", "HEAD~1..HEAD", "--checkout", str(checkout), "--virtual=1")
    code, said = farm(*span, "--metric", "latency", job)
    assert code == 2
    assert f"bisection {state.id} of these commits is not finished and was asked otherwise (metric)" in said
    assert f"farm bisect --resume {state.id}" in said

    whole = state_of(JOB)
    search(whole, StubLab(since(9, Truth("q", fails="wrong"))), JOB)
    # A commit of the repository, whose changes are shown.
    named = tuple(msgspec.structs.replace(one, sha=second, parents=(request.good,)) for one in whole.commits)
    write_state(folder, msgspec.structs.replace(whole, request=request, commits=named))
    code, said = farm("--resume", state.id, "--json", "--markdown", str(tmp_path / "evidence.md"))
    assert code == 3
    answer = json.loads(said)
    assert answer["jobs"][0]["first_bad"]["sha"] == second
    assert answer["jobs"][0]["changed_files"] == ["M\texir/__init__.py"]
    assert "is worse since" in (tmp_path / "evidence.md").read_text()
    assert first.sha != second


def commit_before(checkout: Path, sha: str) -> str:
    from executorch_checkout import run_git

    return run_git(checkout, "rev-parse", f"{sha}~1").strip()
