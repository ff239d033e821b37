"""Access over real HTTP: tokens, cookies, host names, headers, log lines, and sign-in by OpenID Connect with real
signatures.
"""

from __future__ import annotations

import re
import socket
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey
from networks import serving

from farm.base.config.settings import Config
from farm.base.config.shared import OpenIdConfig, ServeConfig
from farm.base.errors import UsageError
from farm.serve import access
from farm.serve.access import is_loopback, local_path
from farm.serve.pages.all import PAGES
from farm.store.accounts import Role

from .conftest import Answer, Filled, Server, Start, proof_of, running, session_of

# Access control over real HTTP: the token, its cookie, host names, headers, and log lines.


EVERYWHERE = "0.0.0.0"  # noqa: S104 - what a server believes to listen on


@pytest.fixture
def token(filled: Filled) -> str:
    """Token of an account."""
    return filled.store.accounts.add("ada", Role.DEVELOPER)


def test_every_answer_has_a_strict_policy(server_of_unchanged: Server) -> None:
    for path in ("/", "/runs/latest", "/nowhere", "/api/v1/progress", "/login", "/runs?limit=x"):
        headers = server_of_unchanged.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "access-control-allow-origin" not in headers
        assert headers.items() >= {
            "x-content-type-options": "nosniff", "referrer-policy": "no-referrer", "cache-control": "no-store",
            "cross-origin-opener-policy": "same-origin",
        }.items()  # fmt: skip


def test_style_and_scripts_are_files_that_never_change(server_of_unchanged: Server) -> None:
    page = server_of_unchanged.get("/")
    assert "script-src 'self'; style-src 'self' 'sha256-" in page.headers["content-security-policy"]
    assert "<style" not in page.text
    assert not re.search(r"<script(?! src=)", page.text)
    found = re.findall(r'(?:src|href)="(/assets/[^"]+)"', page.text)
    assert found
    for path in found:
        asset = server_of_unchanged.get(path)
        assert asset.status == 200
        assert "immutable" in asset.headers["cache-control"]
        assert asset.headers["content-type"].startswith("text/css" if path.endswith("css") else "text/javascript")


def test_a_page_of_elsewhere_that_became_127_0_0_1_sees_nothing(server_of_unchanged: Server) -> None:
    server, port = server_of_unchanged, server_of_unchanged.port
    for host in (f"evil.example:{port}", "evil.example", "127.0.0.1.evil.example", "", "[::2]", "localhost.evil"):
        refused = server.get("/", Host=host)
        assert refused.status == 400, host
        assert "quantized_ops" not in refused.text
    for host in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", "[::1]:1", "localhost:9999"):
        assert server.get("/", Host=host).status == 200, host


def test_other_machines_need_an_account_and_may_use_any_host_name(start: Start, filled: Filled) -> None:
    with pytest.raises(UsageError, match="farm lab accounts --add"), start(EVERYWHERE):
        pass
    token = filled.store.accounts.add("ada", Role.VIEWER)
    with start(EVERYWHERE) as server:
        assert server.get("/", Host="farm.lab").status == 303
        assert server.get("/", Host="farm.lab", Authorization=f"Bearer {token}").status == 200


def test_without_the_token_there_is_only_the_way_to_log_in(server: Server, filled: Filled, token: str) -> None:
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
    start: Start, token: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with start() as server:
        wrong = server.log_in("wrong")
        assert (wrong.status, [one for one in wrong.cookies if "session" in one]) == (401, [])
        assert "This is no token of an account." in wrong.text
        answer = server.log_in(token, "/runs?user=ada")
        assert (answer.status, answer.headers["location"]) == (303, "/runs?user=ada")
        [cookie] = [one for one in answer.cookies if one.startswith("farm-session")]
        assert token not in cookie
        assert {"httponly", "samesite=lax", "path=/"} <= {part.strip().casefold() for part in cookie.split(";")}
        value = session_of(answer)
        page = server.get("/", Cookie=value)
        assert (page.status, "Sign out" in page.text) == (200, True)
        name, _, proof = value.partition("=")
        changed = f"{proof[:30]}{'A' if proof[30] == 'B' else 'B'}{proof[31:]}"
        for forged in (changed, "x", token):
            assert server.get("/runs", Cookie=f"{name}={forged}").status == 303, forged
        csrf, cookies = proof_of(page, value)
        assert server.send("/logout", "", Cookie=cookies).status == 403
        left = server.send("/logout", {"_csrf_token": csrf}, Cookie=cookies)
        assert left.status == 303
        assert any(one.startswith(f"{name}=null") for one in left.cookies)
        assert server.get("/runs", Cookie=value).status == 303, "a copy of the cookie ends with its session"
    with start() as server:
        assert server.get("/runs", Cookie=value).status == 303
        assert not server.session(token).startswith(name), "two servers of a host have two cookies"
    logged = capfd.readouterr().err
    assert "127.0.0.1 POST /login 401" in logged
    assert "GET /runs 200" not in logged
    for secret in (token, "wrong", "user=ada"):
        assert secret not in logged


