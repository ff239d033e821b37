"""Notifications of a night: to whom, when, and whether they arrived. None changes the exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from farm.errors import FarmError
from farm.nightly.record import Delivery, Night, has_changed
from farm.nightly.templates import render, subject
from farm.nightly.webhook import NotifyError, origin, post

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.nightly.plan import Plan
    from farm.nightly.tables import MailTable, WebhookTable, When

_MOST_SECRET_CHARS = 8192


class Secrets:
    """The secrets of notifications, taken out of the environment, which every child process inherits."""

    def __init__(self, plan: Plan) -> None:
        names = [name for hook in plan.webhooks for name in (hook.url_env, hook.token_env)]
        names += [plan.mail.password_env] if plan.mail is not None else []
        self._values = {name: os.environ.pop(name, "").strip() for name in dict.fromkeys(filter(None, names))}
        self._plan = plan

    def missing(self) -> Iterator[str]:
        """Yield a line for each secret that is not there."""
        mail = self._plan.mail
        wanted = [(f"[[notify.webhook]] {number}", env, file)
                  for number, hook in enumerate(self._plan.webhooks, start=1)
                  for env, file in ((hook.url_env, hook.url_file), (hook.token_env, hook.token_file))]  # fmt: skip
        if mail is not None:
            wanted += [("[notify.mail]", mail.user_env, ""),
                       ("[notify.mail]", mail.password_env, mail.password_file)]  # fmt: skip
        for who, env, file in wanted:
            try:
                self.get(env, file)
            except NotifyError as error:
                yield f"{who}: {error}"

    def get(self, env: str, file: str = "") -> str:
        """Return what an environment variable or a file holds, empty where neither is named. Raises NotifyError."""
        if env:
            value = self._values.get(env) or os.environ.get(env, "").strip()
            if not value:
                raise NotifyError(f"the environment variable {env} is not set")
            return value
        if not file:
            return ""
        try:
            return Path(file).read_text(encoding="utf-8")[:_MOST_SECRET_CHARS].strip()
        except (OSError, UnicodeDecodeError):
            raise NotifyError(f"{file} cannot be read") from None


def notify(plan: Plan, secrets: Secrets, night: Night, before: Night | None) -> tuple[Delivery, ...]:
    """Send the notifications that are due, and return how each went; `before` is the night before."""
    found = [_webhook(hook, number, night, secrets) for number, hook in enumerate(plan.webhooks, start=1)
             if _is_due(hook.when, night, before)]  # fmt: skip
    if plan.mail is not None and _is_due(plan.mail.when, night, before):
        found.append(_mail(plan.mail, night, secrets))
    return tuple(found)


def _is_due(when: When, night: Night, before: Night | None) -> bool:
    if when == "always":
        return True
    return night.code != 0 if when == "failure" else has_changed(night, before)


def _webhook(hook: WebhookTable, number: int, night: Night, secrets: Secrets) -> Delivery:
    to = f"webhook {number}"
    try:
        url = secrets.get(hook.url_env, hook.url_file)
        to += f" ({origin(url)})"
        post(url, render(hook.template, "json", night), secrets.get(hook.token_env, hook.token_file))
    except FarmError as error:
        return Delivery(to, ok=False, problem=str(error))
    return Delivery(to, ok=True)


def _mail(mail: MailTable, night: Night, secrets: Secrets) -> Delivery:
    from farm.nightly.mail import message, send

    to = f"mail to {', '.join(mail.to)}"
    try:
        text, html = render(mail.template, "text", night), render(mail.html_template, "html", night)
        user, password = secrets.get(mail.user_env), secrets.get(mail.password_env, mail.password_file)
        send(mail, message(mail, subject(night), text, html), user, password)
    except FarmError as error:
        return Delivery(to, ok=False, problem=str(error))
    return Delivery(to, ok=True)
