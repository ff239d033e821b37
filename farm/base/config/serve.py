"""Address and sign-in of `farm serve`: the table [serve] of farm.toml."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

RoleName = Literal["viewer", "developer", "operator"]


class OpenIdConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sign-in by an OpenID Connect provider: `[serve.openid]`."""

    issuer: str
    """Address of the provider, below which it has `.well-known/openid-configuration`."""
    client_id: str
    """Id of this server at the provider; its redirect address is `URL/login/openid/callback`."""
    client_secret_env: str
    """Environment variable with the secret of this server at the provider."""
    name_claim: str = "preferred_username"
    """Claim with the name of a user."""
    roles_claim: str = "groups"
    """Claim with a list of groups."""
    roles: dict[str, RoleName] = {}
    """Role of the members of a group; the highest counts."""
    default_role: RoleName | None = None
    """Role of users without such a group; without it they are refused."""


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Address and sign-in of the server."""

    url: Annotated[str, msgspec.Meta(pattern=r"^(https?://[^\s/?#]+)?$")] = ""
    """Address for users, as `https://farm.lab`, if a reverse proxy has another than `farm serve`."""
    openid: OpenIdConfig | None = None
