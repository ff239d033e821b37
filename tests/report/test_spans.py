"""Spans of a run, received by a local endpoint of OpenTelemetry."""

from __future__ import annotations

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from farm.report.formats.spans import send_spans

if TYPE_CHECKING:
    from collections.abc import Iterator

    from farm.store.view import RunView


@contextlib.contextmanager
def endpoint(code: int = 200) -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_run_is_a_span_with_one_per_attempt(example_run: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoint() as (address, bodies):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        assert send_spans(example_run) == ""
    request = ExportTraceServiceRequest.FromString(bodies[0])
    spans = [span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans]
    [root] = [span for span in spans if not span.parent_span_id]
    attempts = [one for job in example_run.jobs for one in job.attempts]
    assert root.name == f"farm run {example_run.id}"
    assert root.start_time_unix_nano == example_run.started_ms * 10**6
    assert len(spans) == 1 + len(attempts)
    assert {span.parent_span_id for span in spans if span is not root} == {root.span_id}
    verdicts = [item.value.string_value for span in spans for item in span.attributes if item.key == "farm.verdict"]
    assert sorted(verdicts) == sorted(str(one.verdict) for one in attempts)


def test_without_an_endpoint_nothing_is_sent_and_a_refusal_is_told(
    example_run: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert send_spans(example_run) == ""
    with endpoint(400) as (address, _):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        assert "no spans were sent" in send_spans(example_run)
