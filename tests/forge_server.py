"""Local receiver of the parts of the APIs of GitHub and GitLab that farm calls, for the real clients of both."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from networks import serving

HEAD = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "token-of-a-test"


@dataclass
class ForgeServer:
    """State of the server: pull request 3 of one project, on both APIs."""

    port: int = 0
    me: str = "farm-bot"
    is_workflow: bool = False
    """True for a token that may not ask for its own user, as in a workflow of GitHub."""
    refuse: dict[str, int] = field(default_factory=dict)
    """Codes of refused requests by a part of the path."""
    statuses: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Commit and body of each status."""
    comments: list[dict[str, Any]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def bodies(self) -> list[str]:
        return [one["body"] for one in self.comments]

    def add(self, body: str, user: str) -> dict[str, Any]:
        number = len(self.comments) + 1
        one = {"id": number, "body": body, "user": {"login": user}, "author": {"id": user},
               "url": f"{self.address}/api/v3/repos/lab/net/issues/comments/{number}"}  # fmt: skip
        self.comments.append(one)
        return one

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        for part, code in self.refuse.items():
            if part in path:
                return code, {"message": f"a server says: {TOKEN}"}
        if path in ("/api/v3/user", "/api/v4/user"):
            return (403, {"message": "no"}) if self.is_workflow else (200, {"login": self.me, "id": self.me})
        if found := re.fullmatch(r"/api/v3/repos/lab/net/pulls/3|/api/v4/projects/lab%2Fnet/merge_requests/3", path):
            number = {"number": 3, "iid": 3, "sha": HEAD, "head": {"sha": HEAD}}
            issue = f"{self.address}/api/v3/repos/lab/net/issues/3"
            return 200, {**number, "issue_url": issue, "url": f"{self.address}{found[0]}"}
        if found := re.fullmatch(r"/api/v3/repos/lab/net(?:/commits/(\w+))?", path):
            return 200, {"full_name": "lab/net", "sha": found[1], "url": f"{self.address}{path}"}
        if found := re.fullmatch(r"/api/v3/repos/lab/net/statuses/(\w+)|/api/v4/projects/[\w%]+/statuses/(\w+)", path):
            self.statuses.append((found[1] or found[2], body))
            return 201, {"id": 1, **body}
        return self._comments(method, path, body)

    def _comments(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        notes = "/api/v4/projects/lab%2Fnet/merge_requests/3/notes"
        if path in ("/api/v3/repos/lab/net/issues/3/comments", notes):
            return (200, self.comments) if method == "GET" else (201, self.add(body["body"], self.me))
        if found := re.fullmatch(rf"/api/v3/repos/lab/net/issues/comments/(\d+)|{notes}/(\d+)", path):
            one = self.comments[int(found[1] or found[2]) - 1]
            one["body"] = body["body"]
            return 200, one
        return 404, {"message": "Not Found"}


@contextlib.contextmanager
def forge_server() -> Iterator[ForgeServer]:
    """Serve on loopback; a request without the token is refused."""
    forge = ForgeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            given = (self.headers.get("Authorization", ""), self.headers.get("PRIVATE-TOKEN", ""))
            path = self.path.partition("?")[0]
            fine = TOKEN in given[0] or given[1] == TOKEN
            code, data = 401, {"message": "no"}
            if fine:
                code, data = forge.answer(self.command, path, json.loads(raw or b"{}"))
            body = json.dumps(data).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PATCH = do_PUT = do_GET  # noqa: N815 - as http.server calls it

    with serving(Handler) as forge.port:
        yield forge
