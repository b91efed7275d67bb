"""Metrics for Prometheus and the status page, and the format of the log's lines."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter as Counts
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vlmrm.conversation import Outcome

if TYPE_CHECKING:
    from vlmrm.serving.settings import ServiceSettings

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SCORES = (-20, -10, -5, -3, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 5, 10, 20)


@dataclass(frozen=True)
class Failure:
    """A request or item without a score."""

    time: float
    reward: str
    reason: str
    message: str
    request_id: str | None


class RequestMetrics:
    """The Prometheus collectors of a front."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self.requests = counter("vlmrm_requests", "Answered requests", ["client", "route", "status"])
        self.request_seconds = Histogram(
            "vlmrm_request_seconds", "Seconds until an answer", ["route"], buckets=SECONDS, registry=self.registry
        )
        self.disconnects = counter("vlmrm_disconnects", "Requests whose client left before its answer")


class Metrics:
    """The Prometheus collectors of one service in a registry of its own, and recent events for the status page."""

    def __init__(self) -> None:
        # Not the global registry: the tests run several services in one process.
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        seconds = partial(histogram, buckets=SECONDS)
        gauge = partial(Gauge, registry=self.registry)
        self.latency = seconds("vlmrm_stage_seconds", "Seconds by stage", ["reward", "stage"])
        self.batch_items = histogram("vlmrm_batch_items", "Items of a batch", ["reward"], buckets=SIZES)
        self.client_items = counter("vlmrm_client_items", "Items that were accepted", ["client", "reward"])
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

    def record_batch(self, reward: str, outcomes: Sequence[Outcome], seconds: float) -> None:
        self.batch_items.labels(reward).observe(len(outcomes))
        self.history.minute(reward).items += len(outcomes)
        self.latency.labels(reward, "scoring").observe(seconds)
        for outcome in outcomes:
            if outcome.score is not None:
                self.scores.labels(reward).observe(outcome.score)
            else:
                self.record_failure(reward, "item", str(outcome.error))

    def record_failure(self, reward: str, reason: str, message: str, request_id: str | None = None) -> None:
        """Record what gets no score: an `item`, a `job`, a `refused` request, or one that came too late, `timeout`."""
        self.failures.labels(reward, reason).inc()
        self.recent_failures.append(Failure(time.time(), reward, reason, message, request_id))


class LineFormatter(logging.Formatter):
    """One line a record: `2026-01-01T00:00:00Z info request status=200 ms=3.1 request_id=...`, or the same as JSON.

    Line breaks are escaped, so that no client can forge a line.
    """

    def __init__(self, as_json: bool):
        super().__init__()
        self.as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        level, message = record.levelname.lower(), record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self.as_json:
            entry = {"time": moment, "level": level, "message": message, **fields}
            return json.dumps(entry if trace is None else {**entry, "traceback": trace}, default=str)
        line = " ".join([moment, level, message, *(f"{name}={value}" for name, value in fields.items())])
        line = line.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        return line if trace is None else f"{line}\n{trace}"


def log_lines(settings: ServiceSettings) -> None:
    """Have a process that the service has started log to its terminal, as the service does."""
    lines = logging.StreamHandler()
    lines.setFormatter(LineFormatter(settings.log_format == "json"))
    logger = logging.getLogger("vlmrm")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    logger.propagate = False


# The last hour -------------------------------------------------------------------------------------------------------

MINUTES = 60
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
STEPS = 4  # of latencies within a factor of 2: a quantile is off by 9 % at most
LEAST_S, MOST_S = 0.001, 3600.0


@dataclass
class Minute:
    """One minute of a reward. `seconds` counts answers by their latency, `waiting` is the most jobs that were seen."""

    number: int
    requests: int = 0
    items: int = 0
    waiting: int = 0
    seconds: Counts[int] = field(default_factory=Counts)


class History:
    """The last `MINUTES` minutes of each reward; a few kilobytes each."""

    def __init__(self) -> None:
        self._minutes: dict[str, deque[Minute]] = {}

    def record_request(self, reward: str, seconds: float) -> None:
        minute = self.minute(reward)
        minute.requests += 1
        minute.seconds[round(STEPS * math.log2(min(max(seconds, LEAST_S), MOST_S) / LEAST_S))] += 1

    def hour(self, reward: str) -> dict[str, Any]:
        """Return `latency`, the quantiles of the hour in seconds, and lists of a value for each minute, now last."""
        now, minutes = self.minute(reward).number, {minute.number: minute for minute in self._minutes[reward]}
        hour = [minutes.get(number) or Minute(number) for number in range(now - MINUTES + 1, now + 1)]
        by_minute = [_quantiles(minute.seconds) for minute in hour]
        return {
            "latency": _quantiles(sum((minute.seconds for minute in hour), Counts())),
            **{name: [getattr(minute, name) for minute in hour] for name in ("requests", "items", "waiting")},
            **{name: [quantiles[name] for quantiles in by_minute] for name in QUANTILES},
        }

    def minute(self, reward: str) -> Minute:
        """Return this minute, to add to its figures."""
        minutes, now = self._minutes.setdefault(reward, deque(maxlen=MINUTES)), int(time.monotonic() // 60)
        if not minutes or minutes[-1].number != now:
            minutes.append(Minute(now))
        return minutes[-1]


def _quantiles(counts: Mapping[int, int]) -> dict[str, float | None]:
    """Return each of `QUANTILES` of latencies in seconds; None without any."""
    found: dict[str, float | None] = dict.fromkeys(QUANTILES)
    total, below = sum(counts.values()), 0
    for step, count in sorted(counts.items()):
        below += count
        for name, share in QUANTILES.items():
            if found[name] is None and below >= share * total:
                found[name] = float(f"{LEAST_S * 2 ** (step / STEPS):.3g}")
    return found
