"""Notifications of a nightly run: receivers, conditions and delivery. None changes the exit code."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from farm.dispatch.nightly.record import Night, has_changed
from farm.dispatch.nightly.templates import render, subject
from farm.dispatch.notify.delivery import Delivery, by_mail, by_webhook

if TYPE_CHECKING:
    from farm.dispatch.nightly.plan import Plan
    from farm.dispatch.nightly.tables import When
    from farm.dispatch.notify.credentials import Credentials


def notify(plan: Plan, credentials: Credentials, night: Night, before: Night | None) -> tuple[Delivery, ...]:
    """Send the due notifications, and return their deliveries; `before` is the previous nightly run."""
    found = []
    for number, hook in enumerate(plan.webhooks, start=1):
        if _is_due(hook.when, night, before):
            found.append(by_webhook(hook, number, credentials, partial(render, hook.template, "json", night)))
    if (mail := plan.mail) is not None and _is_due(mail.when, night, before):

        def body() -> tuple[str, str]:
            return render(mail.template, "text", night), render(mail.html_template, "html", night)

        found.append(by_mail(mail, credentials, subject(night), body))
    return tuple(found)


def _is_due(when: When, night: Night, before: Night | None) -> bool:
    if when == "always":
        return True
    return night.code != 0 if when == "failure" else has_changed(night, before)
