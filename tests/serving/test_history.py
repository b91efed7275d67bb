"""The last hour by minute: what is in it, and what has left it."""

from __future__ import annotations

import numpy as np
import pytest

from vlmrm.serving import telemetry as module
from vlmrm.serving.telemetry import MINUTES, History


@pytest.fixture
def at(monkeypatch):
    """Sets the minute."""

    def set_minute(number: int) -> None:
        monkeypatch.setattr(module.time, "monotonic", lambda: 60.0 * number)

    return set_minute


def test_quantiles_are_those_of_all_latencies(at):
    at(1000)
    seconds = np.random.default_rng(0).lognormal(-2, 1.5, 5000)
    history = History()
    for one in seconds:
        history.record_request("people", one)
    found = history.hour("people")["latency"]
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(seconds, share), rel=0.11)


def test_each_minute_has_its_own_and_the_hour_forgets(at):
    history = History()
    for minute, seconds in ((100, 4.0), (130, 0.5), (131, 0.1)):
        at(minute)
        history.record_request("people", seconds)
        history.minute("people").items += minute
        for jobs in (3, 7, 2):
            now = history.minute("people")
            now.waiting = max(now.waiting, jobs)
    at(130 + MINUTES - 1)  # the first has left, the second is the oldest
    hour = history.hour("people")
    assert hour["items"] == [130, 131, *[0] * 58] and hour["requests"] == [1, 1, *[0] * 58]
    assert hour["waiting"][:3] == [7, 7, 0] and hour["p50"][:3] == [0.512, 0.108, None]
    assert hour["latency"] == {"p50": 0.108, "p95": 0.512, "p99": 0.512}
    assert History().hour("people")["latency"]["p99"] is None


def test_it_is_bounded_however_long_it_runs_and_whatever_is_measured(at):
    history = History()
    for minute in range(300):
        at(minute)
        for seconds in (0.0, 1e-9, 5.0, 1e9):
            history.record_request("people", seconds)
    [minutes] = history._minutes.values()
    assert len(minutes) == MINUTES and max(len(minute.seconds) for minute in minutes) <= 3
