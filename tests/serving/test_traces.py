"""What OpenTelemetry is told of a request, by the process as it is served, and the id in every line about it."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2 as httpx
import pytest

from tests.serving.hosts import hosts, until

trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def spans(monkeypatch):
    """The spans that came to a collector, which the environment names as OpenTelemetry has it."""
    found = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            sent = trace_service.ExportTraceServiceRequest()
            sent.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            found.extend(it for one in sent.resource_spans for scope in one.scope_spans for it in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_): ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    yield found
    server.shutdown()
    server.server_close()


def test_requests_are_traced_to_batches_and_log_lines(spans, tmp_path):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-ID": "it-7"}
    with hosts(tmp_path, "", settings={"log_format": "json"}) as [host]:
        ask = {"items": [{"prompt": "aaa"}, {"prompt": "b"}]}
        answer = httpx.post(f"{host.url}/v1/rewards", json=ask, headers=headers, timeout=300)
        assert answer.status_code == 200 and answer.headers["x-request-id"] == "it-7"
        httpx.post(f"{host.url}/v1/rewards", json={"items": [{"prompt": "raise"}]}, headers=headers, timeout=300)
        until(lambda: len([it for it in spans if it.trace_id.hex() == TRACE]) >= 5)
        said = host.said.read_text()
    mine = [it for it in spans if it.trace_id.hex() == TRACE]
    by_name = {it.name: it for it in reversed(mine)}
    request, queue, batch, compute = (by_name[name] for name in ("POST /v1/rewards", "queue", "batch", "compute"))
    assert request.parent_span_id.hex() == PARENT
    assert queue.parent_span_id == batch.parent_span_id == request.span_id and compute.parent_span_id == batch.span_id
    assert queue.end_time_unix_nano <= batch.end_time_unix_nano
    assert request.start_time_unix_nano <= queue.start_time_unix_nano <= compute.start_time_unix_nano
    told = {it.key: it.value for it in batch.attributes}
    assert told["vlmrm.request_id"].string_value == "it-7" and told["vlmrm.batch.items"].int_value == 2
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [it["request_id"] for it in lines if it["message"] == "request" and it["route"] == "/v1/rewards"] == [
        "it-7"
    ] * 2
    assert "request_id=it-7 Traceback" in said  # the worker's own
    assert not [it for it in spans if "/ready" in it.name]
