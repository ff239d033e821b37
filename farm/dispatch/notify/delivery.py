"""Delivery of a message to a receiver, with its outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from farm.base.errors import FarmError
from farm.dispatch.notify.webhook import origin, post

if TYPE_CHECKING:
    from collections.abc import Callable

    from farm.base.config.notify import Mail, Webhook
    from farm.dispatch.notify.credentials import Credentials


class Delivery(msgspec.Struct, frozen=True):
    """Delivery of a notification that was tried."""

    to: str
    """Receiver, without secrets."""
    ok: bool
    problem: str = ""


def by_webhook(
    hook: Webhook, number: int, credentials: Credentials, body: Callable[[], str], url: str = ""
) -> Delivery:
    """Post the JSON of `body` to the webhook `number` of its file, or to `url`, an address that is no secret."""
    to = f"webhook {number}"
    try:
        address = url or credentials.get(hook.url_env, hook.url_file)
        to += f" ({origin(address)})"
        post(address, body(), credentials.get(hook.token_env, hook.token_file), secret=not url)
    except FarmError as error:
        return Delivery(to, ok=False, problem=str(error))
    return Delivery(to, ok=True)


def by_mail(mail: Mail, credentials: Credentials, subject: str, body: Callable[[], tuple[str, str]]) -> Delivery:
    """Send the text and HTML of `body`; empty HTML is left out."""
    from farm.dispatch.notify.mail import message, send

    to = f"mail to {', '.join(mail.to)}"
    try:
        text, html = body()
        user, password = credentials.get(mail.user_env), credentials.get(mail.password_env, mail.password_file)
        send(mail, message(mail, subject, text, html), user, password)
    except FarmError as error:
        return Delivery(to, ok=False, problem=str(error))
    return Delivery(to, ok=True)
