"""Secrets of notifications, hidden from all processes that farm starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from farm.base.errors import FarmError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from farm.base.config.runs import Mail, Webhook

_MOST_SECRET_CHARS = 8192

TAKEN: dict[str, str] = {}
"""Secrets that were removed from the environment of this process: several configurations may name the same variable."""


class NotifyError(FarmError):
    """Failed delivery of a notification; the message contains no secret. `may_pass`: another attempt may succeed."""

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


def hide_secrets(webhooks: Sequence[Webhook], mail: Mail | None) -> None:
    """Take the secrets of receivers out of the environment, before anything starts that would inherit them."""
    names = [name for hook in webhooks for name in (hook.url_env, hook.token_env)]
    names += [mail.password_env] if mail is not None else []
    for name in filter(None, names):
        if value := os.environ.pop(name, "").strip():
            TAKEN[name] = value


def missing_secrets(webhooks: Sequence[Webhook], mail: Mail | None) -> Iterator[str]:
    """Yield a line for each missing secret of receivers."""
    wanted = [(f"[[notify.webhook]] {number}", env, file)
              for number, hook in enumerate(webhooks, start=1)
              for env, file in ((hook.url_env, hook.url_file), (hook.token_env, hook.token_file))]  # fmt: skip
    if mail is not None:
        wanted += [("[notify.mail]", mail.user_env, ""), ("[notify.mail]", mail.password_env, mail.password_file)]
    for who, env, file in wanted:
        try:
            read_secret(env, file)
        except NotifyError as error:
            yield f"{who}: {error}"


def read_secret(env: str, file: str = "") -> str:
    """Return the secret in an environment variable or a file, empty without both names. Raises NotifyError."""
    if env:
        value = os.environ.get(env, "").strip() or TAKEN.get(env)
        if not value:
            raise NotifyError(f"the environment variable {env} is not set")
        return value
    if not file:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8")[:_MOST_SECRET_CHARS].strip()
    except (OSError, UnicodeDecodeError):
        raise NotifyError(f"{file} cannot be read") from None
