"""What goes on beside requests outlives its errors, and says them."""

from __future__ import annotations

import pytest

from tests.serving.services import eventually, fake, in_loop, rewards, running
from vlmrm.serving.replica import WorkerRegistry

SOON = {"silence": 1.0}


@in_loop
async def test_a_loop_goes_on_after_an_error_and_the_service_says_so(monkeypatch, caplog):
    announce, broken = WorkerRegistry.announce, [True]

    async def fail(self):
        if broken:
            raise KeyError("a bug")
        await announce(self)

    monkeypatch.setattr(WorkerRegistry, "announce", fail)
    async with running(limits=SOON) as (service, client):
        await eventually(lambda: service.errors)
        assert (await rewards(client, "aaa")).json()["data"][0]["score"] == 3  # requests do not need it
        ready = await client.get("/ready")
        assert ready.status_code == 503 and "saying which workers are ready fails (KeyError)" in ready.text
        broken.clear()
        await eventually(lambda: not service.errors)
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "said"),
    [("garble", "sent what is no message (JSONDecodeError)"), ("prepare: exit", "ended with status 0")],
)
@in_loop
async def test_a_worker_that_is_of_no_use_any_more_is_replaced_at_once(tmp_path, monkeypatch, prompt, said):
    monkeypatch.setattr("vlmrm.serving.replica.BACKOFF_S", (0.0, 0.0))
    block = fake("length", "fake_reward.Prepared", options={"log": str(tmp_path / "log")})
    async with running(block, limits={"silence": 600.0}) as (_, client):
        answer = await rewards(client, prompt)
        assert answer.status_code == 500 and said in answer.text
        assert (await rewards(client, "aaa")).json()["data"][0]["score"] == 3
