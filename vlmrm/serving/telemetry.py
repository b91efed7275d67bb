"""Metrics for Prometheus and the status page, spans for OpenTelemetry, and the format of the log's lines."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate, trace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vlmrm.conversation import Outcome
from vlmrm.serving.history import History

if TYPE_CHECKING:
    from vlmrm.serving.backend import Job

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SCORES = (-20, -10, -5, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 5, 10, 20)

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)


@dataclass(frozen=True)
class Failure:
    """A request or item without a score."""

    time: float
    reward: str
    reason: str
    message: str
    request_id: str | None


class Metrics:
    """The Prometheus collectors of one service in a registry of its own, and recent events for the status page."""

    def __init__(self) -> None:
        # Not the global registry: the tests run several services in one process.
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        seconds = partial(histogram, buckets=SECONDS)
        gauge = partial(Gauge, registry=self.registry)
        self.requests = counter("vlmrm_requests", "Answered requests", ["route", "status"])
        self.request_seconds = seconds("vlmrm_request_seconds", "Seconds until an answer", ["route"])
        self.disconnects = counter("vlmrm_disconnects", "Requests whose client left before its answer")
        self.latency = seconds("vlmrm_stage_seconds", "Seconds by stage", ["reward", "stage"])
        self.batch_items = histogram("vlmrm_batch_items", "Items of a batch", ["reward"], buckets=SIZES)
        self.compute_seconds = counter("vlmrm_compute_seconds", "Seconds in which workers computed", ["reward"])
        self.computed = counter("vlmrm_computed", "What workers computed", ["reward", "what"])
        self.scores = histogram("vlmrm_score", "Scores", ["reward"], buckets=SCORES)
        self.failures = counter("vlmrm_failures", "Items without a score", ["reward", "reason"])
        self.restarts = counter("vlmrm_worker_restarts", "Workers that died", ["reward"])
        self.waiting = gauge("vlmrm_queue_jobs", "Jobs that wait", ["reward"])
        self.waiting_bytes = gauge("vlmrm_queue_bytes", "Bytes of jobs that wait", ["reward"])
        self.ready = gauge("vlmrm_workers_ready", "Workers that are ready", ["reward"])

        self.recent_failures: deque[Failure] = deque(maxlen=50)
        self.history = History()

    def record_request(self, route: str, status: int, seconds: float) -> None:
        """Record a request; status 0 where the client had disconnected."""
        self.requests.labels(route, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)

    def record_waits(self, reward: str, seconds: Sequence[float]) -> None:
        """Record how long each job of a batch waited in the queue."""
        for wait in seconds:
            self.latency.labels(reward, "waiting").observe(wait)

    def record_batch(self, reward: str, outcomes: Sequence[Outcome], seconds: float) -> None:
        """Record a batch that was scored."""
        self.batch_items.labels(reward).observe(len(outcomes))
        self.history.record_items(reward, len(outcomes))
        self.latency.labels(reward, "scoring").observe(seconds)
        for outcome in outcomes:
            if outcome.score is not None:
                self.scores.labels(reward).observe(outcome.score)
            else:
                self.record_failure(reward, "item", str(outcome.error))

    def record_computed(self, reward: str, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Record what a worker has computed between two of its counts, such as tokens."""
        for what, count in after.items():
            self.computed.labels(reward, what).inc(max(0.0, count - before.get(what, 0.0)))

    def record_failure(self, reward: str, reason: str, message: str) -> None:
        """Record what gets no score: an `item`, a `job`, a `refused` request, or one that came too late, `timeout`."""
        self.failures.labels(reward, reason).inc()
        self.recent_failures.append(Failure(time.time(), reward, reason, message, REQUEST_ID.get()))


# Traces --------------------------------------------------------------------------------------------------------------


def current_trace() -> str:
    """Return the W3C traceparent of the request that is answered here; "" where it is not traced."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier.get("traceparent", "")


def trace_batch(jobs: Sequence[Job], taken: float, started: float, ended: float) -> None:
    """Record in the trace of each job's request when it waited, was in a batch, and was computed there."""
    tracer, items = trace.get_tracer("vlmrm"), sum(len(job.items) for job in jobs)
    for job in jobs:
        if not job.trace:
            continue
        parent = propagate.extract({"traceparent": job.trace})
        named = {"vlmrm.reward": job.reward, "vlmrm.request_id": job.request_id}
        of_batch = {"vlmrm.batch.jobs": len(jobs), "vlmrm.batch.items": items}
        for name, begin, end in (("queue", job.created, taken), ("batch", taken, ended), ("compute", started, ended)):
            attributes = named if name == "queue" else named | of_batch
            span = tracer.start_span(name, parent, attributes=attributes, start_time=int(begin * 1e9))
            span.end(int(end * 1e9))
            if name == "batch":
                parent = trace.set_span_in_context(span)


class LineFormatter(logging.Formatter):
    """One line a record: `2026-01-01T00:00:00Z info request status=200 ms=3.1 request_id=...`, or the same as JSON.

    A record's `fields` follow its message. Line breaks are escaped, so that no client can forge a line; a traceback is
    a field of the JSON, and in text the only thing that takes more lines.
    """

    def __init__(self, as_json: bool):
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if (request_id := REQUEST_ID.get()) is not None:
            fields["request_id"] = request_id
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level, message = record.levelname.lower(), record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self.as_json:
            entry = {"time": moment, "level": level, "message": message, **fields}
            return json.dumps(entry if trace is None else {**entry, "traceback": trace}, default=str)
        line = " ".join([moment, level, message, *(f"{name}={value}" for name, value in fields.items())])
        line = line.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        return line if trace is None else f"{line}\n{trace}"


def set_log_format(logger: logging.Logger, as_json: bool) -> None:
    """Set `LineFormatter` on every handler of `logger`."""
    for handler in logger.handlers:
        handler.setFormatter(LineFormatter(as_json))
