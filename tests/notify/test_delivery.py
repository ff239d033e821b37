"""Webhooks and mail to real servers on loopback, notices of quarantined devices, and `farm lab notify`."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made
import pytest
from farm_home import FarmHome
from log_lines import LogLines
from receivers import LOOPBACK, mail_server, make_certificate, trickling_server, web_server

from farm.base.config.settings import Config
from farm.base.errors import ConfigError
from farm.devices.device import HealthEvent
from farm.dispatch.nightly.plan import MailTable
from farm.dispatch.nightly.render import SAMPLE, render
from farm.dispatch.notify import channels, delivery
from farm.dispatch.notify import quarantine as announce
from farm.dispatch.notify.channels import NotifyError, mail_message, origin, post, send_mail
from farm.dispatch.notify.delivery import persistently
from farm.dispatch.notify.quarantine import announcing
from farm.store.store import Store

# Webhooks and mail, to real servers on loopback.


def try_post(url: str, body: str = "{}", token: str = "", wait: Callable[[float], object] = lambda _: None) -> None:
    persistently(lambda: channels.post(url, body, token), wait)


def refusal(url: str, token: str) -> str:
    """Return why a notice cannot be sent, which names no secret."""
    with pytest.raises(NotifyError) as caught:
        try_post(url, "{}", token)
    assert "SECRET" not in str(caught.value)
    return str(caught.value)


def test_a_webhook_that_fails_at_first_is_tried_again() -> None:
    waited: list[float] = []
    with web_server([503, 429]) as hook:
        try_post(hook.url("/T0/SECRET"), render("slack", "json", SAMPLE), "tokentoken", waited.append)
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
            try_post(f"http://{host}:{hook.port}/T0/SECRET", "{}", "SECRET")
        assert (len(hook.requests), proxy.requests) == (2, [])
        refusal("https://hooks.example.invalid/T0/SECRET", "SECRET")
        assert [(path, "Authorization" in headers) for path, headers, _ in proxy.requests] == [
            ("hooks.example.invalid:443", False)
        ] * 4
        monkeypatch.setenv("no_proxy", "example.invalid")
        refusal("https://hooks.example.invalid/T0/SECRET", "SECRET")
        assert len(proxy.requests) == 4


def test_an_answer_that_trickles_is_given_up_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_POST_SECONDS", 0.2)
    monkeypatch.setattr(channels, "_DEADLINE_SECONDS", 0.5)
    # In the end it would be a good answer.
    with trickling_server(b"HTTP/1.1 200 OK\r\nX-Slow: ", b".", 20) as port:
        assert "no answer in 0.2 s, 4 times" in refusal(f"http://{LOOPBACK}:{port}/SECRET", "SECRET")
    with trickling_server(b"220-", b"slow\r\n220-", 20) as port:
        mail = mail_to(port)
        with pytest.raises(NotifyError, match="takes too long to answer"):
            send_mail(mail, mail_message(mail, "s", "t", "h"))


def test_a_server_that_is_not_there_or_not_trusted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        assert "Connection refused, 4 times" in refusal(f"http://{LOOPBACK}:{taken.getsockname()[1]}/SECRET", "SECRET")
    certificate = make_certificate(tmp_path)
    with web_server(tls=certificate) as hook:
        assert "certificate is not accepted: self-signed" in refusal(hook.url("/SECRET", "https"), "SECRET")
        assert hook.requests == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        try_post(hook.url("/SECRET", "https"))
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
            send_mail(mail, mail_message(mail, "s", "t", "h"), "farm", "hunter2")
        assert box.logins == [], "a server that nobody vouches for gets no password"
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        send_mail(mail, mail_message(mail, "a nightly run", "text", "<p>html"), "farm", "hunter2")
        with pytest.raises(NotifyError, match=r"does not accept user and password \(SMTP 535\)") as caught:
            send_mail(mail, mail_message(mail, "a nightly run", "text", "html"), "farm", "SECRET")
        assert "SECRET" not in str(caught.value)
    [sent] = box.mails
    assert sent["Subject"] == "a nightly run"
    assert box.envelopes == [("farm@example.com", ["a@example.com", "b@example.com"])]
    assert [part.get_content_type() for part in sent.walk()][1:] == ["text/plain", "text/html"]
    with mail_server(tls=None) as box:
        with pytest.raises(NotifyError, match="does not offer STARTTLS"):
            send_mail(mail_to(box.port), mail_message(mail, "s", "t", "h"), "farm", "hunter2")
        assert box.mails == []
        send_mail(mail_to(box.port, starttls=False), mail_message(mail, "s", "t", "h"))
        assert len(box.mails) == 1


# Notices of quarantined devices, to real servers on loopback; `farm lab notify`.


REASON = 'its health check fails: "no\x1b[31m answer" <!channel>\nfor 10 s'


def quarantine(store: Store, device: str = "R5CT1") -> None:
    store.devices.record_health(
        HealthEvent(device, "gave_up", "quarantined", REASON, {"run": "20260301-020000-0a1b2c"})
    )


def announce_once(config: Config, store: Store) -> list[str]:
    """Return the lines that a command prints at its end."""
    lines = LogLines()
    with announcing(config, store):
        pass
    return lines


def outcome(store: Store, device: str = "R5CT1") -> str:
    return next(one.reason for one in store.devices.health_events(device, 9) if one.event == "notice")


def test_everybody_hears_of_a_quarantine_once(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    (tmp_path / "password").write_text("mailsecret\n")
    with (
        web_server([503]) as plain,
        web_server(tls=certificate) as slack,
        mail_server(tls=certificate, password="mailsecret") as box,
    ):
        monkeypatch.setenv("LAB_HOOK", slack.url("/T0/hooksecret", "https"))
        monkeypatch.setenv("LAB_TOKEN", "tokensecret")
        monkeypatch.setenv("LAB_MAIL_USER", "farm")
        monkeypatch.setattr(delivery, "_WAITS_S", (0.01, 0.01))
        config = made.config(tmp_path, f"""
            [[notify.webhook]]
            url = "{plain.url('/quarantine')}"
            [[notify.webhook]]
            url_env = "LAB_HOOK"
            token_env = "LAB_TOKEN"
            template = "slack"
            [notify.mail]
            host = "{LOOPBACK}"
            port = {box.port}
            from = "farm@example.com"
            to = ["lab@example.com"]
            user_env = "LAB_MAIL_USER"
            password_file = "password"
        """)  # fmt: skip
        quarantine(store)
        assert announce_once(config, store) == []
        # Neither a second look at the device nor another run with the same finding sends a notice.
        quarantine(store)
        assert announce_once(config, store) == []
        assert len(plain.requests) == 2, "an answer that may get better is asked for again"
        [(path, headers, body)] = slack.requests
        [mail] = box.mails
    assert {"LAB_HOOK", "LAB_TOKEN"} & os.environ.keys() == set(), "no child process inherits them"
    answer = json.loads(plain.bodies[-1])
    assert (answer["event"], answer["device"]["id"], answer["test"]) == ("device_quarantined", "R5CT1", False)
    assert answer["reason"] == 'its health check fails: "no answer" <!channel> for 10 s'
    assert answer["run"] == "20260301-020000-0a1b2c"
    assert (path, headers["Authorization"]) == ("/T0/hooksecret", "Bearer tokensecret")
    assert "&lt;!channel&gt;" in json.loads(body)["text"]
    assert mail["Subject"].startswith("[farm] R5CT1 is quarantined: its health check fails")
    assert "farm devices show R5CT1" in mail.get_payload()
    sent = outcome(store)
    assert sent == (
        f"sent: webhook 1 (http://{LOOPBACK}:{plain.port}); sent: webhook 2 (https://{LOOPBACK}:{slack.port}); "
        "sent: mail to lab@example.com"
    )
    assert not any(b"secret" in file.read_bytes() for file in tmp_path.glob("state/farm.db*"))


def test_receivers_that_are_broken_cost_a_line_and_nothing_else(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with trickling_server(b"HTTP/1.1 200 OK\r\nX-Slow: ", b".", 20) as port, web_server([404]) as hook:
        config = made.config(tmp_path, f"""
            [[notify.webhook]]
            url = "{hook.url('/secret')}"
            [[notify.webhook]]
            url_env = "NOT_SET_ANYWHERE"
        """)  # fmt: skip
        quarantine(store)
        origin = f"http://{LOOPBACK}:{hook.port}"
        lines = announce_once(config, store)
        assert lines == [
            f"NOT NOTIFIED that R5CT1 is quarantined: webhook 1 ({origin}): {origin}: answers 404 Not Found",
            "NOT NOTIFIED that R5CT1 is quarantined: webhook 2: the environment variable NOT_SET_ANYWHERE is not set",
        ]
        assert "NOT SENT: webhook 1" in outcome(store)
        monkeypatch.setattr(announce, "_LAST_SECONDS", 0.5)
        config = made.config(tmp_path, f'[[notify.webhook]]\nurl = "http://{LOOPBACK}:{port}/"\n')
        quarantine(store, "R5CT2")
        began = time.monotonic()
        [line] = announce_once(config, store)
        assert line == "NOT NOTIFIED that R5CT2 is quarantined: no answer in 0.5 s"
        assert time.monotonic() - began < 10, "a command does not wait for a receiver"
        assert outcome(store, "R5CT2") == "NOT SENT: no answer in 0.5 s"


def test_plain_http_is_for_an_address_that_is_no_secret() -> None:
    with web_server() as proxy, pytest.MonkeyPatch.context() as patch:
        for name in ("no_proxy", "NO_PROXY"):
            patch.delenv(name, raising=False)
        # The proxy takes the place of the other machine, whose name does not resolve.
        patch.setenv("http_proxy", proxy.url(""))
        post("http://hub.lab.invalid/hook", "{}", secret=False)
        assert [path for path, _, _ in proxy.requests] == ["http://hub.lab.invalid/hook"]
        for token, secret in (("", True), ("token", False)):
            with pytest.raises(NotifyError, match="which http would send unencrypted: use https"):
                post("http://hub.lab.invalid/hook", "{}", token, secret=secret)
        assert len(proxy.requests) == 1


HOOK = "[[notify.webhook]]\n"
MAIL = '[notify.mail]\nhost = "h"\nfrom = "a@b"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HOOK, "notify.webhook[0]: expected url or url_env or url_file, one of them"),
        (f'{HOOK}url = "http://h"\nurl_env = "U"\n', "one of them"),
        (f'{HOOK}url_env = "https://h/SECRET"\n', "url_env is no name of an environment variable"),
        (f'{HOOK}url = "http://h"\ntemplate = "teams"\n', "template"),
        (f'{HOOK}url = "SECRET.lab/x"\n', "notify.webhook[0]: url: expected http://HOST/PATH"),
        (f'{HOOK}url = "https://me:SECRET@h/x"\n', "without a user"),
        (f'{HOOK}url = "https://h:SECRET/x"\n', "expected http://HOST/PATH"),
        (f'{HOOK}url = "http://h"\ntoken_env = "T"\n', "http would send the token unencrypted"),
        (f'{MAIL}to = ["nobody"]\n', "notify.mail: to: 'nobody' is no address"),
        (f'{MAIL}to = ["c@d"]\npassword_env = "P"\n', "go together"),
    ],
)
def test_what_cannot_be_is_refused_without_showing_it(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made.config(tmp_path, text)
    assert message in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_farm_notify_shows_and_tries_receivers(home: FarmHome) -> None:
    assert "notify: no receiver" in home.farm("lab", "notify", code=2).stderr
    (home.cwd / "farm.toml").write_text('[[notify.webhook]]\nurl_env = "LAB_HOOK"\n')
    with web_server() as hook:
        env = {"LAB_HOOK": hook.url("/T0/SECRET")}
        shown = home.farm("lab", "notify", env=env, code=0)
        assert (shown.stdout, hook.requests) == ("webhook 1: address in $LAB_HOOK, json\n", [])
        tried = home.farm("lab", "notify", "--test", env=env, code=0)
        assert tried.stdout == f"sent: webhook 1 (http://{LOOPBACK}:{hook.port})\n"
        answer: dict[str, Any] = json.loads(hook.bodies[0])
        assert (answer["test"], answer["device"]["id"]) == (True, "no-device")
    missing = home.farm("lab", "notify", code=2).stdout
    assert "MISSING: [[notify.webhook]] 1: the environment variable LAB_HOOK" in missing
    failed = home.farm("lab", "notify", "--test", "--json", code=4)
    assert json.loads(failed.stdout)["deliveries"][0]["ok"] is False
