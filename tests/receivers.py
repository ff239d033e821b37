"""Receivers of notifications on loopback: a web server, and a mail server that requires STARTTLS and a password."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import ssl
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import BaseRequestHandler
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from networks import serving
from waiting import free_port

LOOPBACK = "127.0.0.1"


@dataclass
class Hook:
    """Web server that keeps its requests."""

    port: int = 0
    answers: list[int] = field(default_factory=list)
    """Codes of the first answers; 200 after them."""
    location: str = ""
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def url(self, path: str = "/hook", scheme: str = "http") -> str:
        return f"{scheme}://{LOOPBACK}:{self.port}{path}"

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, body in self.requests]


@contextlib.contextmanager
def web_server(answers: Sequence[int] = (), *, location: str = "", tls: Path | None = None) -> Iterator[Hook]:
    """Listen for POST; `location` is where 3xx answers lead."""
    hook = Hook(answers=list(answers), location=location)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            hook.requests.append((self.path, dict(self.headers.items()), body))
            self.send_response(hook.answers.pop(0) if hook.answers else 200, "what a server says: \x1b[31mSECRET")
            if hook.location:
                self.send_header("Location", hook.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_CONNECT = do_POST  # noqa: N815 - as http.server calls it

    with serving(Handler, _server_context(tls) if tls else None) as hook.port:
        yield hook


@contextlib.contextmanager
def trickling_server(greeting: bytes, drop: bytes, seconds: float) -> Iterator[int]:
    """Listen, and answer each connection with `greeting`, then a `drop` ten times a second; `seconds` later hang up."""
    ended = threading.Event()

    class Trickle(BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(greeting)
            for _ in range(round(seconds * 10)):
                if not ended.wait(0.1):
                    self.request.sendall(drop)

    with serving(Trickle) as port:
        try:
            yield port
        finally:
            ended.set()


@dataclass
class Mailbox:
    """Mail server that keeps its accepted messages."""

    port: int = 0
    mails: list[Message] = field(default_factory=list)
    logins: list[tuple[bytes, bytes]] = field(default_factory=list)
    envelopes: list[tuple[str, list[str]]] = field(default_factory=list)


@contextlib.contextmanager
def mail_server(*, tls: Path | None, password: str = "") -> Iterator[Mailbox]:
    """Listen for mail; with `password` only from who logs in as `farm` with it."""
    box = Mailbox()

    class Handler:
        async def handle_DATA(  # noqa: N802 - as aiosmtpd calls it
            self, _server: Any, _session: Any, envelope: Any
        ) -> str:
            box.mails.append(message_from_bytes(envelope.content))
            box.envelopes.append((envelope.mail_from, envelope.rcpt_tos))
            return "250 taken"

    def authenticate(_server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any) -> AuthResult:
        box.logins.append((data.login, data.password))
        return AuthResult(success=(data.login, data.password) == (b"farm", password.encode()), handled=False)

    options: dict[str, Any] = {"tls_context": _server_context(tls), "require_starttls": True} if tls else {}
    if password:
        options |= {"authenticator": authenticate, "auth_required": True}
    box.port = free_port()
    controller = Controller(Handler(), hostname=LOOPBACK, port=box.port, **options)
    controller.start()
    try:
        yield box
    finally:
        controller.stop()


def make_certificate(folder: Path) -> Path:
    """Return a file with a key and a certificate for an address, which is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    file = folder / "loopback.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return file


def _server_context(tls: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls)
    return context
