"""Several rewards of one request, and the events of one that takes long."""

from __future__ import annotations

import asyncio
import json

import httpx2 as httpx
import pytest
from hosts import until
from services import Gate, fake, in_loop, queued, rewards, running, served
from test_fetch import png

from vlmrm.serving.protocols import events

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture(autouse=True)
def often(monkeypatch) -> None:
    monkeypatch.setattr(events, "LOOK_S", 0.01)


def read(stream: str) -> list[tuple[str, dict]]:
    """The events as a browser reads them, without comments."""
    blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in stream.split("\n\n") if block]
    return [(block["event"], json.loads(block["data"])) for block in blocks if "event" in block]


# Several rewards -----------------------------------------------------------------------------------------------------


@in_loop
async def test_the_failure_of_one_reward_is_not_that_of_the_others():
    given = fake("one", "fake_reward.Characters"), fake("two"), fake("raises", "fake_reward.Leaky", options=LEAKY)
    async with running(*given) as (_, client):
        answer = await rewards(client, "raise", "aaa", models=["one", "raises"])
        alone = (await rewards(client, "raise", "aaa", model="one")).json()
        one = answer.json()["rewards"]["one"]
        assert (answer.status_code, list(answer.json()["errors"])) == (200, ["raises"])
        assert {**one, "timing_ms": {}} == {**alone, "timing_ms": {}}
        assert answer.json()["errors"]["raises"]["type"] == "RewardFailed"
        assert "/" not in answer.json()["errors"]["raises"]["message"]
        both = (await rewards(client, "aa", "b", models=["two", "one"], transform="rank")).json()
        assert [[it["raw"] for it in both["rewards"][name]["data"]] for name in ("two", "one")] == [[2, 1], [0.2, 0.1]]
        assert both["errors"] == {}
        all_failed = await rewards(client, "raise", models=["raises"])
        assert all_failed.status_code == 500
        for models, status in ((["one", "none"], 404), (["one", "one"], 422), ([], 422)):
            assert (await rewards(client, "a", models=models)).status_code == status, models
        assert (await rewards(client, "a", models=["one"], model="two")).status_code == 422


LEAKY = {"api_key": "s3cret", "folder": "/srv/weights"}


@in_loop
async def test_a_token_opens_all_of_several_rewards_or_none():
    async with running(fake("one", token="first"), fake("two", token="second")) as (_, client):
        client.headers = {"Authorization": "Bearer first"}
        assert (await rewards(client, "a", models=["one"])).status_code == 200
        assert (await rewards(client, "a", models=["one", "two"])).status_code == 401
        assert (await client.post("/v1/rewards", json=asked("two"), headers=STREAM)).status_code == 401


@in_loop
async def test_several_rewards_fetch_an_image_once(monkeypatch):
    fetched = []

    async def fetch(self, remote, budget):
        fetched.append(remote)
        return {"bytes": png()}

    monkeypatch.setattr("vlmrm.serving.fetch.Fetcher.image", fetch)
    sizes = [fake(name, "fake_reward.ImageBytes") for name in ("one", "two")]
    item = {"prompt": "a", "image": "http://pictures.test/a.png"}
    async with running(*sizes, allowed_hosts=["pictures.test"]) as (_, client):
        answer = (await client.post("/v1/rewards", json={"models": ["one", "two"], "items": [item]})).json()
    assert [it["data"][0]["raw"] for it in answer["rewards"].values()] == [len(png())] * 2 and len(fetched) == 1


# Events --------------------------------------------------------------------------------------------------------------


def asked(model: str | None = None, prompt: str = "aaa") -> dict:
    return {"model": model, "items": [{"prompt": prompt}]}


@in_loop
async def test_a_request_tells_that_it_waits_that_it_runs_and_its_answer(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "ALIVE_S", 0.05)
    first, gate = Gate(tmp_path), Gate(tmp_path / "second")
    gate._path.parent.mkdir()
    async with running() as (service, client):
        busy = asyncio.create_task(rewards(client, first.prompt))
        await first.reached()

        async def go_on() -> None:
            await queued(service, 1)
            await asyncio.sleep(0.5)  # for events and comments, none of which is counted
            first.open()
            await gate.reached()
            await asyncio.sleep(0.5)
            gate.open()

        moving = asyncio.create_task(go_on())
        answer = await client.post("/v1/rewards", json=asked(prompt=gate.prompt), headers=STREAM)
        await asyncio.gather(busy, moving)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no" and ": keep-alive\n\n" in answer.text
    assert [name for name, _ in read(answer.text)] == ["queued", "running", "done"]
    (_, waits), _, (_, done) = read(answer.text)
    assert waits == {"position": 1} and done["data"][0]["raw"] == len(gate.prompt)


@in_loop
async def test_a_request_that_fails_says_its_status_at_the_end():
    async with running() as (_, client):
        answer = await client.post("/v1/rewards", json=asked(prompt="raise"), headers=STREAM)
        refused = await client.post("/v1/rewards", json={"items": []}, headers=STREAM)
    [(name, told)] = [event for event in read(answer.text) if event[0] not in ("queued", "running")]
    assert (name, told["status"], told["error"]["type"]) == ("failed", 500, "RewardFailed")
    assert refused.status_code == 422 and refused.headers["content-type"] == "application/json"


def test_a_client_that_goes_ends_the_work(tmp_path):
    gate = Gate(tmp_path)
    with served() as url, httpx.Client(base_url=url, timeout=300) as client:

        def waiting() -> int:
            return client.get("/v1/status").json()["rewards"][0]["jobs"]

        with client.stream("POST", "/v1/rewards", json=asked(prompt=gate.prompt), headers=STREAM) as running_one:
            lines = running_one.iter_lines()  # dropping it would close the connection
            assert "event: running" in lines
            with client.stream("POST", "/v1/rewards", json=asked(), headers=STREAM) as waiting_one:
                others = waiting_one.iter_lines()
                assert "event: queued" in others and waiting() == 1
            until(lambda: not waiting())  # it left the queue, with nobody to compute it
            gate.open()
            assert "event: done" in lines
