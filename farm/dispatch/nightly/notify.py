"""Notifications of a nightly run: receivers, conditions and delivery. None changes the exit code."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from farm.dispatch.nightly.record import NightlyRun, has_changed
from farm.dispatch.nightly.templates import render, subject
from farm.dispatch.notify.delivery import Delivery, by_mail, by_webhook

if TYPE_CHECKING:
    from farm.dispatch.nightly.plan import Plan
    from farm.dispatch.nightly.tables import When
    from farm.dispatch.notify.credentials import Credentials


def notify(
    plan: Plan, credentials: Credentials, nightly_run: NightlyRun, before: NightlyRun | None
) -> tuple[Delivery, ...]:
    """Send the due notifications, and return their deliveries; `before` is the previous nightly run."""
    found = []
    for number, hook in enumerate(plan.webhooks, start=1):
        if _is_due(hook.when, nightly_run, before):
            found.append(by_webhook(hook, number, credentials, partial(render, hook.template, "json", nightly_run)))
    if (mail := plan.mail) is not None and _is_due(mail.when, nightly_run, before):

        def body() -> tuple[str, str]:
            return render(mail.template, "text", nightly_run), render(mail.html_template, "html", nightly_run)

        found.append(by_mail(mail, credentials, subject(nightly_run), body))
    return tuple(found)


def _is_due(when: When, nightly_run: NightlyRun, before: NightlyRun | None) -> bool:
    if when == "always":
        return True
    return nightly_run.code != 0 if when == "failure" else has_changed(nightly_run, before)
