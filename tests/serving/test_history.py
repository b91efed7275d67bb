"""The quantiles of the last hour, which the status page shows."""

from __future__ import annotations

import numpy as np
import pytest

from vlmrm.serving import telemetry
from vlmrm.serving.telemetry import History


def test_quantiles_are_those_of_all_latencies(monkeypatch):
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: 60_000.0)
    seconds = np.random.default_rng(0).lognormal(-2, 1.5, 5000)
    history = History()
    for one in seconds:
        history.record_request("people", one)
    found = history.hour("people")["latency"]
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(seconds, share), rel=0.11)
