"""Access control over real HTTP: the token, its cookie, host names, headers, and log lines."""

from __future__ import annotations

import re
import socket
import time
from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest

from farm.base.errors import UsageError
from farm.serve import access
from farm.serve.pages.all import PAGES
from farm.serve.security import is_loopback, local_path
from farm.store.accounts import Role

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from conftest import Answer, Filled, Server

    from farm.base.config.settings import Config

    Start = Callable[..., AbstractContextManager[Server]]

FORM = {"Content_Type": "application/x-www-form-urlencoded"}


@pytest.fixture
def token(filled: Filled) -> str:
    """Token of an account."""
    return filled.store.accounts.add("ada", Role.DEVELOPER)


def log_in(server: Server, token: str, path: str = "/", **headers: str) -> Answer:
    """Log in as a browser does, which has read the form before."""
    form = server.get("/login")
    csrf, cookie = proof_of(form)
    body = urlencode({"token": token, "next": path, "_csrf_token": csrf})
    return server.get("/login", method="POST", body=body, **FORM, **{"Cookie": cookie, **headers})


def proof_of(page: Answer, cookie: str = "") -> tuple[str, str]:
    """Return the field of a form against requests of other pages, and the cookies with it."""
    field = re.search(r'name="_csrf_token" value="([0-9a-f]+)"', page.text)
    assert field
    given = "; ".join(one.partition(";")[0] for one in page.cookies if "csrf" in one)
    return field[1], "; ".join(filter(None, (cookie, given)))


@pytest.mark.parametrize("path", ["/", "/runs/latest", "/nowhere", "/api/v1/progress", "/login", "/runs?limit=x"])
def test_every_answer_has_a_strict_policy(server_of_unchanged: Server, path: str) -> None:
    headers = server_of_unchanged.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-opener-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


def test_style_and_scripts_are_files_that_never_change(server: Server) -> None:
    page = server.get("/")
    assert (
        "script-src 'self'; style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=';"
        in page.headers["content-security-policy"]
    )
    assert "<style" not in page.text
    assert not re.search(r"<script(?! src=)", page.text)
    found = re.findall(r'(?:src|href)="(/assets/[^"]+)"', page.text)
    assert len(found) == 7
    for path in found:
        asset = server.get(path)
        assert asset.status == 200
        assert "immutable" in asset.headers["cache-control"]
        assert asset.headers["content-type"].startswith("text/css" if path.endswith("css") else "text/javascript")


def test_a_page_of_elsewhere_that_became_127_0_0_1_sees_nothing(server: Server) -> None:
    port = server.port
    for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", "", "[::2]", "localhost.evil"):
        refused = server.get("/", Host=host)
        assert refused.status == 400, host
        assert "quantized_ops" not in refused.text
    for host in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", "[::1]:1", "localhost:9999"):
        assert server.get("/", Host=host).status == 200, host


def test_beyond_loopback_any_host_name_will_do_as_a_token_is_needed(start: Start, filled: Filled, token: str) -> None:
    del filled
    with start("0.0.0.0") as server:  # noqa: S104 - what it believes
        assert server.get("/", Host="farm.lab").status == 303
        assert server.get("/", Host="farm.lab", Authorization=f"Bearer {token}").status == 200


def test_without_the_token_there_is_only_the_way_to_log_in(start: Start, filled: Filled, token: str) -> None:
    with start() as server:
        for path in ("/runs?user=ada&page=2", f"/artifacts/{filled.sha256}", f"/runs/{filled.runs[0]}"):
            sent = server.get(path)
            assert sent.status == 303
            assert sent.headers["location"].startswith("/login?next=%2F")
            assert filled.runs[0] not in sent.text
        for answer in (server.get("/api/v1/progress"), server.get("/", Accept="application/json")):
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
        page = server.get(sent.headers["location"])
        assert page.status == 200
        assert 'type="password"' in page.text
        assert "Devices" not in page.text
        assert token not in page.text


