"""Requests that would wait too long, take too much, or whose client has gone: refused or dropped before they cost."""

from __future__ import annotations

import asyncio
import io
import json
import time
from typing import Any

import numpy as np
import pytest
from services import Gate, fake, in_loop, queued, rewards, running

from vlmrm.serving.event_loop import LANE, TurnScheduler

BODY = json.dumps({"items": [{"prompt": "a cat"}]}).encode()


@in_loop
async def test_a_flood_of_one_lane_holds_another_up_by_one_turn():
    turns, order = TurnScheduler(), []

    async def work(lane, number):
        LANE.set(lane)
        await turns.next_turn()
        order.append((lane, number))

    flood = [asyncio.create_task(work("flood", number)) for number in range(20)]
    await asyncio.sleep(0)
    await asyncio.gather(asyncio.create_task(work("other", 0)), *flood)
    assert order.index(("other", 0)) <= 2
    assert [number for lane, number in order if lane == "flood"] == list(range(20))


@in_loop
async def test_a_lane_is_told_how_long_it_would_wait():
    turns = TurnScheduler()
    turns._turn_s = 0.1

    async def work():
        LANE.set("flood")
        await turns.next_turn()

    waiting = [asyncio.create_task(work()) for _ in range(30)]
    await asyncio.sleep(0)
    assert turns.wait("flood") > 2.5 and turns.wait("other") < 0.3
    await asyncio.gather(*waiting)


@in_loop
async def test_a_request_that_would_wait_too_long_is_refused_unparsed(monkeypatch):
    async with running() as (_, client):
        scheduler = client._transport.app.state.gateway.scheduler
        assert (await rewards(client, "a cat")).status_code == 200
        monkeypatch.setattr(scheduler, "wait", lambda lane: 7.2)
        answer = await client.post("/v1/rewards", content="{ no JSON", headers={"Content-Type": "application/json"})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "7"
        assert answer.json()["error"]["type"] == "Busy" and "busy for the next 7.2 s" in answer.text
        assert (await client.get("/health")).status_code == 200  # has no body, and waits for no turn


@in_loop
async def test_a_result_is_to_be_had_however_many_requests_wait(monkeypatch):
    async with running() as (_, client):
        scheduler = client._transport.app.state.gateway.scheduler
        body = json.dumps({"prompts": ["a cat"], "reward_fn": {"length": 1.0}, "media_type": "image"}).encode()
        pixels = io.BytesIO()
        np.save(pixels, np.zeros((1, 28, 28, 3), np.uint8))
        ticket = (await client.post("/api/reward/enqueue", content=body + b"\n" + pixels.getvalue())).json()["uuid"]
        monkeypatch.setattr(scheduler, "wait", lambda lane: 7.2)
        pulled = {"uuid": ticket, "type": "length"}
        assert (await client.post("/api/reward/pull", json=pulled)).json()["scores"]["length"] == [5.0]
        assert (await client.post("/api/reward/enqueue", content=body)).status_code == 503


@in_loop
async def test_bodies_together_have_a_limit_until_they_are_answered(tmp_path):
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
async def test_announced_bodies_take_no_room():
    size = 4096
    announced = [(b"host", b"localhost"), (b"content-length", b"%d" % size)]
    async with running(limits={"max_body_bytes": size, "max_bodies_bytes": size}) as (_, client):
        waiting = [asyncio.create_task(sent(client._transport.app, [PIECE], headers=announced)) for _ in range(8)]
        await asyncio.sleep(0.05)
        assert (await rewards(client, "a cat")).status_code == 200
        for one in waiting:
            one.cancel()


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


@in_loop
async def test_a_step_of_the_clock_expires_no_request(tmp_path, monkeypatch):
    gate, now = Gate(tmp_path), time.time
    async with running() as (service, client):
        first = asyncio.create_task(rewards(client, gate.prompt))
        await gate.reached()
        second = asyncio.create_task(rewards(client, "waits", timeout=60))
        await queued(service, 1)
        monkeypatch.setattr(time, "time", lambda: now() + 3600)
        gate.open()
        assert [(await one).status_code for one in (first, second)] == [200, 200]


async def sent(app: Any, messages: list[dict[str, Any]], **scope: Any) -> list[dict[str, Any]]:
    """What the application answers to a request of these messages; after the last one the client says nothing."""
    answer = []

    async def receive():
        if messages:
            return messages.pop(0)
        await asyncio.Event().wait()

    async def send(message):
        answer.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    http = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/v1/rewards", "raw_path": b"/v1/rewards"}
    rest = {"query_string": b"", "root_path": "", "scheme": "http", "headers": headers, "client": ("127.0.0.1", 1)}
    await app({**http, **rest, "server": ("localhost", 80), "state": {}, **scope}, receive, send)
    return answer


PIECE = {"type": "http.request", "body": BODY[:10], "more_body": True}
REST = {"type": "http.request", "body": BODY[10:], "more_body": False}
GONE = {"type": "http.disconnect"}


@in_loop
async def test_a_body_that_stalls_is_a_timeout(monkeypatch):
    monkeypatch.setattr("vlmrm.serving.middleware.IDLE_S", 0.05)
    async with running() as (_, client):
        begin, _ = await sent(client._transport.app, [PIECE])
        assert begin["status"] == 408


@pytest.mark.parametrize("messages", [[PIECE, GONE], [PIECE, REST, GONE]], ids=["in its body", "while it waits"])
@in_loop
async def test_of_a_client_that_has_gone_nothing_is_computed(messages, tmp_path):
    log = tmp_path / "log"
    async with running(fake(options={"log": str(log)})) as (service, client):
        assert (await rewards(client, "before")).status_code == 200
        assert await sent(client._transport.app, list(messages)) == []
        assert (await rewards(client, "after")).status_code == 200
        assert log.read_text().split() == ["before", "after"]
        assert service.metrics.disconnects._value.get() == 1
        assert client._transport.app.state.gateway.service is service
