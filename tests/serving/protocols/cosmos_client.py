"""What the trainer of cosmos-rl sends to its reward service, and how it reads the answers."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import httpx2 as httpx
import numpy as np


class CosmosClient:
    """Enqueues tensors and fetches their rewards; what may pass is tried again, as there.

    Args:
        attempts: of each call; there 60, within an hour.
    """

    def __init__(self, http: httpx.AsyncClient, *, token: str = "", attempts: int = 60):
        self.http, self.token, self.attempts = http, token, attempts
        self.statuses: list[int] = []
        self.replica: str | None = None

    async def enqueue(self, tensor: np.ndarray, **metadata: Any) -> str:
        """The id of a request, such as {"prompts", "reward_fn", "media_type", "video_infos"}."""
        file = io.BytesIO()
        np.save(file, tensor)
        answer = await self._post(
            "enqueue",
            content=json.dumps(metadata).encode() + b"\n" + file.getvalue(),
            headers={"Content-Type": "application/octet-stream"},
        )
        self.replica = answer.get("replica_id")
        return answer["uuid"]

    async def fetch(self, uuid: str, name: str, score_key: str) -> np.ndarray:
        """The rewards [B]; `score_key` may be a sum of keys, "a+b"."""
        answer = await self._post("pull", data={"uuid": uuid, "type": name})
        scores = answer["scores"]
        if score_key in scores:
            return np.array(scores[score_key])
        return sum(np.array(scores[key]) for key in score_key.split("+"))

    async def _post(self, route: str, *, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
        headers = {**(headers or {}), "Authorization": f"Bearer {self.token}".strip()}
        if self.replica is not None:
            headers["X-Lepton-Replica-Target"] = self.replica
        for _ in range(self.attempts):
            answer = await self.http.post(f"/api/reward/{route}", headers=headers, **body)
            self.statuses.append(answer.status_code)
            if answer.is_success:
                return answer.json()
            if answer.status_code < 500 and answer.status_code not in (408, 425, 429):
                answer.raise_for_status()
            await asyncio.sleep(0.01)
        raise RuntimeError(f"{route} failed {self.attempts} times: {answer.text}")
