"""Pull requests of GitHub and merge requests of GitLab: a commit status, and one comment that later reviews replace.

PyGithub and python-gitlab speak to the servers. Messages name no text of a server, which may be anything.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from farm.base.errors import FarmError, MissingToolError, UsageError
from farm.base.text import one_line
from farm.dispatch.notify.channels import is_loopback
from farm.report.formats.review import Review, review_markdown

_TIMEOUT_S = 15
_TRIES = 3
# GitHub refuses comments above 65,536 characters, and descriptions of a status above 140; GitLab names above 255.
_MOST_CHARS, _MOST_DESCRIPTION, _MOST_NAME = 60_000, 140, 200
_CUT = "\n\n*The comment was cut here: the report has all of it.*\n"
_GITHUB = re.compile(r"/([^/]+/[^/]+)/pull/([0-9]+)/?")
_GITLAB = re.compile(r"/(.+)/-/merge_requests/([0-9]+)/?")
_EXPECTED = "expected https://HOST/OWNER/NAME/pull/N, https://HOST/PROJECT/-/merge_requests/N, or ci"
_GITHUB_STATES = {"passed": "success", "failed": "failure", "infra": "error"}
# A canceled status is neither green nor red: infra does not count against the code.
_GITLAB_STATES = {"passed": "success", "failed": "failed", "infra": "canceled"}
_TOKENS = {"github": "GITHUB_TOKEN", "gitlab": "GITLAB_TOKEN"}


class ReviewError(FarmError):
    """Review that did not reach its pull request; the message contains no secret."""


class Place(msgspec.Struct, frozen=True):
    """Place of a review: a pull request, or a commit without one."""

    kind: str
    """Either `github` or `gitlab`."""
    server: str
    """Address of the API of GitHub, or of the GitLab server."""
    project: str
    number: int | None
    """Number of the pull request; None for a commit without one: it gets a status and no comment."""
    commit: str = ""
    """Commit for the status; empty for the head of the pull request."""

    def __str__(self) -> str:
        """Return project and number as their server writes them."""
        mark = "#" if self.kind == "github" else "!"
        return f"{self.project}@{self.commit[:12]}" if self.number is None else f"{self.project}{mark}{self.number}"


def place_of(text: str, env: Mapping[str, str]) -> Place:
    """Return the place of an address, or with `ci` of the running CI job. Raises UsageError."""
    if text == "ci":
        return _place_of_ci(env)
    parts = urlsplit(text)
    host = f"{parts.scheme}://{parts.netloc}"
    if parts.username is None and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts))):
        if found := _GITHUB.fullmatch(parts.path):
            api = "https://api.github.com" if parts.netloc == "github.com" else f"{host}/api/v3"
            return Place("github", api, found[1], int(found[2]))
        if found := _GITLAB.fullmatch(parts.path):
            return Place("gitlab", host, found[1], int(found[2]))
    raise UsageError(f"--pull-request {text}: {_EXPECTED}")


def take_token(kind: str) -> str:
    """Return the token of the environment and remove it there, as child processes inherit it. Raises UsageError."""
    name = _TOKENS[kind]
    if token := os.environ.pop(name, "").strip():
        return token
    raise UsageError(f"--pull-request: the environment variable {name} has no token")


class PullRequest:
    """Pull request that was found on its server, so that a wrong address or token ends a command before its work."""

    def __init__(self, place: Place, token: str) -> None:
        """Look for the pull request. Raises ReviewError; MissingToolError without the extra `review`."""
        self.place = place
        with _reported(place):
            self._forge: _GitHub | _GitLab = _GitHub(place, token) if place.kind == "github" else _GitLab(place, token)
            self._commit = place.commit or self._forge.head()

    def post(self, review: Review) -> None:
        """Set the status of the commit, and write or replace the comment. Raises ReviewError."""
        # No two names have one marker, and no name ends its HTML comment.
        marker = f"<!-- {quote(_name(review), safe=' ').replace('-', '%2D')} -->"
        body = f"{marker}\n{review_markdown(review)}"
        if len(body) > _MOST_CHARS:
            cut = body[: _MOST_CHARS - len(_CUT)]
            body = cut[: cut.rfind("\n")] + _CUT
        with _reported(self.place):
            self._forge.set_status(self._commit, review)
            if self.place.number is not None:
                self._forge.comment(marker, body)


class _GitHub:
    """Pull request of GitHub, or its repository; `_GitLab` has the same methods."""

    def __init__(self, place: Place, token: str) -> None:
        import github

        retry = github.GithubRetry(total=_TRIES, backoff_factor=0.5)
        auth = github.Auth.Token(token)
        self._api = github.Github(auth=auth, base_url=place.server, timeout=_TIMEOUT_S, retry=retry)
        self._repo = self._api.get_repo(place.project)
        self._pull = None if place.number is None else self._repo.get_pull(place.number)

    def head(self) -> str:
        assert self._pull is not None  # noqa: S101 - a place without a number has a commit
        return str(self._pull.head.sha)

    def set_status(self, commit: str, review: Review) -> None:
        more = {"target_url": review.url} if review.url else {}
        text = one_line(review.sentence, _MOST_DESCRIPTION)
        self._repo.get_commit(commit).create_status(
            _GITHUB_STATES[review.state], description=text, context=_name(review), **more
        )

    def comment(self, marker: str, body: str) -> None:
        assert self._pull is not None  # noqa: S101 - the caller looks at the number
        me = self._login()
        for one in self._pull.get_issue_comments():
            # Comments of deleted accounts have no user.
            if one.user is not None and one.user.login == me and (one.body or "").startswith(marker):
                one.edit(body)
                return
        self._pull.create_issue_comment(body)

    def _login(self) -> str:
        import github

        try:
            return str(self._api.get_user().login)
        except github.GithubException as error:
            if error.status != 403:
                raise
            # The token of a workflow may not ask for its own name.
            return "github-actions[bot]"


class _GitLab:
    def __init__(self, place: Place, token: str) -> None:
        import gitlab

        self._api = gitlab.Gitlab(place.server, private_token=token, timeout=_TIMEOUT_S)
        self._project = self._api.projects.get(place.project, lazy=True)
        self._merge = None if place.number is None else self._project.mergerequests.get(place.number)

    def head(self) -> str:
        assert self._merge is not None  # noqa: S101 - a place without a number has a commit
        return str(self._merge.sha)

    def set_status(self, commit: str, review: Review) -> None:
        more = {"target_url": review.url} if review.url else {}
        data: dict[str, Any] = {"state": _GITLAB_STATES[review.state], "name": _name(review),
                                "description": one_line(review.sentence, _MOST_DESCRIPTION), **more}  # fmt: skip
        self._project.commits.get(commit, lazy=True).statuses.create(data)

    def comment(self, marker: str, body: str) -> None:
        assert self._merge is not None  # noqa: S101 - the caller looks at the number
        self._api.auth()
        me = getattr(self._api.user, "id", None)
        for one in self._merge.notes.list(iterator=True):
            if (one.author or {}).get("id") == me and one.body.startswith(marker):
                one.body = body
                one.save()
                return
        self._merge.notes.create({"body": body})


@contextmanager
def _reported(place: Place) -> Iterator[None]:
    """Raise ReviewError for an error of a server or of the way to it."""
    try:
        import github
        import gitlab
        import requests
    except ModuleNotFoundError:
        from farm.builds.runtime.packages import install_hint

        raise MissingToolError(f"--pull-request needs another package: {install_hint('review')}") from None
    try:
        yield
    except github.GithubException as error:
        raise ReviewError(_refused(place, error.status)) from None
    except gitlab.GitlabError as error:
        raise ReviewError(_refused(place, error.response_code or 0)) from None
    except (requests.RequestException, OSError) as error:
        raise ReviewError(
            f"{place}: {urlsplit(place.server).netloc} cannot be reached: {type(error).__name__}"
        ) from None
    except Exception as error:  # noqa: BLE001 - see below
        # The clients check no types: the exit code of a run must not depend on the answer of a server.
        what = f"an unexpected answer ({type(error).__name__}): is it a server of {place.kind}?"
        raise ReviewError(f"{place}: {urlsplit(place.server).netloc} gives {what}") from None


def _name(review: Review) -> str:
    """Return the name of a review in one line; the hash of a long name keeps it apart from others."""
    name = one_line(review.name, _MOST_NAME)
    return name if name == review.name else f"{name} {hashlib.sha256(review.name.encode()).hexdigest()[:8]}"


def _refused(place: Place, code: int) -> str:
    hints = {
        401: f"the token of {_TOKENS[place.kind]} is not accepted",
        403: "the token may not do that: it needs to write commit statuses and comments",
        404: "no such pull request, or the token may not see it",
    }
    return f"{place}: {urlsplit(place.server).netloc} answers {code}: {hints.get(code, 'try again later')}"


def _place_of_ci(env: Mapping[str, str]) -> Place:
    if env.get("GITHUB_ACTIONS") == "true" and env.get("GITHUB_REPOSITORY"):
        number = _number_of_event(env.get("GITHUB_EVENT_PATH", ""))
        api = env.get("GITHUB_API_URL", "https://api.github.com")
        # GITHUB_SHA of a pull request is a temporary merge commit, whose status is not shown.
        return Place("github", api, env["GITHUB_REPOSITORY"], number, "" if number else env.get("GITHUB_SHA", ""))
    if env.get("GITLAB_CI") == "true" and env.get("CI_PROJECT_ID"):
        merge = env.get("CI_MERGE_REQUEST_IID", "")
        number = int(merge) if merge.isdecimal() else None
        # CI_COMMIT_SHA of a pipeline for merged results is a temporary merge commit.
        commit = env.get("CI_MERGE_REQUEST_SOURCE_BRANCH_SHA") or env.get("CI_COMMIT_SHA", "")
        return Place("gitlab", env.get("CI_SERVER_URL", "https://gitlab.com"), env["CI_PROJECT_ID"], number, commit)
    raise UsageError(f"--pull-request ci: neither GitHub Actions nor GitLab CI runs this command; {_EXPECTED}")


def _number_of_event(file: str) -> int | None:
    try:
        number = json.loads(Path(file).read_bytes())["pull_request"]["number"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) else None
