"""Notification by mail: text, and optional HTML, over STARTTLS with the certificate checked."""

from __future__ import annotations

import smtplib
import ssl
from email.message import EmailMessage
from email.utils import formatdate, make_msgid
from typing import TYPE_CHECKING

from farm.dispatch.notify.credentials import NotifyError
from farm.dispatch.notify.webhook import within

if TYPE_CHECKING:
    from collections.abc import Collection

    from farm.base.config.runs import Mail

# Timeouts for one answer of the server, and for the whole conversation.
_TIMEOUT_SECONDS = 30.0
_DEADLINE_SECONDS = 120.0


def message(mail: Mail, subject: str, text: str, html: str, key: str = "") -> EmailMessage:
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


def send(mail: Mail, made: EmailMessage, user: str = "", password: str = "") -> None:
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
    with smtplib.SMTP(mail.host, mail.port, timeout=_TIMEOUT_SECONDS) as smtp:
        if mail.starttls:
            # $SSL_CERT_FILE names a lab's own certificate authority, as for OpenSSL.
            smtp.starttls(context=ssl.create_default_context())
        if user:
            smtp.login(user, password)
        return smtp.send_message(made, mail.sender, mail.to).keys()
