"""The queue in Redis beyond what every backend does: several processes, lost answers, access, full memory."""

from __future__ import annotations

import asyncio
import logging
import math
import subprocess
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions
from redis_server import RedisServer
from services import ATTENTIVE, TALKATIVE, eventually, fake, in_loop, rewards, running, settings_of

from vlmrm.conversation import Outcome
from vlmrm.errors import ConfigError
from vlmrm.serving import redis_backend
from vlmrm.serving.backend import Job, Overloaded, QueueAway, State
from vlmrm.serving.redis_backend import RedisBackend
from vlmrm.serving.server import serve
from vlmrm.serving.service import Service, make_backend


@pytest.fixture(autouse=True)
def _looks_at_nothing_twice(monkeypatch) -> None:
    """Who waits for something in Redis is woken, or not at all."""
    monkeypatch.setattr(redis_backend, "POLL_S", 600.0)


def job(prompt: str = "a", **settings: Any) -> Job:
    return Job("length", [{"prompt": prompt}], **settings)


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
async def test_processes_share_jobs_results_and_wakeups(redis_server):
    async with queues(2, redis_server.settings) as (api, host):
        taking = asyncio.create_task(host.take("length", 1000))
        first = await api.put(job("a"))
        assert await host.put(job("a")) == first
        waiting = asyncio.create_task(api.wait(first, 60))
        [taken] = await taking
        await host.finish(taken, [Outcome(2.0)], 0.1, "r1")
        assert (await waiting).outcomes == [Outcome(2.0)]


@in_loop
async def test_the_bound_holds_for_all_processes_together(redis_server):
    async with queues(3, redis_server.settings, queue_items=10) as some:
        puts = [queue.put(job(f"{queue} {number}")) for queue in some for number in range(10)]
        answers = await asyncio.gather(*puts, return_exceptions=True)
        assert sum(isinstance(one, Overloaded) for one in answers) == 20
        assert (await some[0].depth("length"))[0] == 10


@pytest.mark.parametrize("rounds", range(4))
@in_loop
async def test_who_stops_taking_as_something_comes_does_not_take_it(redis_server, rounds):
    async with queues(1, redis_server.settings) as [queue]:
        taking = asyncio.create_task(queue.take("length", 1000))
        await eventually(lambda: queue._queued and not queue._takes)  # it has found nothing and waits
        queue._on_message("come", "length")
        for _ in range(rounds):  # of the event loop, until the wait is over
            await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking


@in_loop
async def test_one_job_is_taken_by_one_process(redis_server):
    async with queues(3, redis_server.settings) as some:
        for number in range(60):
            await some[0].put(job(str(number)))
        batches = await asyncio.gather(*(queue.take("length", 2) for queue in some for _ in range(10)))
        taken = [one.id for batch in batches for one in batch]
        assert len(taken) == 60 == len(set(taken))


@in_loop
async def test_what_a_silent_process_had_is_queued_for_others(redis_server):
    async with queues(2, redis_server.settings, silence=1.0) as (lost, other):
        job_id = await lost.put(job("a"))
        [held] = await lost.take("length", 1000)
        for loop in lost._loops:
            loop.cancel()  # as a process that was stopped
        [again] = await other.take("length", 1000)
        assert (again.id, again.attempts) == (job_id, 1)
        # Back again, it cannot take the job from who has it now; the result that it has is as good.
        await lost.requeue([held], None)
        await lost.fail(held, "it broke")
        assert (await other.status(job_id)).state is State.running
        await lost.finish(held, [Outcome(1.0)], 0.1, "r1")
        await other.finish(again, [Outcome(1.0)], 0.1, "r1")
        assert (await other.status(job_id)).outcomes == [Outcome(1.0)]
        assert await other.depth("length") == (0, 0)


@in_loop
async def test_who_works_long_says_so_and_keeps_what_it_has(redis_server):
    minute = 60.0
    async with queues(2, redis_server.settings, silence=0.2) as (one, other):
        one._last_failure = math.inf  # so that it looks for nobody else who is silent
        job_id = await one.put(job("a"))
        [held] = await one.take("length", 1000)
        client, running = redis_server.client(), f"{one._prefix}:running:length"
        client.zadd(running, {held.id: 0.0})  # nothing was heard of it for years
        await eventually(lambda: bool(client.zscore(running, held.id)))
        found = await other._run("reclaim", "length", minute, "", 2, "", "", 1000, patience=None)
        assert found == 0 and (await other.status(job_id)).state is State.running