def test_who_logs_in_gets_a_cookie_that_is_not_the_token(
    start: Start, filled: Filled, token: str, capfd: pytest.CaptureFixture[str]
) -> None:
    del filled
    with start() as server:
        wrong = log_in(server, "wrong")
        assert (wrong.status, [one for one in wrong.cookies if "session" in one]) == (401, [])
        assert "This is no token of an account." in wrong.text
        answer = log_in(server, token, "/runs?user=ada")
        assert (answer.status, answer.headers["location"]) == (303, "/runs?user=ada")
        [cookie] = [one for one in answer.cookies if one.startswith("farm-session")]
        assert token not in cookie
        assert {"httponly", "samesite=lax", "path=/"} <= {part.strip().casefold() for part in cookie.split(";")}
        value = cookie.partition(";")[0]
        page = server.get("/", Cookie=value)
        assert (page.status, "Sign out" in page.text) == (200, True)
        name, _, proof = value.partition("=")
        for forged in (
            f"{name}={proof[:30]}{'A' if proof[30] == 'B' else 'B'}{proof[31:]}",
            f"{name}=x",
            f"{name}={token}",
        ):
            assert server.get("/runs", Cookie=forged).status == 303, forged
        csrf, cookies = proof_of(page, value)
        assert server.get("/logout", method="POST", body="", **FORM, Cookie=cookies).status == 403
        left = server.get("/logout", method="POST", body=f"_csrf_token={csrf}", **FORM, Cookie=cookies)
        assert left.status == 303
        assert any(one.startswith(f"{name}=null") for one in left.cookies)
        assert server.get("/runs", Cookie=value).status == 303, "a copy of the cookie ends with its session"
    with start() as server:
        assert server.get("/runs", Cookie=value).status == 303
    logged = capfd.readouterr().err
    assert "127.0.0.1 POST /login 401" in logged
    assert "GET /runs 200" not in logged
    assert token not in logged
    assert "wrong" not in logged
    assert "user=ada" not in logged


def test_a_session_has_no_id_that_somebody_else_chose(start: Start, filled: Filled, token: str) -> None:
    del filled
    with start() as server:
        [known] = [one.partition("=")[0] for one in log_in(server, token).cookies if one.startswith("farm-session")]
        chosen = f"{known}={'a' * 64}"
        form = server.get("/login", Cookie=chosen)
        csrf, cookie = proof_of(form, chosen)
        body = urlencode({"token": token, "_csrf_token": csrf})
        answer = server.get("/login", method="POST", body=body, **FORM, Cookie=cookie)
        assert answer.status == 303
        assert server.get("/runs", Cookie=chosen).status == 303
        [given] = [one.partition(";")[0] for one in answer.cookies if one.startswith("farm-session")]
        assert server.get("/runs", Cookie=given).status == 200


def test_a_form_of_elsewhere_does_not_log_in(start: Start, filled: Filled, token: str) -> None:
    del filled
    with start() as server:
        assert server.get("/login", method="POST", body=f"token={token}", **FORM).status == 403
        assert log_in(server, token).status == 303
        assert server.get("/login", method="POST", body="token=" + "x" * 2_000_000, **FORM).status == 413


def test_who_guesses_has_to_wait_with_the_right_token_too(start: Start, filled: Filled, token: str) -> None:
    del filled
    with start() as server:
        assert {log_in(server, f"guess{n}").status for n in range(10)} == {401}
        assert log_in(server, token).status == 429


def test_a_session_ends_after_a_week(start: Start, filled: Filled, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    del filled
    with start() as server:
        answer = log_in(server, token)
        [cookie] = [one.partition(";")[0] for one in answer.cookies if one.startswith("farm-session")]
        assert server.get("/runs", Cookie=cookie).status == 200
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + access.SESSION_S + 1)
        assert server.get("/runs", Cookie=cookie).status == 303