def test_no_other_page_logs_in_and_no_guess_goes_on(server: Server, token: str) -> None:
    assert server.send("/login", {"token": token}).status == 403
    assert server.send("/login", {"token": "x" * 2_000_000}).status == 413
    # The server chooses the id of a session: an id in the cookie of the request is not taken over.
    chosen = f"{server.session(token).partition('=')[0]}={'a' * 64}"
    given = session_of(server.log_in(token, cookie=chosen))
    assert server.get("/runs", Cookie=chosen).status == 303
    assert server.get("/runs", Cookie=given).status == 200
    guesses = [server.log_in(f"guess{n}").status for n in range(10)]
    assert set(guesses) == {401, 429}
    assert server.log_in(token).status == 429, "with the right token too"


def test_a_session_ends_after_a_week_and_with_its_account(
    server: Server, filled: Filled, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cookie = server.session(token)
    assert server.json("/api/v1/me", Cookie=cookie) == {"name": "ada", "role": "developer", "schema": 1}
    now = time.time()
    with monkeypatch.context() as clock:
        clock.setattr(time, "time", lambda: now + access.SESSION_S + 1)
        assert server.get("/runs", Cookie=cookie).status == 303
    assert server.get("/runs", Cookie=cookie).status == 200
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


def test_addresses_of_this_machine_and_places_on_this_server() -> None:
    for path in ("//evil.example", "/\\evil.example", "https://evil.example", "evil", "", "/\nx", "/é"):
        assert local_path(path) == "/", path
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, (EVERYWHERE, "::", "192.0.2.1")))
    with pytest.raises(UsageError, match="no such address"):
        is_loopback("no such host")


def test_a_store_has_no_token(filled: Filled, token: str, config: Config) -> None:
    accounts = filled.store.accounts
    assert accounts.of_token(token) is not None
    assert accounts.of_token("") is None
    for name, problem in (("ada", "exists"), *((name, "printable") for name in ("", " ", "a\x1b[31m", "x" * 300))):
        with pytest.raises(UsageError, match=problem):
            accounts.add(name, Role.VIEWER)
    for file in config.state_dir.glob("farm.db*"):
        assert token.encode() not in file.read_bytes()


def test_a_connection_whose_request_never_comes_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farm.serve.server.HEADERS_S", 0.5)
    [runs] = [page for page in PAGES if page.path == "/runs"]
    make = runs.make
    monkeypatch.setattr(runs, "make", lambda store, query: (time.sleep(1.0), make(store, query))[1])
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


# Sign-in by OpenID Connect against a provider on this machine, with real signatures; `openid_provider_stub`.


