"""Webhooks and mail, to real servers on loopback."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

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


def post(url: str, body: str, token: str = "", wait: Callable[[float], object] = lambda _: None) -> None:
    persistently(lambda: webhook.post(url, body, token), wait)


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
    ("answers", "requests", "message"),
    [([500] * 9, 4, "answers 500 Internal Server Error, 4 times"), ([404], 1, "answers 404 Not Found")],
)
def test_a_webhook_that_goes_on_failing_is_told_without_its_secrets(
    answers: list[int], requests: int, message: str
) -> None:
    with web_server(answers) as hook, pytest.raises(NotifyError) as caught:
        post(hook.url("/T0/SECRET"), "{}", "SECRET", lambda _: None)
    assert len(hook.requests) == requests
    assert str(caught.value) == f"http://{LOOPBACK}:{hook.port}: {message}"


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_no_redirect_is_followed(code: int) -> None:
    with web_server() as other, web_server([code] * 9, location=other.url()) as hook:
        with pytest.raises(NotifyError, match=f"answers {code} .*redirects are not followed"):
            post(hook.url(), "{}", "SECRET", lambda _: None)
        assert len(hook.requests) == 1
        assert other.requests == []


@pytest.mark.parametrize("host", [LOOPBACK, "localhost"])
def test_what_is_said_to_this_machine_does_not_pass_a_proxy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with web_server() as proxy, web_server() as hook:
        for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        post(f"http://{host}:{hook.port}/T0/SECRET", "{}", "SECRET")
        assert len(hook.requests) == 1
        assert proxy.requests == []


def test_a_proxy_takes_what_goes_elsewhere_but_never_sees_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server([502] * 9) as proxy:
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("https_proxy", proxy.url(""))
        with pytest.raises(NotifyError) as caught:
            post("https://hooks.example.invalid/T0/SECRET", "{}", "SECRET", lambda _: None)
        assert [(path, "Authorization" in headers) for path, headers, _ in proxy.requests] == [
            ("hooks.example.invalid:443", False)
        ] * 4
        assert "SECRET" not in str(caught.value)
        monkeypatch.setenv("no_proxy", "example.invalid")
        with pytest.raises(NotifyError):
            post("https://hooks.example.invalid/T0/SECRET", "{}", "SECRET", lambda _: None)
        assert len(proxy.requests) == 4


def test_an_answer_that_trickles_is_given_up_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "_TIMEOUT_SECONDS", 0.5)
    # In the end it would be a good answer.
    greeting = b"HTTP/1.1 200 OK\r\nX-Slow: "
    with (
        trickling_server(greeting, b".", 20) as port,
        pytest.raises(NotifyError, match=r"no answer in 0\.5 s, 4 times"),
    ):
        post(f"http://{LOOPBACK}:{port}/SECRET", "{}", "SECRET", lambda _: None)


def test_a_mail_server_that_trickles_is_given_up_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail_module, "_DEADLINE_SECONDS", 0.5)
    with trickling_server(b"220-", b"slow\r\n220-", 20) as port:
        mail = mail_to(port)
        with pytest.raises(NotifyError, match="takes too long to answer"):
            send(mail, message(mail, "s", "t", "h"))


def test_nobody_there_is_told_after_four_attempts() -> None:
    waited: list[float] = []
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        with pytest.raises(NotifyError, match="Connection refused, 4 times") as caught:
            post(f"http://{LOOPBACK}:{taken.getsockname()[1]}/SECRET", "{}", wait=waited.append)
    assert "SECRET" not in str(caught.value)
    assert waited == [1.0, 2.0, 4.0]


def test_a_certificate_has_to_be_one_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path)
    with web_server(tls=certificate) as hook:
        with pytest.raises(NotifyError, match="certificate is not accepted: self-signed"):
            post(hook.url("/SECRET", "https"), "{}", wait=lambda _: None)
        assert hook.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        post(hook.url("/SECRET", "https"), "{}")
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
    with pytest.raises(NotifyError, match=message) as caught:
        post(url, "{}", wait=lambda _: None)
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in origin(url)


def test_a_token_that_no_header_may_have_is_refused_without_showing_it() -> None:
    with web_server() as hook, pytest.raises(NotifyError, match="no header may have") as caught:
        post(hook.url(), "{}", "SECRET\r\nX-Other: y")
    assert hook.requests == []
    assert "SECRET" not in str(caught.value)


def mail_to(port: int, **more: object) -> MailTable:
    return MailTable(host=LOOPBACK, port=port, sender="farm@example.com", to=("a@example.com", "b@example.com"),
                     **more)  # type: ignore[arg-type]  # fmt: skip


def test_mail_goes_over_starttls_with_user_and_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with mail_server(tls=certificate, password="hunter2") as box:
        mail = mail_to(box.port)
        send(mail, message(mail, "a nightly run", "text", "<p>html"), "farm", "hunter2")
        with pytest.raises(NotifyError, match=r"does not accept user and password \(SMTP 535\)") as caught:
            send(mail, message(mail, "a nightly run", "text", "html"), "farm", "SECRET")
        assert "SECRET" not in str(caught.value)
    [sent] = box.mails
    assert sent["Subject"] == "a nightly run"
    assert box.envelopes == [("farm@example.com", ["a@example.com", "b@example.com"])]
    assert [part.get_content_type() for part in sent.walk()][1:] == ["text/plain", "text/html"]


def test_a_password_is_not_given_to_a_server_that_nobody_vouches_for(tmp_path: Path) -> None:
    with mail_server(tls=make_certificate(tmp_path), password="hunter2") as box:
        mail = mail_to(box.port)
        with pytest.raises(NotifyError, match="certificate is not accepted: self-signed"):
            send(mail, message(mail, "s", "t", "h"), "farm", "hunter2")
        assert box.logins == []
    with mail_server(tls=None) as box:
        with pytest.raises(NotifyError, match="does not offer STARTTLS"):
            send(mail_to(box.port), message(mail, "s", "t", "h"), "farm", "hunter2")
        assert box.mails == []
        plain = mail_to(box.port, starttls=False)
        send(plain, message(plain, "s", "t", "h"))
        assert len(box.mails) == 1
