"""`farm run --seconds`: accepted jobs, limits, and the runs whose numbers are compared with it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from farm_home import FarmHome

from farm.base.config.settings import load_config
from farm.base.errors import UsageError
from farm.dispatch.device_run.device_run import DeviceRun
from farm.dispatch.request.choose import jobs_of, select
from farm.dispatch.request.plan import RunPlan
from farm.dispatch.request.request import RunRequest
from farm.replay.stored_result import StoredResult
from farm.results.analysis.history import Point, split
from farm.results.attempt import Attempt, Stage, Verdict
from farm.store.view import JobView, RunView
from farm.suites.generate import Generate
from farm.suites.suite import Job

STORY = """
[suite]
name = "stories"
description = "A stub of a decoder"
precisions = ["fp32"]
[case.story]
pte = "hybrid.pte"
[case.story.generate]
prompts = [[1, 2, 3], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
new = 12
"""
SUSTAINED = RunRequest(socs=("SM8650",), suites=("smoke",), seconds=60)


def jobs(tmp_path: Path) -> list[Job]:
    """Return a job that generates text, and an ordinary job."""
    one, *_ = jobs_of(load_config(folder=tmp_path), SUSTAINED)
    case = msgspec.structs.replace(one.case, name="story", generate=Generate(prompt_lengths=(8,)))
    return [msgspec.structs.replace(one, case=case), one]


def test_it_is_refused_where_nothing_is_generated(tmp_path: Path) -> None:
    story, other = jobs(tmp_path)
    config = load_config(folder=tmp_path)
    assert select(SUSTAINED, [story], judged=False) == (story,)
    with pytest.raises(UsageError, match=r"--seconds is for programs that generate text: smoke/.* does not"):
        select(SUSTAINED, [story, other], judged=False)
    with pytest.raises(UsageError, match="nor 1 more"):
        select(SUSTAINED, [other, other], judged=False)
    with pytest.raises(UsageError, match="--heap runs every job once: leave --seconds out"):
        jobs_of(config, msgspec.structs.replace(SUSTAINED, heap=True))


def test_what_a_program_is_asked_to_go_on_for_is_no_delay(tmp_path: Path) -> None:
    plan = RunPlan("r", tmp_path, tmp_path, (), (), {}, tmp_path, seconds=60)
    assert plan.most_silence_s == msgspec.structs.replace(plan, seconds=None).most_silence_s + 120
    story, other = jobs(tmp_path)
    run: Any = SimpleNamespace(flags=lambda *_: {})
    asked = [DeviceRun.options(run, job, plan) for job in (story, other)]
    assert [one.seconds for one in asked] == [60, None], "a health check generates nothing"
    assert asked[0].timeout_s == 300, "the time to go on comes to that where the runner is asked"


def test_a_simulator_executes_a_sample_once_after_its_warm_up(tmp_path: Path) -> None:
    _, other = jobs(tmp_path)
    certain = msgspec.structs.replace(other, case=msgspec.structs.replace(other.case, deterministic=True))
    plan = RunPlan("r", tmp_path, tmp_path, (), (), {}, tmp_path, reducible=True)
    named = msgspec.structs.replace(plan, iterations=5, reducible=False)
    counts = {}
    for kind in ("virtual", "hardware"):
        run: Any = SimpleNamespace(flags=lambda *_: {}, device=SimpleNamespace(kind=kind))
        asked = [DeviceRun.options(run, *one) for one in ((other, plan), (certain, plan), (other, named))]
        counts[kind] = [(one.warm_up, one.iterations) for one in asked]
    assert counts == {"virtual": [(1, 1), (1, 3), (1, 5)], "hardware": [(1, 3), (1, 3), (1, 5)]}


def test_runs_of_another_length_are_no_history_of_it() -> None:
    lengths = (None, 60, 60, 600, None, 60)
    points = [
        Point(f"run-{n}", n, 1.0, {} if seconds is None else {"seconds": str(seconds)}, "hardware", "v")
        for n, seconds in enumerate(lengths)
    ]
    history = split(points)
    assert [point.run_id for point in history.comparable()] == ["run-1", "run-2", "run-5"]
    assert [event.text for event in history.events if event.parts] == [
        "seconds 60", "seconds 60 -> 600", "without seconds 600", "seconds 60",
    ]  # fmt: skip


def test_it_is_measured_again_for_as_long() -> None:
    attempt = Attempt("j", Verdict.PASSED, Stage.DONE, "")
    view = JobView("j", "suite", "case", "SM8650", "htp", "16a8w", (attempt,), decisive_attempt=1)
    for fact, seconds in (("60", 60), ("", None), ("-1", None), ("9" * 400, None), ("x", None)):
        facts = {"seconds": fact} if fact else {}
        run = RunView("run", "farm run", 0, None, None, "", "", facts, (), (view,))
        assert StoredResult(run, view, attempt, 1, "hardware", {}).seconds == seconds


@pytest.mark.whole
def test_what_it_measured_is_a_series_like_others(home: FarmHome, decoders: Path) -> None:
    folder = home.cwd / "stories"
    folder.mkdir()
    (folder / "suite.toml").write_text(STORY)
    shutil.copy(decoders / "hybrid.pte", folder)
    asked = ("--soc", "SM8650", "--backend", "xnnpack", "--suite", "./stories/", "--virtual", "1")
    done = home.farm("run", *asked, "--seconds", "1", timeout_s=300, code=0)
    assert "generated, simulated: stories/story[SM8650-xnnpack-ready]" in done.stdout
    assert "% after 1 s" in done.stdout

    metrics = ("first_token_time[3]", "first_token_time[11]", "sustained_rate", "temperature")
    named = [word for metric in metrics for word in ("--metric", metric)]
    points = home.json("history", "stories/story", *named)["points"]
    assert {one["metric"]: (one["unit"], one["n"]) for one in points} == {
        "first_token_time[3]": ("ns", 1), "first_token_time[11]": ("ns", 1), "sustained_rate": ("tokens/s", 12),
        "temperature": ("C", 2),
    }  # fmt: skip
    [celsius] = [one["value"] for one in points if one["metric"] == "temperature"]
    assert celsius == 25.0, "what a virtual device has"
    for form in ("jsonl", "hud"):
        assert "first_token_time[11]" in home.farm("data", "export", "--format", form).stdout
    again = home.farm("perf", "confirm", "stories/story", "--pairs", "5", "--metric", "first_token_time[11]", code=7)
    assert "first_token_time" not in again.stderr, again.stderr