@pytest.mark.parametrize(
    "path", ["//evil.example", "/\\evil.example", "https://evil.example", "evil", "", "/\nx", "/é"]
)
def test_after_logging_in_nobody_is_led_elsewhere(path: str) -> None:
    assert local_path(path) == "/"


def test_what_only_this_machine_reaches() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1")))  # noqa: S104 - asked, not listened on
    with pytest.raises(UsageError, match="no such address"):
        is_loopback("no such host")


def test_a_session_ends_with_its_account(start: Start, filled: Filled, token: str) -> None:
    with start() as server:
        answer = log_in(server, token)
        [cookie] = [one.partition(";")[0] for one in answer.cookies if one.startswith("farm-session")]
        assert server.json_of("/api/v1/me", Cookie=cookie) == {"name": "ada", "role": "developer", "schema": 1}
        filled.store.accounts.remove("ada")
        filled.store.accounts.add("another", Role.VIEWER)
        assert server.get("/runs", Cookie=cookie).status == 303
        assert server.get("/runs", Authorization=f"Bearer {token}").status == 303
        again = filled.store.accounts.add("ada", Role.OPERATOR)
        assert server.get("/runs", Cookie=cookie).status == 303
        assert server.get("/runs", Authorization=f"Bearer {again}").status == 200


def test_a_network_server_without_its_last_account_refuses(
    start: Start, filled: Filled, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert token
    monkeypatch.setattr(access, "is_loopback", lambda _: False)
    with start() as server:
        filled.store.accounts.remove("ada")
        assert server.get("/runs").status == 303
        for path in ("/api/v1/runs", f"/artifacts/{filled.sha256}"):
            assert server.get(path, Accept="application/json").status == 401


def test_two_servers_of_a_host_have_two_cookies(start: Start, filled: Filled, token: str) -> None:
    del filled
    names = []
    for _ in range(2):
        with start() as server:
            names += [one.partition("=")[0] for one in log_in(server, token).cookies if one.startswith("farm-session")]
    assert len(set(names)) == 2


def test_a_store_has_no_token(filled: Filled, token: str, config: Config) -> None:
    assert filled.store.accounts.of_token(token) is not None
    assert filled.store.accounts.of_token("") is None
    with pytest.raises(UsageError, match="exists"):
        filled.store.accounts.add("ada", Role.VIEWER)
    for name in ("", " ", "a\x1b[31m", "x" * 300):
        with pytest.raises(UsageError, match="printable"):
            filled.store.accounts.add(name, Role.VIEWER)
    for file in config.state_dir.glob("farm.db*"):
        assert token.encode() not in file.read_bytes()


def test_other_machines_need_an_account(start: Start, filled: Filled) -> None:
    with pytest.raises(UsageError, match="farm lab accounts --add"), start("0.0.0.0"):  # noqa: S104
        pass
    filled.store.accounts.add("ada", Role.VIEWER)
    with start("0.0.0.0") as server:  # noqa: S104 - what it believes
        assert server.get("/runs").status == 303


def test_a_connection_whose_request_never_comes_is_closed(
    start: Start, filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("farm.serve.server.HEADERS_S", 0.5)
    [runs] = [page for page in PAGES if page.path == "/runs"]
    make = runs.make
    monkeypatch.setattr(runs, "make", lambda store, query: (time.sleep(1.0), make(store, query))[1])
    assert filled.live
    with start() as server:
        for before in (b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as slow:
                slow.sendall(before + b"GET / HTTP/1.1\r\nHost: 127.")
                began = time.monotonic()
                said = b"".join(iter(lambda place=slow: place.recv(65536), b""))
                assert time.monotonic() - began < 15
            assert said.count(b"HTTP/1.1 ") == said.count(b"HTTP/1.1 200") == bool(before)
        # A page that takes longer is not cut off.
        assert server.get("/runs").status == 200
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as endless:
            endless.sendall(b"GET / HTTP/1.1\r\nCookie: " + b"x" * 60_000)
            assert endless.recv(100).startswith(b"HTTP/1.1 400")
