"""Reviews on pull requests: the real clients of GitHub and GitLab against a local receiver of their APIs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import github
import pytest
from forge_server import HEAD, TOKEN, ForgeServer, forge_server

from farm.base.errors import UsageError
from farm.cli.output import post_review
from farm.dispatch.notify.pull_request import Place, PullRequest, ReviewError, place_of, take_token
from farm.report.formats.review import NEW, Review

REVIEW = Review(
    name="farm run gate", state="failed", sentence="1 of 3 jobs failed", sections={NEW: [("ops/add", "no")]}
)
ADDRESSES = {"github": "/lab/net/pull/3", "gitlab": "/lab/net/-/merge_requests/3"}
STATES = {"github": "failure success error", "gitlab": "failed success canceled"}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyGithub make no pauses between requests, a second before each that writes."""
    at_once = partial(github.Github, seconds_between_requests=0, seconds_between_writes=0)
    monkeypatch.setattr(github, "Github", at_once)


@pytest.fixture
def forge() -> Iterator[ForgeServer]:
    with forge_server() as server:
        yield server


@pytest.fixture(params=ADDRESSES)
def pull(forge: ForgeServer, request: pytest.FixtureRequest) -> PullRequest:
    return PullRequest(place_of(forge.address + ADDRESSES[request.param], {}), TOKEN)


def test_a_review_is_a_status_and_one_comment_that_the_next_review_replaces(
    forge: ForgeServer, pull: PullRequest
) -> None:
    # A comment of a deleted account is in the way of no review.
    ghost = forge.add("<!-- farm run gate -->", "ghost")
    ghost["user"] = ghost["author"] = None
    pull.post(REVIEW)
    [(commit, status)] = forge.statuses
    assert (commit, status["description"]) == (HEAD, "1 of 3 jobs failed")
    assert "farm run gate" in (status.get("context"), status.get("name"))
    assert "| ops/add | no |" in forge.bodies()[1]

    forge.add("<!-- farm run gate -->\nof somebody else with the same beginning", "mallory")
    forge.add("of me, about something else", forge.me)
    pull.post(Review(name=REVIEW.name, state="passed", sentence="all 3 jobs passed"))
    pull.post(Review(name="farm run other", state="infra", sentence="no device"))
    _, first, foreign, mine, other = forge.bodies()
    assert "all 3 jobs passed" in first
    assert "ops/add" not in first
    assert "somebody else" in foreign
    assert "something else" in mine
    assert "no device" in other
    assert [status["state"] for _, status in forge.statuses] == STATES[pull.place.kind].split()


