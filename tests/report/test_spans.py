"""Spans of a run, received by a local endpoint of OpenTelemetry."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from receivers import web_server

from farm.report.formats.spans import send_spans
from farm.store.view import RunView


def test_a_run_is_a_span_with_one_per_attempt(example_run: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    with web_server() as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url(""))
        assert send_spans(example_run) == ""
    request = ExportTraceServiceRequest.FromString(endpoint.bodies[0])
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
    with web_server([400]) as endpoint:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.url(""))
        assert "no spans were sent" in send_spans(example_run)
