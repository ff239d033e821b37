"""What a bisection over commits found, as text for a terminal, as Markdown for an issue, and as plain data."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from farm.analysis.confirmation import PAIRS
from farm.regressions.commit_records import CommitBuild, QuestionKind
from farm.report.model.commits import commit_link
from farm.system.text import one_line, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from farm.regressions.commit_records import CommitsRequest
    from farm.regressions.commit_session import CommitsOutcome
    from farm.toolchains.commits import Commit

_MOST_FILES = 20
_REASON_CHARS = 160
# What would end a link or a cell of a table.
_IN_A_LINK = str.maketrans({char: f"%{ord(char):02X}" for char in "()<>|\\`"})


def text_lines(outcome: CommitsOutcome) -> Iterator[str]:
    """Yield what was found, line by line; long ones are not wrapped."""
    state = outcome.state
    for number, job_id in enumerate(state.searches):
        yield from ([""] if number else [])
        yield one_line(job_id)
        question = state.searches[job_id].question
        if question is None:
            yield "  not asked yet"
            continue
        if not question.is_open:
            yield f"  {'cannot be searched' if question.kind is QuestionKind.REFUSED else 'no step'}: {question.reason}"
            continue
        span = state.range_of(job_id)
        first = state.commits[span.bad]
        yield f"  wrong: {one_line(question.reason)}"
        yield from (f"  also worse: {one_line(one)}" for one in question.also)
        yield f"  last good: {_told(state.commits[span.good])}"
        yield f"  first bad: {_told(first)}"
        yield f"             {one_line(first.author)}, {first.date}"
        if span.skipped:
            left = ", ".join(state.commits[index].short for index in (*span.skipped, span.bad))
            yield f"  a range, as only commits that cannot tell are left: the first bad is one of {left}"
        yield from (f"  program: {line}" for line in program_changes(*_builds(outcome, job_id)))
        yield from (f"  changed: {one_line(path)}" for path in _files(outcome, first))
    yield ""
    yield (
        f"{len(state.commits) - 1} commits, {len(state.compiled)} of them (with the ends) compiled, "
        f"{state.seconds:.0f} s; a merge counts as one commit"
    )
    for index, warnings in sorted(state.warnings.items()):
        yield from (f"warning at {state.commits[index].short}: {one_line(text)}" for text in warnings)
    if any(one.question and one.question.is_open for one in state.searches.values()):
        yield f"for an issue: {outcome.folder / 'evidence.md'}"


def markdown(outcome: CommitsOutcome, commit_url: str = "") -> str:
    """Return the evidence to paste into an issue; `commit_url` with `{commit}` in it makes commits links."""
    state, lines = outcome.state, list[str]()

    def link(commit: Commit) -> str:
        address = commit_link(commit_url, commit.sha).translate(_IN_A_LINK)
        return f"[`{commit.short}`]({address})" if address else f"`{commit.short}`"

    for job_id in outcome.found:
        search, span = state.searches[job_id], state.range_of(job_id)
        question = search.question
        first, last = state.commits[span.bad], state.commits[span.good]
        if question is None:
            continue
        lines += [f"### `{job_id}` is worse since {link(first)}", ""]
        lines += [f"* first bad commit: {link(first)} {_escaped(first.subject)}"]
        lines += [f"* by {_escaped(first.author)}, {first.date}"]
        if first.is_merge:
            lines += [f"* a merge of {len(first.parents)} parents, taken as one: search what it merged by itself"]
        lines += [f"* last good commit: {link(last)} {_escaped(last.subject)}"]
        lines += [f"* what is wrong, decided by {question.kind}: {_escaped(question.reason)}"]
        lines += [f"* also worse: {_escaped(one)}" for one in question.also]
        if span.skipped:
            left = ", ".join(link(state.commits[index]) for index in (*span.skipped, span.bad))
            lines += [f"* a range, as only commits that cannot tell are left: one of {left}"]
        if changes := list(program_changes(*_builds(outcome, job_id))):
            lines += ["", "Its program, last good to first bad:", "", *(f"* {_escaped(one)}" for one in changes)]
        if files := list(_files(outcome, first)):
            lines += ["", "What the commit changes:", "", *_block("\n".join(files))]
        lines += ["", "| commit | answer | program | why |", "| --- | --- | --- | --- |"]
        for index, trial in sorted(search.trials.items()):
            if trial.answer is not None:
                why = _escaped(trial.reason[:_REASON_CHARS])
                lines.append(f"| {link(state.commits[index])} | {trial.answer} | {trial.words} | {why} |")
        lines.append("")
    if lines:
        request = state.request
        facts = ", ".join(
            f"{name} {version}" for name, version in sorted(state.identity.items()) if not name.endswith("_content")
        )
        counts = (
            f"Looked at {len(state.commits) - 1} commits and compiled {len(state.compiled)} of them, with the ends "
            f"(along first parents; {facts}). Again:"
        )
        lines += [counts, "", *_block(_command(request))]
    for index, warnings in sorted(state.warnings.items()):
        lines += [f"* warning at {state.commits[index].short}: {_escaped(text)}" for text in warnings]
    return "\n".join(lines) + "\n" if lines else ""


def data(outcome: CommitsOutcome) -> dict[str, object]:
    """Return everything, for JSON."""
    state = outcome.state
    jobs = []
    for job_id, search in state.searches.items():
        is_found = job_id in outcome.found
        span = state.range_of(job_id) if is_found else None
        first = outcome.first_bad(job_id) if is_found else None
        jobs.append(
            {
                "job": job_id,
                "found": is_found,
                "question": search.question,
                "first_bad": first,
                "last_good": state.commits[span.good] if span else None,
                "exact": span.is_exact if span else False,
                "skipped": [state.commits[index].sha for index in span.skipped] if span else [],
                "program": list(program_changes(*_builds(outcome, job_id))) if is_found else [],
                "changed_files": list(outcome.changed_files.get(first.sha, ())) if first else [],
                "commits": [
                    {
                        "commit": state.commits[index].sha,
                        "answer": trial.answer,
                        "reason": trial.reason,
                        "build": trial.build,
                        "run": trial.run,
                        "pairs": trial.pairs,
                    }
                    for index, trial in sorted(search.trials.items())
                ],
            }
        )
    return {
        "bisection": state.id,
        "finished": state.is_finished,
        "request": state.request,
        "identity": state.identity,
        "commits": [commit.sha for commit in state.commits],
        "compiled_commits": [state.commits[index].sha for index in state.compiled],
        "warnings": {state.commits[index].sha: warnings for index, warnings in state.warnings.items()},
        "seconds": state.seconds,
        "folder": str(outcome.folder),
        "jobs": jobs,
    }


def program_changes(good: CommitBuild | None, bad: CommitBuild | None) -> Iterator[str]:
    """Yield how the program of one build differs from that of another: numbers, delegates, operators."""
    if good is None or bad is None or not good.bundle or not bad.bundle:
        return
    if good.program == bad.program:
        yield "the same"
        return
    yield f"another one: {good.program[:12]} -> {bad.program[:12]}"
    was = {one.metric: one.samples[0] for one in good.measurements if one.samples}
    for one in bad.measurements:
        if one.metric in was and one.samples and one.samples[0] != was[one.metric]:
            yield f"{one.metric} {was[one.metric]:g} -> {one.samples[0]:g} {one.unit}"
    tables = (("delegate", "delegates"), ("on the CPU", "fallback_ops"), ("built by QNN", "operators"))
    for word, field in tables:
        for name, old, new in _differences(getattr(good, field), getattr(bad, field)):
            yield f"{word}: {name} {old} -> {new}"


def _differences(good: Mapping[str, int], bad: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    for name in sorted(good.keys() | bad.keys()):
        if good.get(name, 0) != bad.get(name, 0):
            yield name, good.get(name, 0), bad.get(name, 0)


def _builds(outcome: CommitsOutcome, job_id: str) -> tuple[CommitBuild | None, CommitBuild | None]:
    span = outcome.state.range_of(job_id)
    good, bad = (outcome.state.known_trial(job_id, index).build for index in (span.good, span.bad))
    return good, bad


def _files(outcome: CommitsOutcome, commit: Commit) -> Iterator[str]:
    files = outcome.changed_files.get(commit.sha, ())
    yield from (one_line(one) for one in files[:_MOST_FILES])
    if len(files) > _MOST_FILES:
        yield f"and {len(files) - _MOST_FILES} more files"


def _command(request: CommitsRequest) -> str:
    """Return the command for a checkout that is the current folder."""
    words = ["farm", "bisect", "--commits", f"{request.good}..{request.bad}", "--checkout", "."]
    words += [f"--metric={request.metric}"] if request.metric else []
    words += [f"--build={shlex.join(request.build)}"] if request.build else []
    words += [f"--toolchain={request.toolchain}"] if request.toolchain else []
    words += ["--virtual"] if request.virtual else []
    words += [f"--device={request.device}"] if request.device else []
    words += [f"--pairs={request.pairs}"] if request.pairs != PAIRS else []
    words += [f"--inferences={request.inferences}"] if request.least_inferences else []
    return shlex.join([*words, *request.jobs])


def _told(commit: Commit) -> str:
    return one_line(f"{commit.short} {commit.subject}")


def _block(text: str) -> list[str]:
    """Return lines of Markdown that show text of other people as it is: none of it ends them."""
    text = visible(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [fence, text, fence]


def _escaped(text: str) -> str:
    """Return text of other people in one line of Markdown, in which it is nothing but text."""
    line = one_line(text)
    for char in "\\`*[]<|#@":
        line = line.replace(char, f"\\{char}" if char not in "@#" else f"{char}\u200b")
    return line