def test_an_unexpected_answer_loses_no_exit_code_of_a_run(
    forge: ForgeServer, pull: PullRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    for answer in ({"body": 5}, {"body": None}, {"user": "x", "author": "x"}, {"user": 5, "author": 5}):
        forge.add("of me", forge.me).update(answer)
        post_review(pull, lambda: REVIEW)
        assert f"posted to {pull.place}" in (output := capsys.readouterr().err) or "an unexpected answer" in output
        assert TOKEN not in output


def test_every_name_of_a_run_has_its_own_comment(forge: ForgeServer, pull: PullRequest) -> None:
    names = [f"farm run {one}" for one in ("a-b", "ab", "a/b", "a--b", "a>b", "n" * 300, "n" * 301)]
    for name in names * 2:
        pull.post(Review(name=name, state="passed", sentence=name))
    assert len(forge.comments) == len(names)
    assert all(body.splitlines()[0].count("--") == 2 for body in forge.bodies())


def test_names_statuses_and_comments_are_cut_below_the_limits_of_the_servers(
    forge: ForgeServer, pull: PullRequest
) -> None:
    findings = [(f"ops/{n}", "x" * 300 + "|") for n in range(50)]
    sections = {f"{n}": findings for n in range(9)}
    pull.post(
        Review(name="farm run " + "n" * 300, state="failed", sentence="s\nt\x1b[31m" + "u" * 300, sections=sections)
    )
    [body] = forge.bodies()
    assert 50_000 < len(body) <= 60_000
    assert body.endswith("the report has all of it.*\n")
    [(_, status)] = forge.statuses
    assert status["description"].startswith("s tu")
    assert len(status["description"]) == 140
    assert len(status.get("context") or status.get("name") or "") <= 255


def test_the_token_of_a_workflow_knows_its_own_comment(forge: ForgeServer) -> None:
    forge.is_workflow, forge.me = True, "github-actions[bot]"
    pull = PullRequest(place_of(f"{forge.address}{ADDRESSES['github']}", {}), TOKEN)
    pull.post(REVIEW)
    pull.post(REVIEW)
    assert len(forge.comments) == 1


def test_a_refusal_names_the_next_step_and_no_text_of_the_server(forge: ForgeServer, pull: PullRequest) -> None:
    for code, words in ((401, "is not accepted"), (403, "needs to write"), (404, "no such"), (422, "answers 422")):
        forge.refuse["statuses"] = code
        with pytest.raises(ReviewError, match=words) as error:
            pull.post(REVIEW)
        assert TOKEN not in str(error.value)


def test_a_wrong_number_or_server_is_found_before_the_work(forge: ForgeServer) -> None:
    for path in ADDRESSES.values():
        with pytest.raises(ReviewError, match="no such pull request"):
            PullRequest(place_of(f"{forge.address}{path}4", {}), TOKEN)
    with pytest.raises(ReviewError, match="cannot be reached"):
        PullRequest(Place("gitlab", "http://127.0.0.1:9", "lab/net", 3), TOKEN)


@pytest.mark.parametrize(
    "text",
    ["", "lab/net#3", "http://github.com/lab/net/pull/3", "https://github.com/lab/net/issues/3", "https://me@h/a/b/pull/3",
     "ftp://127.0.0.1/a/b/pull/3", "https://github.com/lab/net/pull/x"],
)  # fmt: skip
def test_an_address_that_is_no_pull_request_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected https://HOST/OWNER/NAME/pull/N"):
        place_of(text, {})


def test_ci_names_its_own_pull_request(tmp_path: Path) -> None:
    event = tmp_path / "event.json"
    actions = {"GITHUB_ACTIONS": "true", "GITHUB_REPOSITORY": "lab/net", "GITHUB_SHA": "merge"}
    on_push = Place("github", "https://api.github.com", "lab/net", None, "merge")
    for number, place in ((7, Place("github", "https://api.github.com", "lab/net", 7)), ("7; rm", on_push)):
        event.write_text(json.dumps({"pull_request": {"number": number}}))
        assert place_of("ci", actions | {"GITHUB_EVENT_PATH": str(event)}) == place
    lab = {"GITLAB_CI": "true", "CI_SERVER_URL": "https://git.lab", "CI_PROJECT_ID": "12", "CI_COMMIT_SHA": "abc"}
    assert place_of("ci", lab | {"CI_MERGE_REQUEST_IID": "5"}) == Place("gitlab", "https://git.lab", "12", 5, "abc")
    assert place_of("ci", lab).number is None
    with pytest.raises(UsageError, match="neither GitHub Actions nor GitLab CI"):
        place_of("ci", {})


def test_a_commit_without_a_pull_request_gets_a_status_alone(forge: ForgeServer) -> None:
    PullRequest(Place("github", f"{forge.address}/api/v3", "lab/net", None, HEAD), TOKEN).post(REVIEW)
    assert [commit for commit, _ in forge.statuses] == [HEAD]
    assert forge.comments == []


def test_no_child_process_inherits_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", TOKEN)
    assert take_token("github") == TOKEN
    assert "GITHUB_TOKEN" not in os.environ
    with pytest.raises(UsageError, match="GITHUB_TOKEN has no token"):
        take_token("github")