@in_loop
async def test_an_answer_that_is_lost_loses_no_job(redis_server, monkeypatch):
    async with queues(1, redis_server.settings) as (queue,):
        whole, lost = queue._script, []

        async def losing(keys: Any, arguments: Any) -> Any:
            answer = await whole(keys, arguments)
            if arguments[0] not in lost:
                lost.append(arguments[0])
                raise redis.exceptions.ConnectionError("reset by peer")
            return answer

        monkeypatch.setattr(queue, "_script", losing)
        first = await queue.put(job("a"))
        assert await queue.depth("length") == (1, job("a").size)
        [taken] = await queue.take("length", 1000)
        assert taken.id == first
        await queue.requeue([taken], "the worker died")
        [taken] = await queue.take("length", 1000)
        assert taken.attempts == 1
        await queue.finish(taken, [Outcome(1.0)], 0.1, "r1")
        assert (await queue.status(first)).outcomes == [Outcome(1.0)]
        assert {"put", "take", "give_back", "finish"} <= set(lost)


@in_loop
async def test_an_outage_of_thousands_of_tries_is_outlived(redis_server, monkeypatch):
    monkeypatch.setattr(redis_backend, "BACKOFF_S", (0.0, 0.0))
    tries = iter(range(2000))

    async def call() -> str:
        if next(tries, None) is not None:
            raise redis.exceptions.ConnectionError
        return "there"

    async with queues(1, redis_server.settings) as (queue,):
        assert await queue._retry(call, None) == "there"


@in_loop
async def test_nothing_is_left_behind(redis_server):
    settings = redis_server.settings
    async with queues(1, settings, result_ttl=0.2) as (queue,):
        for number in range(5):
            await queue.put(job(str(number), priority=number))
        taken = await queue.take("length", 1000)
        await queue.requeue(taken[:1], "the worker died")
        for one in [*taken[1:4], *await queue.take("length", 1000)]:
            await queue.finish(one, [Outcome(1.0)], 0.1, "r1")
        await queue.fail(taken[4], "it broke")
    counts = {"waiting", "pace", "taken"}  # and what ends by itself

    def kept() -> set[str]:
        return {key.decode().split(":")[1] for key in redis_server.client().keys(f"{settings['redis_prefix']}:*")}

    await eventually(lambda: kept() <= counts)


@in_loop
async def test_a_full_redis_refuses_jobs_and_finishes_those_it_has(start_redis, monkeypatch):
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
async def test_a_redis_that_may_lose_jobs_is_told_of(start_redis, caplog):
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


