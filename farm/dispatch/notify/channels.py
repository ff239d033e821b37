"""Channels of notices: a webhook or a mail, and their secrets, hidden from all processes that farm starts."""

from __future__ import annotations

import http.client
import ipaddress
import os
import smtplib
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from farm import __version__
from farm.base.errors import FarmError

if TYPE_CHECKING:
    from farm.base.config.runs import Mail, Webhook


# Secrets of notifications, hidden from all processes that farm starts.


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


# Notification by HTTP: one POST of JSON. No error message contains a secret.
#
# apprise 2.3.0 posts a JSON object of its own, and its result has no reason of a failure.


_T = TypeVar("_T")

_POST_SECONDS = 10.0
"""Time for a whole attempt, also with an answer that arrives slowly."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that takes a redirect as the answer: following it would send the message, and a token, elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        """Return no request."""


def origin(url: str) -> str:
    """Return scheme and host of an address, the part that may be shown: path and user may be secrets."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    except ValueError:
        return "an address that is none"
    return f"{parts.scheme}://{host}{port}" if parts.hostname else "an address that is none"


def slack_text(value: Any) -> str:
    """Return text that Slack shows without mentions and links (docs.slack.dev, "Formatting message text")."""
    return str(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def post(url: str, body: str, token: str = "", *, secret: bool = True, key: str = "") -> None:
    """Send `body`, JSON, to `url`, with a non-empty `token` as a bearer token and `key` as its idempotency key.

    Plain http to other machines is allowed only without a token and with an address that is not `secret`. Redirects are
    not followed. $https_proxy applies, except for this machine and the hosts of $no_proxy. Raises NotifyError, which
    may pass after server errors (5xx, 429) and failed connections.
    """
    request = _request(url, body, token, secret=secret, key=key)
    problem, may_pass = _attempt(_opener(direct=is_loopback(urlsplit(url))), request)
    if problem:
        raise NotifyError(f"{origin(url)}: {problem}", may_pass=may_pass)


def within(seconds: float, action: Callable[[], _T]) -> _T:
    """Return the result of `action` or raise its error; TimeoutError after `seconds`.

    A socket's timeout applies to each packet, and a lookup or a TLS handshake cannot be interrupted: after a timeout
    the action goes on in a thread that ends with the process, and its result is dropped.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - raised again, in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="notification")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError
    return results[0]


def _request(url: str, body: str, token: str, *, secret: bool, key: str) -> urllib.request.Request:
    try:
        parts = urlsplit(url)
        fine = bool(parts.hostname) and url.isascii() and url.isprintable() and " " not in url
    except ValueError:
        fine = False
    if not fine or parts.scheme not in ("https", "http"):
        raise NotifyError("the address of the webhook is none: expected https://HOST/PATH")
    if parts.username is not None:
        raise NotifyError(f"{origin(url)}: the address has a user in it, which is not sent: use token_env")
    if parts.scheme == "http" and (secret or token) and not is_loopback(parts):
        what = "the address itself" if secret else "the token"
        raise NotifyError(f"{origin(url)}: {what} is a secret, which http would send unencrypted: use https")
    if not (token.isascii() and token.isprintable()):
        raise NotifyError(f"{origin(url)}: the token has characters that no header may have")
    headers = {"Content-Type": "application/json; charset=utf-8", "User-Agent": f"farm/{__version__}"}
    if key:
        headers["Idempotency-Key"] = key
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return urllib.request.Request(url, body.encode(), headers, method="POST")  # noqa: S310 - checked above


def _opener(*, direct: bool) -> urllib.request.OpenerDirector:
    # Certificates are checked; $SSL_CERT_FILE names a lab's own authority, as for OpenSSL.
    handlers: list[Any] = [_NoRedirect, urllib.request.HTTPSHandler(context=ssl.create_default_context())]
    if direct:
        # $http_proxy is for other machines: no proxy sees messages to this machine, which are plain text.
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def is_loopback(parts: SplitResult) -> bool:
    """Return True for an address of this machine."""
    if parts.hostname == "localhost":
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


def _attempt(opener: urllib.request.OpenerDirector, request: urllib.request.Request) -> tuple[str, bool]:
    """Return the problem of an attempt, empty for none, and whether another attempt may succeed."""

    def ask() -> None:
        opener.open(request, timeout=_POST_SECONDS).close()

    try:
        within(_POST_SECONDS, ask)
    except urllib.error.HTTPError as error:
        with error:
            return _answered(error.code)
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {error.reason.verify_message}", False
        return _unreached(error.reason), True
    except (OSError, http.client.HTTPException) as error:
        return _unreached(error), True
    return "", False


def _answered(code: int) -> tuple[str, bool]:
    # Use the standard words for a code: the server's own words may be anything.
    words = http.client.responses.get(code, "")
    if 300 <= code < 400:
        return (
            f"answers {code} {words}: redirects are not followed, as they lead elsewhere: give the address itself",
            False,
        )
    return f"answers {code} {words}".rstrip(), code >= 500 or code == http.client.TOO_MANY_REQUESTS


def _unreached(reason: object) -> str:
    if isinstance(reason, TimeoutError):
        return f"no answer in {_POST_SECONDS:g} s"
    # Show the system's words alone: other words may quote the address.
    return reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__


# Notification by mail: text, and optional HTML, over STARTTLS with the certificate checked.


# Timeouts for one answer of the server, and for the whole conversation.
_MAIL_SECONDS = 30.0
_DEADLINE_SECONDS = 120.0


def mail_message(mail: Mail, subject: str, text: str, html: str, key: str = "") -> EmailMessage:
    """Return the mail; line ends in the subject, which mail refuses, become spaces.

    Two mails with the same `key` have the same Message-ID.
    """
    made = EmailMessage()
    made["Subject"] = " ".join(subject.split())
    made["From"] = mail.sender
    made["To"] = ", ".join(mail.to)
    made["Date"] = formatdate(localtime=True)
    domain = mail.sender.rpartition("@")[2]
    made["Message-ID"] = f"<{key.replace(':', '.')}@{domain}>" if key else make_msgid(domain=domain)
    made["Auto-Submitted"] = "auto-generated"
    made.set_content(text)
    if html:
        made.add_alternative(html, subtype="html")
    return made


def send_mail(mail: Mail, made: EmailMessage, user: str = "", password: str = "") -> None:
    """Hand the mail to the server. Raises NotifyError."""
    server = f"{mail.host}:{mail.port}"
    try:
        refused = within(_DEADLINE_SECONDS, lambda: _hand_over(mail, made, user, password))
    except smtplib.SMTPRecipientsRefused:
        raise NotifyError(f"{server}: takes no mail for any of {', '.join(mail.to)}") from None
    except smtplib.SMTPResponseException as error:
        # Leave out the server's text beside the code, which may quote the password.
        what = "does not accept user and password" if isinstance(error, smtplib.SMTPAuthenticationError) else "refuses"
        # 4xx is temporary, as of a server that lets unknown senders wait.
        raise NotifyError(f"{server}: {what} (SMTP {error.smtp_code})", may_pass=400 <= error.smtp_code < 500) from None
    except smtplib.SMTPNotSupportedError:
        what = "STARTTLS" if mail.starttls and not user else "STARTTLS or a way to log in"
        raise NotifyError(f"{server}: does not offer {what}") from None
    except smtplib.SMTPException as error:
        is_cut = isinstance(error, smtplib.SMTPServerDisconnected)
        raise NotifyError(f"{server}: {type(error).__name__}", may_pass=is_cut) from None
    except ssl.SSLCertVerificationError as error:
        raise NotifyError(f"{server}: its certificate is not accepted: {error.verify_message}") from None
    except TimeoutError:
        raise NotifyError(f"{server}: takes too long to answer", may_pass=True) from None
    except (OSError, UnicodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else None
        raise NotifyError(f"{server}: {problem or type(error).__name__}", may_pass=isinstance(error, OSError)) from None
    if refused:
        raise NotifyError(f"{server}: takes no mail for {', '.join(refused)}; the others have it")


def _hand_over(mail: Mail, made: EmailMessage, user: str, password: str) -> Collection[str]:
    """Send the mail, and return the addresses that the server refuses."""
    with smtplib.SMTP(mail.host, mail.port, timeout=_MAIL_SECONDS) as smtp:
        if mail.starttls:
            # $SSL_CERT_FILE names a lab's own certificate authority, as for OpenSSL.
            smtp.starttls(context=ssl.create_default_context())
        if user:
            smtp.login(user, password)
        return smtp.send_message(made, mail.sender, mail.to).keys()
