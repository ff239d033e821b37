"""Sign-in by OpenID Connect against a provider on this machine, with real signatures; `openid_provider_stub`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode, urlsplit

import msgspec
import pytest
from joserfc import jwt
from joserfc.jwk import RSAKey

from farm.base.config.serve import OpenIdConfig, ServeConfig
from farm.base.config.settings import Config
from farm.base.errors import UsageError
from farm.store.accounts import Role

from .conftest import running, session_of

if TYPE_CHECKING:
    from conftest import Answer, Filled, Server


class OpenIdProviderStub:
    """Provider that signs in one user without a question, and checks the client as a real one does."""

    def __init__(self) -> None:
        self.key = RSAKey.generate_key(2048, parameters={"kid": "1"})
        self.signing, self.claims, self.code = self.key, dict[str, Any](), "a-code"
        self.asked: dict[str, str] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def id_token(self) -> str:
        now = int(time.time())
        claims = {"iss": self.url, "aud": "farm", "sub": "1", "exp": now + 60, "iat": now, "nonce": self.asked["nonce"]}
        return jwt.encode({"alg": "RS256", "kid": "1"}, {**claims, **self.claims}, self.signing)

    def _handler(stub: OpenIdProviderStub) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler has the self
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

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
                from base64 import urlsafe_b64encode
                from hashlib import sha256

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
    thread = threading.Thread(target=stub.server.serve_forever)
    thread.start()
    yield stub
    stub.server.shutdown()
    thread.join()
    stub.server.server_close()


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
