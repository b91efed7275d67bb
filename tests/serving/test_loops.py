"""What goes on beside requests outlives its errors, and says them."""

from __future__ import annotations

import os
import signal

import pytest
from services import eventually, fake, in_loop, rewards, running

from vlmrm.serving.replica import WorkerRegistry
from vlmrm.serving.worker_process import WorkerProcess

SOON = {"silence": 1.0}


@in_loop
async def test_a_loop_goes_on_after_an_error_and_the_service_says_what_is_broken(monkeypatch, caplog):
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
        assert ready.status_code == 503
        [error] = ready.json()["errors"]
        assert error.startswith("saying which workers are ready fails (KeyError) and is tried again")
        assert sum("saying which workers are ready fails" in line for line in caplog.messages) == 1
        broken.clear()
        await eventually(lambda: not service.errors)
        assert (await client.get("/ready")).json() == {
            "ready": True,
            "rewards": {"length": {"ready": 1, "workers": 1, "errors": []}},
            "queue": "ok",
        }


@in_loop
async def test_what_processes_of_another_version_announce_is_read(monkeypatch):
    async with running(limits=SOON) as (service, _):
        await eventually(lambda: service.health("length").ready)

        async def announced():
            return {"another": {"length": {"workers": 1, "ready": 1, "is_new": True}}}

        monkeypatch.setattr(service.backend, "announcements", announced)
        await eventually(lambda: service.health("length").ready == 2)
        assert not service.errors


@in_loop
async def test_a_fault_of_the_service_fails_what_brings_it_about_and_nothing_else(monkeypatch):
    monkeypatch.setattr("vlmrm.serving.replica.BACKOFF_S", (0.0, 0.0))
    async with running() as (service, client):
        record = service.metrics.record_batch

        def fail(reward, outcomes, seconds):
            assert all(outcome.score != 7 for outcome in outcomes)
            record(reward, outcomes, seconds)

        monkeypatch.setattr(service.metrics, "record_batch", fail)
        answer = await rewards(client, "a" * 7)
        assert answer.status_code == 500 and "the service failed at a batch of length" in answer.text
        assert (await rewards(client, "aaa")).json()["data"][0]["score"] == 3
        assert (await client.get("/ready")).status_code == 200


@in_loop
async def test_a_worker_that_cannot_be_stopped_is_replaced_nevertheless(monkeypatch, caplog):
    monkeypatch.setattr("vlmrm.serving.replica.BACKOFF_S", (0.0, 0.0))
    stop = WorkerProcess.stop

    async def fail(self):
        await stop(self)
        raise RuntimeError("Ray has gone")

    async with running() as (service, client):
        await eventually(lambda: service.health("length").ready)
        with monkeypatch.context() as patch:
            patch.setattr(WorkerProcess, "stop", fail)
            os.kill(service.replicas["length"][0].process_id, signal.SIGKILL)
            assert (await rewards(client, "aaa")).json()["data"][0]["score"] == 3
    assert "a worker of length may run on: it could not be stopped" in caplog.messages


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
