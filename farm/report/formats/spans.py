"""RunView -> spans of OpenTelemetry: a span per run, and one per attempt below it."""

from __future__ import annotations

import os

from farm import __version__
from farm.store.records import RunView

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TIMEOUT_S = 5.0
_NS = 1_000_000


def send_spans(view: RunView) -> str:
    """Send the spans of an ended run if an endpoint is configured, and return the problem; "" without one."""
    if not any(map(os.environ.get, ENDPOINTS)) or view.finished_ms is None:
        return ""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        from opentelemetry.trace import Status, StatusCode, set_span_in_context
    except ModuleNotFoundError:
        from farm.builds.runtime.packages import install_hint

        return f"no spans were sent: {install_hint('telemetry')}"
    made = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "farm", "service.version": __version__}))
    provider.add_span_processor(SimpleSpanProcessor(made))
    tracer = provider.get_tracer("farm")
    facts = {"farm.run": view.id, "farm.command": view.command, "farm.user": view.user, "farm.host": view.host}
    root = tracer.start_span(f"farm run {view.id}", start_time=view.started_ms * _NS, attributes=facts)
    context = set_span_in_context(root)
    for job in view.jobs:
        for number, one in enumerate(job.attempts, 1):
            about: dict[str, str | int] = {
                "farm.job": job.id, "farm.soc": job.soc, "farm.backend": job.backend, "farm.attempt": number,
                "farm.verdict": str(one.verdict), "farm.device": one.device, "farm.cause": one.cause,
            }  # fmt: skip
            span = tracer.start_span(job.id, context, start_time=one.started_ms * _NS, attributes=about)
            if one.reason:
                span.set_status(Status(StatusCode.ERROR, one.reason))
            span.end(one.started_ms * _NS + round(one.seconds * 1e9))
    root.end(view.finished_ms * _NS)
    exporter = OTLPSpanExporter(timeout=_TIMEOUT_S)
    sent = exporter.export(made.get_finished_spans())
    exporter.shutdown()  # type: ignore[no-untyped-call]
    return (
        ""
        if sent is SpanExportResult.SUCCESS
        else "no spans were sent: the endpoint of OpenTelemetry does not take them"
    )
