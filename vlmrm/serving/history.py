"""The last hour of each reward by minute: what it was asked, how long answers took, and what waited."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    seconds: Counter[int] = field(default_factory=Counter)


class History:
    """The last `MINUTES` minutes of each reward; a few kilobytes each."""

    def __init__(self) -> None:
        self._minutes: dict[str, deque[Minute]] = {}

    def record_request(self, reward: str, seconds: float) -> None:
        """Record an answer that came after so many seconds."""
        minute = self._minute(reward)
        minute.requests += 1
        minute.seconds[round(STEPS * math.log2(min(max(seconds, LEAST_S), MOST_S) / LEAST_S))] += 1

    def record_items(self, reward: str, count: int) -> None:
        """Record items that were scored."""
        self._minute(reward).items += count

    def record_waiting(self, reward: str, jobs: int) -> None:
        """Record how many jobs wait at this moment."""
        minute = self._minute(reward)
        minute.waiting = max(minute.waiting, jobs)

    def hour(self, reward: str) -> dict[str, Any]:
        """Return `latency`, the quantiles of the hour in seconds, and lists of a value for each minute, now last."""
        now, minutes = _now(), {minute.number: minute for minute in self._minutes.get(reward, ())}
        hour = [minutes.get(number) or Minute(number) for number in range(now - MINUTES + 1, now + 1)]
        by_minute = [_quantiles(minute.seconds) for minute in hour]
        return {
            "latency": _quantiles(sum((minute.seconds for minute in hour), Counter())),
            **{name: [getattr(minute, name) for minute in hour] for name in ("requests", "items", "waiting")},
            **{name: [quantiles[name] for quantiles in by_minute] for name in QUANTILES},
        }

    def _minute(self, reward: str) -> Minute:
        minutes, now = self._minutes.setdefault(reward, deque(maxlen=MINUTES)), _now()
        if not minutes or minutes[-1].number != now:
            minutes.append(Minute(now))
        return minutes[-1]


def _now() -> int:
    return int(time.monotonic() // 60)


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
