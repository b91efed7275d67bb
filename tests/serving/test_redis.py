"""The queue in Redis beyond what every backend does: several processes, lost answers, access, full memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions

from tests.serving.redis_server import RedisServer
from tests.serving.services import ATTENTIVE, TALKATIVE, eventually, fake, in_loop, rewards, running, settings_of
from tests.serving.test_backends import job, prompts
from vlmrm.conversation import Outcome
from vlmrm.errors import ConfigError
from vlmrm.serving import redis_backend
from vlmrm.serving.backend import QueueAway, State
from vlmrm.serving.redis_backend import RedisBackend
from vlmrm.serving.server import serve
from vlmrm.serving.service import make_backend


@pytest.fixture(autouse=True)
def _looks_at_nothing_twice(monkeypatch) -> None:
    """Who waits for something in Redis is woken, or not at all."""
    monkeypatch.setattr(redis_backend, "POLL_S", 600.0)


@asynccontextmanager
async def queues(count: int, settings: dict[str, Any], **limits: Any) -> AsyncGenerator[list[RedisBackend]]:
    """As so many processes have them."""
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(count):
            queue = make_backend(settings_of(fake(), **settings, limits=limits))
            assert isinstance(queue, RedisBackend)
            await queue.start()
            stack.push_async_callback(queue.stop)
            made.append(queue)
        yield made


@in_loop
async def test_one_job_is_taken_by_one_process(redis_server):
    async with queues(3, redis_server.settings) as some:
        ids = [await some[0].put(job(str(number))) for number in range(60)]
        assert await some[1].put(job("0")) == ids[0]
        batches = await asyncio.gather(*(queue.take("length", 2) for queue in some for _ in range(10)))
        taken = [one.id for batch in batches for one in batch]
        assert len(taken) == 60 == len(set(taken))


@in_loop
async def test_jobs_of_a_silent_process_go_to_others(redis_server):
    async with queues(2, redis_server.settings, silence=1.0) as (lost, other):
        kept = await other.put(job("b"))
        await other.take("length", 1000)
        job_id = await lost.put(job("a"))
        [held] = await lost.take("length", 1000)
        while any(loop.cancel() for loop in lost._loops):  # as a process that was stopped; redis-py may swallow one
            await asyncio.sleep(0.01)
        [again] = await other.take("length", 1000)
        assert (again.id, again.attempts) == (job_id, 1)
        await lost.fail(held, "it broke")  # back again, it cannot take the job from who has it now
        await other.finish(again, [Outcome(1.0)], 0.1, "r1")
        assert (await other.status(job_id)).outcomes == [Outcome(1.0)]
        assert (await other.status(kept)).state is State.running


@in_loop
async def test_a_silent_host_is_forgotten(redis_server):
    async with queues(1, redis_server.settings) as (queue,):
        await queue.announce("silent", {}, 0)
        await queue.announce("here", {"length": 1}, 60)
        assert await queue.announcements() == {"here": {"length": 1}}


@in_loop
async def test_an_answer_that_is_lost_loses_no_job(redis_server, monkeypatch):
    async with queues(1, redis_server.settings) as (queue,):
        whole, lost = queue._script, list[str]()

        async def losing(keys: Any, arguments: Any) -> Any:
            answer = await whole(keys, arguments)
            if arguments[0] not in lost:
                lost.append(arguments[0])
                raise redis.exceptions.ConnectionError("reset by peer")
            return answer

        monkeypatch.setattr(queue, "_script", losing)
        for operation in ("put", "cancel"):  # whose answer is lost, of two that wait for one result
            unwanted = await queue.put(job("b"))
            assert await queue.depth("length") == (1, job("b").size)
            lost[:] = {"put", "cancel"} - {operation}
            assert await queue.put(job("b")) == unwanted
            await queue.cancel(unwanted)
            assert (await queue.status(unwanted)).state is State.queued
            await queue.cancel(unwanted)
            assert (await queue.status(unwanted)).state is State.cancelled
        first = await queue.put(job("a"))
        [taken] = await queue.take("length", 1000)
        assert taken.id == first
        await queue.requeue([taken], "the worker died")
        [taken] = await queue.take("length", 1000)
        assert taken.attempts == 1
        await queue.finish(taken, [Outcome(1.0)], 0.1, "r1")
        assert (await queue.status(first)).outcomes == [Outcome(1.0)]
        assert {"put", "cancel", "take", "give_back", "finish"} <= set(lost)


@in_loop
async def test_a_full_redis_refuses_jobs_but_finishes_others(start_redis, monkeypatch):
    monkeypatch.setattr(redis_backend, "PATIENCE_S", 0.1)
    server = start_redis()
    async with queues(1, server.settings) as (queue,):
        jobs = [await queue.put(job(f"{number}" + "x" * 100_000, cost=1)) for number in range(4)]
        server.client().config_set("maxmemory", 1)
        with pytest.raises(QueueAway, match="its memory is full"):
            await queue.put(job("another"))
        for _ in jobs:
            [taken] = await queue.take("length", 1)
            await queue.finish(taken, [Outcome(1.0)], 0.1, "r1")
        assert all([(await queue.status(one)).state is State.done for one in jobs])


@in_loop
async def test_a_redis_that_may_lose_jobs_is_reported(start_redis, caplog):
    server = start_redis("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "no")
    with caplog.at_level(logging.INFO, "vlmrm"):
        async with queues(1, server.settings):
            await eventually(lambda: "connected to Redis" in caplog.text)
    assert "set appendonly yes" in caplog.text and "set maxmemory-policy noeviction" in caplog.text


@in_loop
async def test_the_password_is_asked_for_and_not_told(start_redis, caplog, monkeypatch):
    monkeypatch.setattr(redis_backend, "PATIENCE_S", 0.1)
    server = start_redis("--requirepass", "right-secret")
    async with queues(1, {**server.settings, "redis_password": "right-secret"}) as (queue,):
        await queue.put(job("a"))
    for given in ({}, {"redis_password": "wrong-secret"}):
        async with queues(1, {**server.settings, **given}) as (queue,):
            with pytest.raises(QueueAway, match="it refuses the password"):
                await queue.put(job("a"))
    assert "secret" not in caplog.text


@in_loop
async def test_a_sentinel_fail_over_loses_no_request(start_redis, tmp_path):
    first = start_redis("--repl-diskless-sync-delay", "0")
    second = start_redis("--appenddirname", "second", "--replicaof", f"127.0.0.1 {first.port}")

    def known(watcher: RedisServer) -> dict[str, Any]:
        return watcher.client().sentinel_masters()["queue"]

    watchers = [start_sentinel(start_redis, tmp_path, number, first.port) for number in range(3)]
    settings = {"redis_sentinels": [f"redis://127.0.0.1:{one.port}" for one in watchers], "redis_url": "redis://queue"}
    await eventually(
        lambda: all(of["num-other-sentinels"] == 2 and of["num-slaves"] == 1 for of in map(known, watchers))
    )
    await eventually(lambda: second.client().info("replication")["master_link_status"] == "up")
    ended: list[int] = []
    async with queues(2, settings, silence=1.0) as (api, host):

        async def compute() -> None:
            while True:
                for one in await host.take("length", 3):
                    await host.finish(one, [Outcome(float(*prompts([one])))], 0.1, "r1")

        async def ask(number: int) -> None:
            job_id = ""
            while not job_id:
                with suppress(QueueAway):
                    job_id = await api.put(job(f"{number}"))
            while number not in ended:
                with suppress(QueueAway):
                    status = await api.wait(job_id, 600)
                    assert status is not None and status.outcomes == [Outcome(float(number))]
                    ended.append(number)

        worker = asyncio.create_task(compute())
        asked = [asyncio.create_task(ask(number)) for number in range(100)]
        await eventually(lambda: len(ended) >= 50)
        first.kill()
        asked += [asyncio.create_task(ask(number)) for number in range(100, 200)]
        await asyncio.gather(*asked)
        assert second.client().info("replication")["role"] == "master"
        worker.cancel()


def start_sentinel(start: Callable[..., RedisServer], folder: Path, number: int, master: int) -> RedisServer:
    """One of three, which take half a second of silence for death."""
    config = folder / f"sentinel-{number}.conf"
    config.write_text(
        f"sentinel monitor queue 127.0.0.1 {master} 2\n"
        "sentinel down-after-milliseconds queue 500\nsentinel failover-timeout queue 3000\n"
    )
    return start(config=config)


@in_loop
async def test_an_api_process_learns_what_others_serve(redis_server):
    shared, both = redis_server.settings, [fake("one", options={"info": {"by": "one"}}), fake("two")]
    async with running(*both, workers=False, **shared, limits=ATTENTIVE) as (api, client):
        assert (await client.get("/ready")).status_code == 503
        async with running(both[0], **shared, limits=TALKATIVE):
            await eventually(lambda: api.health("one").ready)
            ready = (await client.get("/ready")).json()
            assert [ready["rewards"][name]["ready"] for name in ("one", "two")] == [1, 0]
            [known, _] = (await client.get("/v1/models")).json()["data"]
            answer = (await rewards(client, "aaa", model="one")).json()
            assert (answer["data"][0]["score"], answer["revision"]) == (3, known["revision"])
        await eventually(lambda: not api.health("one").ready)  # it has said that it leaves


@in_loop
async def test_metrics_stay_local_while_redis_is_away(start_redis):
    server = start_redis()
    async with running(**server.settings) as (_, client):
        await rewards(client, "aaa")
        server.end()
        away = await client.get("/metrics")
    assert away.status_code == 200 and 'vlmrm_score_count{reward="length"} 1.0' in away.text
    assert "vlmrm_queue_jobs{" not in away.text  # nor a figure of earlier


@pytest.mark.parametrize("role", ["api", "workers"])
def test_roles_need_a_queue_that_they_share(tmp_path, role):
    (tmp_path / "service.toml").write_text('[[reward_args]]\nreward_type = "length"\n')
    with pytest.raises(ConfigError, match="set redis_host"):
        serve(tmp_path / "service.toml", None, {"port": 0}, role)
