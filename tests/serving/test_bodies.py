"""Requests that would wait too long, take too much, or outlast their client: refused before they cost."""

from __future__ import annotations

import asyncio

from tests.serving.services import Gate, in_loop, rewards, running
from vlmrm.serving.front import Admission


@in_loop
async def test_a_request_facing_long_waits_is_refused_unparsed(monkeypatch):
    async with running() as (_, client):
        assert (await rewards(client, "a cat")).status_code == 200
        monkeypatch.setattr(Admission, "wait", lambda self, request: 7.2)
        answer = await client.post("/v1/rewards", content="{ no JSON", headers={"Content-Type": "application/json"})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["type"] == "Busy" and "busy for the next 7.2 s" in answer.text
        assert (await client.get("/health")).status_code == 200  # has no body, and waits for no turn


@in_loop
async def test_bodies_together_have_a_limit_until_answered(tmp_path):
    gate = Gate(tmp_path)
    size = 4096
    async with running(limits={"max_body_bytes": size, "max_bodies_bytes": size}) as (_, client):
        first = asyncio.create_task(rewards(client, gate.prompt, "x" * 2000))
        await gate.reached()
        refused = await rewards(client, "y" * 2500)
        assert refused.status_code == 503 and f"over the limit of {size} bytes" in refused.text
        gate.open()
        assert (await first).status_code == 200
        assert (await rewards(client, "y" * 2500)).status_code == 200


@in_loop
async def test_a_client_may_say_how_long_it_waits(tmp_path):
    gate = Gate(tmp_path)
    async with running() as (_, client):
        body = {"items": [{"prompt": gate.prompt}], "timeout": 500}
        answer = await client.post("/v1/rewards", json=body, headers={"X-Request-Timeout": "0.3"})
        assert answer.status_code == 504
        gate.open()
        for wrong in ("soon", "0", "-1", "nan", "inf"):
            answer = await client.post("/v1/rewards", json=body, headers={"X-Request-Timeout": wrong})
            assert answer.status_code == 400 and "X-Request-Timeout" in answer.text