def certificates(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, which is its own authority, and its key."""
    certificate, key = folder / "redis.crt", folder / "redis.key"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=redis", "-days", "1"]
    subprocess.run([*words, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return certificate, key


@in_loop
async def test_tls_trusts_only_who_proves_who_it_is(tmp_path, start_redis, monkeypatch):
    monkeypatch.setattr(redis_backend, "PATIENCE_S", 0.1)
    certificate, key = certificates(tmp_path)
    tls = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-ca-cert-file", str(certificate)]
    server = start_redis(*tls, "--tls-auth-clients", "no", tls=True)
    settings = {"redis_url": f"rediss://127.0.0.1:{server.port}"}
    async with queues(1, settings) as (queue,):
        with pytest.raises(QueueAway):
            await queue.put(job("a"))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    async with queues(1, settings) as (queue,):
        assert await queue.put(job("a"))


@in_loop
async def test_tls_asks_for_a_certificate_and_a_user_for_rights(tmp_path, start_redis, monkeypatch):
    monkeypatch.setattr(redis_backend, "PATIENCE_S", 0.1)
    certificate, key = map(str, certificates(tmp_path))
    rights = ["~queue:*", "~queue", "&queue:*", "+@all", "-@dangerous", "+info"]
    users = ["--user", "vlmrm", "on", ">right-secret", *rights, "--user", "default", "off"]
    tls = ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
    server = start_redis(*tls, *users, tls=True)
    files = f"ssl_certfile={certificate}&ssl_keyfile={key}&"

    def settings(user: str = "vlmrm", prefix: str = "queue", files: str = files) -> dict[str, Any]:
        url = f"rediss://{user}:right-secret@127.0.0.1:{server.port}?{files}ssl_ca_certs={certificate}"
        return {"redis_url": url, "redis_prefix": prefix}

    async with queues(1, settings()) as (queue,):
        await queue.put(job("a"))
        assert len(await queue.take("length", 1)) == 1
    for wrong, reason in (
        ({"user": "other"}, "refuses the password"),
        ({"prefix": "other"}, "too little"),
        ({"files": ""}, "does not answer"),
    ):
        async with queues(1, settings(**wrong)) as (queue,):
            with pytest.raises(QueueAway, match=reason):
                await queue.put(job("a"))


@in_loop
async def test_a_cluster_is_refused_by_name(start_redis, monkeypatch, caplog):
    monkeypatch.setattr(redis_backend, "PATIENCE_S", 0.1)
    server = start_redis("--cluster-enabled", "yes")
    async with queues(1, server.settings) as (queue,):
        await eventually(lambda: "it is a Redis Cluster" in caplog.text)
        with pytest.raises(QueueAway, match="it is a Redis Cluster, which the queue cannot use"):
            await queue.put(job("a"))


@in_loop
async def test_sentinels_name_the_master_and_a_fail_over_loses_nothing(start_redis, tmp_path):
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
                    await host.finish(one, [Outcome(float(one.items[0]["prompt"]))], 0.1, "r1")

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
async def test_an_api_process_knows_from_others_what_is_served(redis_server):
    shared = redis_server.settings
    both = [fake("one", options={"info": {"by": "one"}}), fake("two")]
    async with running(*both, workers=False, **shared, limits=ATTENTIVE) as (api, client):
        ready = await client.get("/ready")
        assert ready.status_code == 503 and ready.json()["rewards"]["one"]["workers"] == 0
        async with running(both[0], **shared, limits=TALKATIVE):
            await eventually(lambda: api.health("one").ready)
            ready = (await client.get("/ready")).json()
            assert (ready["ready"], ready["queue"]) == (False, "ok")
            assert [ready["rewards"][name]["ready"] for name in ("one", "two")] == [1, 0]
            [known, _] = (await client.get("/v1/models")).json()["data"]
            answer = (await rewards(client, "aaa", model="one")).json()
            assert (answer["data"][0]["score"], answer["revision"]) == (3, known["revision"])
            assert known["by"] == "one"
        await eventually(lambda: not api.health("one").ready)  # it has said that it leaves


@in_loop
async def test_results_of_other_weights_are_not_served_under_the_name_of_a_reward(redis_server, tmp_path):
    shared, weights = redis_server.settings, tmp_path / "model.safetensors"
    model = fake("model", "fake_reward.Weights", model_path=str(tmp_path))
    answers = []
    async with running(model, workers=False, **shared, limits=ATTENTIVE) as (api, client):
        for number in (1, 2, 1):
            weights.write_text(str(number))
            async with running(model, **shared, limits=TALKATIVE):
                await eventually(lambda: api.health("model").ready)
                for _ in range(2):
                    answers.append((await rewards(client, "aaa")).json())
            await eventually(lambda: not api.health("model").ready)
    assert [one["data"][0]["score"] for one in answers] == [1, 1, 2, 2, 1, 1]
    revisions = [one["revision"] for one in answers]
    assert revisions[:2] == revisions[4:] and revisions[2] == revisions[3] != revisions[0]
    assert answers[0]["id"] == answers[1]["id"]  # the same weights are not asked twice


@in_loop
async def test_metrics_tell_what_is_known_here_while_redis_is_away(start_redis):
    server = start_redis()
    async with running(**server.settings) as (_, client):
        await rewards(client, "aaa")
        there = (await client.get("/metrics")).text
        server.end()
        away = await client.get("/metrics")
    assert 'vlmrm_queue_jobs{reward="length"} 0.0' in there
    assert away.status_code == 200
    assert (
        'vlmrm_score_count{reward="length"} 1.0' in away.text and 'vlmrm_workers_ready{reward="length"}' in away.text
    )
    assert "vlmrm_queue_jobs{" not in away.text  # nor a figure of earlier


@in_loop
async def test_a_reward_that_loads_nowhere_is_refused(redis_server):
    shared, broken = redis_server.settings, fake("broken", "fake_reward.Broken")
    api_process = running(broken, workers=False, **shared, limits=ATTENTIVE)
    async with api_process as (api, client), running(broken, **shared, limits=TALKATIVE):
        await eventually(lambda: api.health("broken").failing)
        assert "FileNotFoundError" in (await client.get("/ready")).json()["rewards"]["broken"]["errors"][0]
        assert (await rewards(client, "a")).status_code == 503


@in_loop
async def test_a_result_that_is_not_to_be_kept_is_read_by_who_waits_for_it(redis_server):
    async with running(**redis_server.settings, limits={"result_ttl": 0}) as (_, client):
        answer = await rewards(client, "aaa", timeout=20)
    assert answer.json()["data"][0]["score"] == 3


@pytest.mark.parametrize("role", ["api", "workers"])
def test_roles_need_a_queue_that_they_share(tmp_path, role):
    (tmp_path / "service.toml").write_text('[[reward_args]]\nreward_type = "length"\n')
    with pytest.raises(ConfigError, match="set redis_host"):
        serve(tmp_path / "service.toml", None, {"port": 0}, role)


@pytest.mark.parametrize("url", ["http://secret", "redis://h:secret/w@h", "redis://h?secret=1"])
def test_an_address_of_redis_that_cannot_be_used_is_refused(url):
    with pytest.raises(ConfigError, match="redis_url") as error:
        Service(settings_of(fake(), redis_url=url), workers=False)
    assert "secret" not in str(error.value)


def test_settings_of_redis_reach_its_connection():
    settings = settings_of(fake(), redis_host="redis.internal", redis_port=7000, redis_password="p")
    queue = Service(settings, workers=False).backend
    assert isinstance(queue, RedisBackend)
    given = queue._client.connection_pool.connection_kwargs
    assert (given["host"], given["port"], given["password"]) == ("redis.internal", 7000, "p")
