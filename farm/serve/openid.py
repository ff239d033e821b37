"""Sign-in by an OpenID Connect provider, with Authlib: authorization code with PKCE."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

import requests
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.requests_client import OAuth2Session
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from farm.base.config.shared import OpenIdConfig
from farm.base.errors import UsageError
from farm.store.accounts import Role

_TIMEOUT_S = 15.0
_ALGORITHMS = ["RS256", "RS384", "RS512", "ES256", "ES384", "ES512", "PS256", "EdDSA"]


class OpenId:
    """Provider of the configuration."""

    def __init__(self, config: OpenIdConfig, url: str) -> None:
        if not url:
            raise UsageError("[serve.openid] of farm.toml needs url in [serve]: the provider leads users back there")
        # Processes that the server starts do not inherit the secret.
        self._secret = os.environ.pop(config.client_secret_env, "")
        if not self._secret:
            raise UsageError(f"the environment variable {config.client_secret_env} is not set: [serve.openid] names it")
        self._config, self._callback = config, f"{url.rstrip('/')}/login/openid/callback"
        self._metadata: dict[str, Any] = {}

    def begin(self) -> tuple[str, dict[str, str]]:
        """Return the provider's address for a sign-in, and what `end` needs to know."""
        memory = {name: secrets.token_urlsafe(32) for name in ("state", "nonce", "code_verifier")}
        with self._client() as client:
            address, _ = client.create_authorization_url(self._described("authorization_endpoint"), **memory)
        return str(address), memory

    def end(self, memory: Mapping[str, str], answer: Mapping[str, str]) -> tuple[str, Role]:
        """Return name and role of the user. Raises UsageError for a sign-in that failed or that others began."""
        if not memory or not secrets.compare_digest(memory["state"].encode(), answer.get("state", "").encode()):
            raise UsageError("this sign-in did not begin here: try again")
        if not answer.get("code"):
            raise UsageError(f"the provider refused: {answer.get('error', 'no code')[:200]}")
        try:
            with self._client() as client:
                token = client.fetch_token(
                    self._described("token_endpoint"),
                    grant_type="authorization_code",
                    code=answer["code"],
                    code_verifier=memory["code_verifier"],
                    timeout=_TIMEOUT_S,
                )
            claims = self._checked(str(token.get("id_token", "")), memory["nonce"])
        except (requests.RequestException, AuthlibBaseError, JoseError, ValueError) as error:
            raise UsageError(f"the provider's answer is not valid: {type(error).__name__}") from error
        return self._user_of(claims)

    def _client(self) -> OAuth2Session:
        return OAuth2Session(
            self._config.client_id, self._secret, scope="openid profile email", redirect_uri=self._callback,
            code_challenge_method="S256",
        )  # fmt: skip

    def _described(self, name: str) -> str:
        """Return an address of the provider's description, which is read once."""
        if not self._metadata:
            address = f"{self._config.issuer.rstrip('/')}/.well-known/openid-configuration"
            try:
                self._metadata = _read(address)
            except (requests.RequestException, ValueError) as error:
                raise UsageError(f"{self._config.issuer} has no description: {type(error).__name__}") from error
        return str(self._metadata[name])

    def _checked(self, id_token: str, nonce: str) -> dict[str, Any]:
        keys = KeySet.import_key_set(_read(self._described("jwks_uri")))
        token = jwt.decode(id_token, keys, algorithms=_ALGORITHMS)
        jwt.JWTClaimsRegistry(
            iss={"essential": True, "value": self._described("issuer")},
            aud={"essential": True, "value": self._config.client_id},
            nonce={"essential": True, "value": nonce},
            exp={"essential": True},
        ).validate(token.claims)
        return dict(token.claims)

    def _user_of(self, claims: Mapping[str, Any]) -> tuple[str, Role]:
        name, groups = claims.get(self._config.name_claim), claims.get(self._config.roles_claim, ())
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or len(name) > 256:
            raise UsageError(f"the provider names no user in {self._config.name_claim}")
        given = groups if isinstance(groups, list) else [groups]
        roles = [Role(self._config.roles[one]) for one in given if isinstance(one, str) and one in self._config.roles]
        roles += [Role(self._config.default_role)] if self._config.default_role else []
        if not roles:
            raise UsageError(f"{name} has no role here: [serve.openid] of farm.toml gives roles to groups")
        return name, max(roles, key=list(Role).index)


def _read(address: str) -> Any:
    answer = requests.get(address, timeout=_TIMEOUT_S, allow_redirects=False)
    answer.raise_for_status()
    return answer.json()
