"""Texts of notifications: templates that farm has, or a user's file, rendered where they can reach nothing else."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from farm.errors import UsageError
from farm.nightly.context import SAMPLE, context
from farm.system.resources import data_folder

if TYPE_CHECKING:
    from farm.nightly.record import Night

BUILT_IN = ("json", "slack")
"""For webhooks, by name."""
_MAIL = {"text": "mail.txt", "html": "mail.html"}


def render(template: str, form: str, night: Night) -> str:
    """Return the text of a notification: `template` is the name of one that farm has, a file, or empty for mail's own.

    `form` is `json` (the text has to be JSON), `text` or `html` (what devices said is escaped). Raises UsageError.
    """
    try:
        text = _load(template, form).render(night=context(night))
        if form == "json":
            msgspec.json.decode(text)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"{template or _MAIL[form]}: line {error.lineno}: {error.message}") from None
    except jinja2.TemplateError as error:
        raise UsageError(f"{template or _MAIL[form]}: {error}") from None
    except msgspec.DecodeError as error:
        raise UsageError(
            f"{template}: does not give JSON: {error}; '{{{{ VALUE | tojson }}}}' quotes a value"
        ) from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{template}: is no text in UTF-8: {error}") from None
    except OSError as error:
        known = f"; farm has {' and '.join(BUILT_IN)}" if form == "json" else ""
        raise UsageError(f"{template}: {error.strerror or error}{known}") from None
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        # What an expression of a template may end in.
        raise UsageError(f"{template or _MAIL[form]}: {type(error).__name__}: {error}") from None
    return text


def check_template(template: str, form: str) -> list[str]:
    """Return what is wrong with a template, tried with a night that has everything."""
    try:
        render(template, form, SAMPLE)
    except UsageError as error:
        return [str(error)]
    return []


def _load(template: str, form: str) -> jinja2.Template:
    environment = _environment(html=form == "html")
    if not template or template in BUILT_IN:
        name = template or _MAIL[form]
        text = (data_folder("reports") / "notify" / f"{name}.j2").read_text(encoding="utf-8")
    else:
        text = Path(template).read_text(encoding="utf-8")
    return environment.from_string(text)


@functools.cache
def _environment(*, html: bool) -> jinja2.Environment:
    # Without a loader: no template includes a file.
    environment = ImmutableSandboxedEnvironment(
        autoescape=html, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["slack"] = _slack
    return environment


def _slack(value: Any) -> str:
    """Return text that Slack takes as text: no mention, no link (docs.slack.dev, "Formatting message text")."""
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
