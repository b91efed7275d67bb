"""What a judge has cost so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class Usage:
    """Counts of one judge in this process; prices are for a million tokens, in any currency.

    `calls` are HTTP requests, `retries` those of them after an item's first; `failures` are items without a reply.
    Tokens are as the server reports them; a reply from the cache costs none.
    """

    prompt_price: float = 0.0
    completion_price: float = 0.0
    calls: int = 0
    retries: int = 0
    cache_hits: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    @property
    def cost(self) -> float:
        return (self.prompt_tokens * self.prompt_price + self.completion_tokens * self.completion_price) / 1e6
