"""`farm lab notify`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from farm.base.config.settings import load_config
from farm.base.errors import UsageError
from farm.base.exit_codes import ExitCode
from farm.cli.options import json_option
from farm.cli.output import show

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from farm.base.config.notify import NotifyConfig


@click.command("notify")
@click.option("--test", is_flag=True, help="Send a test notice to all receivers.")
@json_option()
def command(*, test: bool, as_json: bool, config_file: Path | None) -> int:
    """Show the receivers of notices about quarantined devices, or test them.

    Receivers are [[notify.webhook]] and [notify.mail] of farm.toml. With
    --test: exit code 4 if a delivery failed. See docs/explanation/health.md.
    """
    from farm.dispatch.notify.credentials import Credentials

    config = load_config(config_file)
    if not config.notify.is_set:
        raise UsageError(
            f"{config.file or 'farm.toml'}: notify: no receiver: add [[notify.webhook]] or [notify.mail], "
            "as docs/reference/configuration.md has them"
        )
    credentials = Credentials(config.notify.webhook, config.notify.mail)
    if not test:
        missing = list(credentials.missing())
        answer = {"receivers": list(_receivers(config.notify)), "missing": missing}
        show(answer, [*_receivers(config.notify), *(f"MISSING: {line}" for line in missing)], as_json=as_json)
        return ExitCode.USAGE if missing else 0
    from farm.dispatch.notify.delivery import find_receivers, send_notices
    from farm.dispatch.notify.quarantine import made_up_notice, quarantine_notices

    receivers = find_receivers(config.notify.webhook, config.notify.mail)
    deliveries = send_notices(quarantine_notices(receivers, made_up_notice()), None)
    show({"deliveries": deliveries}, [one.line for one in deliveries], as_json=as_json)
    return 0 if all(one.ok for one in deliveries) else ExitCode.INFRA


def _receivers(config: NotifyConfig) -> Iterator[str]:
    from farm.dispatch.notify.webhook import origin

    for number, hook in enumerate(config.webhook, start=1):
        secret = f"${hook.url_env}" if hook.url_env else hook.url_file
        yield f"webhook {number}: {origin(hook.url) if hook.url else f'address in {secret}'}, {hook.template}"
    if (mail := config.mail) is not None:
        yield f"mail to {', '.join(mail.to)} by {mail.host}:{mail.port}{'' if mail.starttls else ', without STARTTLS'}"