class OpenIdProviderStub:
    """Provider that signs in one user without a question, and checks the client as a real one does."""

    def __init__(self) -> None:
        self.key = RSAKey.generate_key(2048, parameters={"kid": "1"})
        self.signing, self.claims, self.code = self.key, dict[str, Any](), "a-code"
        self.asked: dict[str, str] = {}
        self.url = ""

    def id_token(self) -> str:
        now = int(time.time())
        claims = {"iss": self.url, "aud": "farm", "sub": "1", "exp": now + 60, "iat": now, "nonce": self.asked["nonce"]}
        return jwt.encode({"alg": "RS256", "kid": "1"}, {**claims, **self.claims}, self.signing)

    def handler(stub: OpenIdProviderStub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has the self
        class Handler(BaseHTTPRequestHandler):
            def reply(self, answer: Any, status: int = 200) -> None:
                body = msgspec.json.encode(answer)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                if self.path == "/keys":
                    self.reply({"keys": [stub.key.as_dict(private=False)]})
                else:
                    assert self.path == "/.well-known/openid-configuration"
                    names = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
                    self.reply({"issuer": stub.url, **{name: f"{stub.url}/{path}" for name, path in names.items()}})

            def do_POST(self) -> None:
                fields = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                verifier = sha256(fields["code_verifier"][0].encode()).digest()
                right = urlsafe_b64encode(verifier).decode().rstrip("=") == stub.asked["code_challenge"]
                known = self.headers["Authorization"] == "Basic ZmFybTp0aGUgc2VjcmV0"
                if fields["code"] != [stub.code] or not right or not known:
                    self.reply({"error": "invalid_grant"}, 400)
                else:
                    self.reply({"access_token": "x", "token_type": "Bearer", "id_token": stub.id_token()})

        return Handler


@pytest.fixture
def openid_provider_stub() -> Iterator[OpenIdProviderStub]:
    stub = OpenIdProviderStub()
    with serving(stub.handler()) as port:
        stub.url = f"http://127.0.0.1:{port}"
        yield stub


def config_of(config: Config, issuer: str, **more: Any) -> Config:
    openid = OpenIdConfig(
        issuer=issuer, client_id="farm", client_secret_env="OPENID_SECRET", roles={"lab": "operator"}, **more
    )
    return msgspec.structs.replace(config, serve=ServeConfig(url="http://127.0.0.1:1", openid=openid))


def sign_in(server: Server, stub: OpenIdProviderStub, **changes: str) -> Answer:
    """Follow the way of a browser: to the provider, and back with its code."""
    first = server.get("/login/openid")
    assert first.status == 303, first.text
    place = urlsplit(first.headers["location"])
    assert f"{place.scheme}://{place.netloc}{place.path}" == f"{stub.url}/authorize"
    stub.asked = {name: values[0] for name, values in parse_qs(place.query).items()}
    assert stub.asked["code_challenge_method"] == "S256"
    assert stub.asked["redirect_uri"] == "http://127.0.0.1:1/login/openid/callback"
    answer = {"code": stub.code, "state": stub.asked["state"], **changes}
    return server.get(f"/login/openid/callback?{urlencode(answer)}", Cookie=session_of(first))


def test_a_user_of_the_provider_has_the_role_of_the_group(
    config: Config, filled: Filled, openid_provider_stub: OpenIdProviderStub, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert filled.live
    monkeypatch.setenv("OPENID_SECRET", "the secret")
    stub = openid_provider_stub
    stub.claims = {"preferred_username": "ada", "groups": ["lab", "others"]}
    with running(config_of(config, stub.url)) as server:
        assert server.get("/runs").status == 303
        assert 'href="/login/openid"' in server.get("/login").text
        answer = sign_in(server, stub)
        assert (answer.status, answer.headers.get("location")) == (303, "/"), answer.text
        cookie = session_of(answer)
        assert server.json("/api/v1/me", Cookie=cookie) == {"name": "ada", "role": "operator", "schema": 1}
        # A link with a wrong state ends no session.
        foreign = server.get("/login/openid/callback?state=%C3%A9", Cookie=cookie)
        kept = [one.partition(";")[0] for one in foreign.cookies if one.startswith("farm-session")]
        assert (foreign.status, server.get("/runs", Cookie=(kept or [cookie])[-1]).status) == (401, 200)
        later = time.time() + 8 * 3600
        with monkeypatch.context() as clock:
            clock.setattr(time, "time", lambda: later)
            assert server.get("/runs", Cookie=cookie).status == 303, "the provider's roles are asked again"
        # The same answer in another browser.
        assert server.get(f"/login/openid/callback?code={stub.code}&state={stub.asked['state']}").status == 401
    logged = capfd.readouterr().err
    assert "the secret" not in logged
    assert stub.code not in logged


def test_what_is_not_of_the_provider_signs_nobody_in(
    config: Config, filled: Filled, openid_provider_stub: OpenIdProviderStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENID_SECRET", "the secret")
    filled.store.accounts.add("root", Role.VIEWER)
    stub = openid_provider_stub
    right = {"preferred_username": "ada", "groups": ["lab"]}
    claims: list[dict[str, Any]] = [
        {"nonce": "another"}, {"aud": "another"}, {"iss": "https://evil.example"}, {"exp": int(time.time()) - 3600},
        {"groups": ["others"]}, {"groups": None}, {"preferred_username": "root"}, {"preferred_username": ""},
    ]  # fmt: skip
    with running(config_of(config, stub.url)) as server:

        def require_refusal(what: object, **changes: str) -> None:
            answer = sign_in(server, stub, **changes)
            assert answer.status == 401, (what, answer.text)
            assert not any(one.startswith("farm-session") and "null" not in one for one in answer.cookies), what

        for claim in claims:
            stub.claims = right | claim
            require_refusal(claim)
        stub.claims = right
        for changes in ({"state": "another"}, {"code": "another"}, {"error": "access_denied", "code": ""}):
            require_refusal(changes, **changes)
        stub.signing = RSAKey.generate_key(2048, parameters={"kid": "1"})
        require_refusal("another key")
        stub.signing = stub.key
        assert sign_in(server, stub).status == 303


def test_a_provider_without_its_secret_or_address_is_one_line(config: Config, filled: Filled) -> None:
    assert filled.live
    with pytest.raises(UsageError, match="OPENID_SECRET is not set"), running(config_of(config, "http://127.0.0.1:9")):
        pass
    without = msgspec.structs.replace(config, serve=ServeConfig(openid=config_of(config, "x").serve.openid))
    with pytest.raises(UsageError, match="needs url"), running(without):
        pass
