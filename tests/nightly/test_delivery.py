"""Webhooks and mail, to real servers on loopback."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from receivers import LOOPBACK, mail_server, make_certificate, trickling_server, web_server

from farm.dispatch.nightly.plan import MailTable
from farm.dispatch.nightly.templates import SAMPLE, render
from farm.dispatch.notify import mail as mail_module
from farm.dispatch.notify import webhook
from farm.dispatch.notify.credentials import NotifyError
from farm.dispatch.notify.delivery import persistently
from farm.dispatch.notify.mail import message, send
from farm.dispatch.notify.webhook import origin


def post(url: str, body: str = "{}", token: str = "", wait: Callable[[float], object] = lambda _: None) -> None:
    persistently(lambda: webhook.post(url, body, token), wait)


def refusal(url: str, token: str) -> str:
    """Return why a notice cannot be sent, which names no secret."""
    with pytest.raises(NotifyError) as caught:
        post(url, "{}", token)
    assert "SECRET" not in str(caught.value)
    return str(caught.value)


def test_a_webhook_that_fails_at_first_is_tried_again() -> None:
    waited: list[float] = []
    with web_server([503, 429]) as hook:
        post(hook.url("/T0/SECRET"), render("slack", "json", SAMPLE), "tokentoken", waited.append)
        assert [path for path, _, _ in hook.requests] == ["/T0/SECRET"] * 3
    _, headers, body = hook.requests[-1]
    assert headers["Authorization"] == "Bearer tokentoken"
    assert headers["Content-Type"].startswith("application/json")
    assert "FAILED" in json.loads(body)["text"]
    assert waited == [1.0, 2.0]


@pytest.mark.parametrize(
    ("answer", "requests", "message"),
    [
        (500, 4, "answers 500 Internal Server Error, 4 times"),
        (404, 1, "answers 404 Not Found"),
        (302, 1, "redirects are not followed"),
        (307, 1, "redirects are not followed"),
    ],
)
def test_a_failing_webhook_is_told_and_no_redirect_followed(answer: int, requests: int, message: str) -> None:
    with web_server() as other, web_server([answer] * 9, location=other.url()) as hook:
        assert re.match(rf"http://{LOOPBACK}:{hook.port}: .*{message}", refusal(hook.url("/T0/SECRET"), "SECRET"))
        assert (len(hook.requests), other.requests) == (requests, [])


def test_a_proxy_takes_what_goes_elsewhere_but_never_sees_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with web_server([502] * 9) as proxy, web_server() as hook:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        for host in (LOOPBACK, "localhost"):
            post(f"http://{host}:{hook.port}/T0/SECRET", "{}", "SECRET")
        assert (len(hook.requests), proxy.requests) == (2, [])
        refusal("https://hooks.example.invalid/T0/SECRET", "SECRET")
        assert [(path, "Authorization" in headers) for path, headers, _ in proxy.requests] == [
            ("hooks.example.invalid:443", False)
        ] * 4
        monkeypatch.setenv("no_proxy", "example.invalid")
        refusal("https://hooks.example.invalid/T0/SECRET", "SECRET")
        assert len(proxy.requests) == 4


def test_an_answer_that_trickles_is_given_up_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(mail_module, "_DEADLINE_SECONDS", 0.5)
    # In the end it would be a good answer.
    with trickling_server(b"HTTP/1.1 200 OK\r\nX-Slow: ", b".", 20) as port:
        assert "no answer in 0.2 s, 4 times" in refusal(f"http://{LOOPBACK}:{port}/SECRET", "SECRET")
    with trickling_server(b"220-", b"slow\r\n220-", 20) as port:
        mail = mail_to(port)
        with pytest.raises(NotifyError, match="takes too long to answer"):
            send(mail, message(mail, "s", "t", "h"))


def test_a_server_that_is_not_there_or_not_trusted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        assert "Connection refused, 4 times" in refusal(f"http://{LOOPBACK}:{taken.getsockname()[1]}/SECRET", "SECRET")
    certificate = make_certificate(tmp_path)
    with web_server(tls=certificate) as hook:
        assert "certificate is not accepted: self-signed" in refusal(hook.url("/SECRET", "https"), "SECRET")
        assert hook.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        post(hook.url("/SECRET", "https"))
        assert len(hook.requests) == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://hooks.example.com/SECRET", "http://hooks.example.com: .*use https"),
        ("https://user:SECRET@hooks.example.com/", "https://hooks.example.com: .*has a user"),
        ("file:///etc/SECRET", "is none"),
        ("SECRET", "is none"),
        ("https://hooks.example.com/SECRET\r\nX: y", "is none"),
        ("https://[SECRET/", "is none"),
    ],
)
def test_an_address_that_cannot_be_is_refused_without_showing_it(url: str, message: str) -> None:
    assert re.search(message, refusal(url, ""))
    assert "SECRET" not in origin(url)


def test_a_token_that_no_header_may_have_is_refused_without_showing_it() -> None:
    with web_server() as hook:
        assert "no header may have" in refusal(hook.url(), "SECRET\r\nX-Other: y")
    assert hook.requests == []


def mail_to(port: int, **more: Any) -> MailTable:
    return MailTable(host=LOOPBACK, port=port, sender="farm@example.com", to=("a@example.com", "b@example.com"), **more)


def test_mail_goes_over_starttls_with_user_and_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path)
    with mail_server(tls=certificate, password="hunter2") as box:
        mail = mail_to(box.port)
        with pytest.raises(NotifyError, match="certificate is not accepted: self-signed"):
            send(mail, message(mail, "s", "t", "h"), "farm", "hunter2")
        assert box.logins == [], "a server that nobody vouches for gets no password"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        send(mail, message(mail, "a nightly run", "text", "<p>html"), "farm", "hunter2")
        with pytest.raises(NotifyError, match=r"does not accept user and password \(SMTP 535\)") as caught:
            send(mail, message(mail, "a nightly run", "text", "html"), "farm", "SECRET")
        assert "SECRET" not in str(caught.value)
    [sent] = box.mails
    assert sent["Subject"] == "a nightly run"
    assert box.envelopes == [("farm@example.com", ["a@example.com", "b@example.com"])]
    assert [part.get_content_type() for part in sent.walk()][1:] == ["text/plain", "text/html"]
    with mail_server(tls=None) as box:
        with pytest.raises(NotifyError, match="does not offer STARTTLS"):
            send(mail_to(box.port), message(mail, "s", "t", "h"), "farm", "hunter2")
        assert box.mails == []
        send(mail_to(box.port, starttls=False), message(mail, "s", "t", "h"))
        assert len(box.mails) == 1
