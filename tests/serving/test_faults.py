"""What may go wrong on several machines, with real processes: nothing accepted is lost, or answered wrongly.

The fake reward scores the length of a prompt, and no two prompts are equally long: a result in another's place shows.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest
from hosts import Host, ask, hosts, score_of, scored_batches, until
from services import in_loop

pytestmark = pytest.mark.slow


def prompts(count: int) -> list[str]:
    return ["x" * length for length in range(1, count + 1)]


async def scores(client: httpx.AsyncClient, url: str, asked: Sequence[str]) -> list[float]:
    return [score_of(answer) for answer in await asyncio.gather(*(ask(client, url, prompt) for prompt in asked))]


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None))


async def begun(folder: Path, count: int = 1) -> None:
    """Until workers have begun so many batches."""
    await asyncio.to_thread(until, lambda: len(scored_batches(folder)) >= count)


SLOW = {"batch_tokens": 4, "options": {"seconds": 0.15}}


@in_loop
async def test_a_worker_host_is_killed_in_a_batch(tmp_path, redis_server):
    with hosts(tmp_path, "api", "workers", "workers", settings=redis_server.settings, reward=dict(SLOW)) as running:
        async with client() as http:
            asking = asyncio.create_task(scores(http, running[0].url, prompts(24)))
            await begun(tmp_path, 3)
            running[1].kill()
            assert await asking == [float(length) for length in range(1, 25)]


@in_loop
async def test_a_worker_host_stalls_and_goes_on(tmp_path, redis_server):
    with hosts(tmp_path, "api", "workers", "workers", settings=redis_server.settings, reward=dict(SLOW)) as running:
        async with client() as http:
            asking = asyncio.create_task(scores(http, running[0].url, prompts(24)))
            await begun(tmp_path, 3)
            running[1].stop()  # with what it has; the other host gets it after the silence
            assert await asking == [float(length) for length in range(1, 25)]
            running[1].go_on()  # and now says what it had computed
            await asyncio.to_thread(running[1].until_ready)
            assert await scores(http, running[0].url, prompts(26)) == [float(length) for length in range(1, 27)]


@pytest.mark.parametrize("who", ["worker", "service", "both"])
@in_loop
async def test_a_service_without_redis_stalls_and_goes_on(tmp_path, who):
    with hosts(tmp_path, "", settings={}, reward=dict(SLOW)) as [service]:
        worker = service.worker
        stalled = {"worker": [worker], "service": [service.process.pid], "both": [service.process.pid, worker]}[who]
        async with client() as http:
            asking = asyncio.create_task(scores(http, service.url, prompts(24)))
            await begun(tmp_path, 3)
            for process in stalled:
                os.kill(process, signal.SIGSTOP)
            await asyncio.sleep(2)  # longer than the silence
            for process in stalled:
                with suppress(ProcessLookupError):  # a worker that was silent was killed
                    os.kill(process, signal.SIGCONT)
            assert await asking == [float(length) for length in range(1, 25)]
        if who != "both":  # then it is a matter of who is heard first
            assert (service.worker == worker) is (who == "service")


@in_loop
async def test_the_api_process_stalls_while_workers_go_on(tmp_path, redis_server):
    with hosts(tmp_path, "api", "workers", settings=redis_server.settings, reward=dict(SLOW)) as (api, _):
        async with client() as http:
            asking = asyncio.create_task(scores(http, api.url, prompts(24)))
            await begun(tmp_path, 3)
            api.stop()
            await begun(tmp_path, 10)
            api.go_on()
            assert await asking == [float(length) for length in range(1, 25)]
    computed = [prompt for batch in scored_batches(tmp_path) for prompt in batch]
    assert len(computed) == len(set(computed))


@in_loop
async def test_workers_die_and_hang(tmp_path, redis_server):
    reward = {"batch_timeout": 2.0}  # more than a batch takes on a busy machine
    with hosts(tmp_path, "api", "workers", settings=redis_server.settings, reward=reward) as (api, _):
        async with client() as http:
            asked = ("die", "hang", *prompts(12))
            dead, hung, *good = await asyncio.gather(*(ask(http, api.url, prompt) for prompt in asked))
            once = await ask(http, api.url, f"die once {tmp_path / 'died'}")
    assert "ended by SIGKILL, for the second time with this request" in dead["error"]["message"]
    assert "hung for 2 s, for the second time with this request" in hung["error"]["message"]
    assert score_of(once) == 1.0
    assert [score_of(answer) for answer in good] == [float(length) for length in range(1, 13)]


@in_loop
async def test_the_api_process_is_killed_and_another_has_its_results(tmp_path, redis_server):
    reward = {"options": {"seconds": 0.3}}
    with hosts(tmp_path, "api", "api", "workers", settings=redis_server.settings, reward=reward) as (api, other, _):
        async with client() as http:
            asking = asyncio.create_task(scores(http, api.url, prompts(8)))
            await begun(tmp_path)
            api.kill()
            assert score_of(await ask(http, other.url, "x")) == 1.0
            api.start()
            assert await asking == [float(length) for length in range(1, 9)]
    computed = [prompt for batch in scored_batches(tmp_path) for prompt in batch]
    assert len(computed) == len(set(computed)), "an accepted request was computed twice"


@in_loop
async def test_a_client_that_polls_gets_its_result_from_the_restarted_process(tmp_path, redis_server):
    file = io.BytesIO()
    np.save(file, np.zeros((3, 5, 4, 3), dtype=np.uint8))
    asked = {"prompts": prompts(3), "reward_fn": {"length": 1.0}, "media_type": "image"}
    reward = {"options": {"seconds": 0.3}}
    with hosts(tmp_path, "api", "workers", settings=redis_server.settings, reward=reward) as (api, _):
        async with client() as http:
            body = json.dumps(asked).encode() + b"\n" + file.getvalue()
            ticket = (await http.post(api.url + "/api/reward/enqueue", content=body)).json()["uuid"]
            api.kill()
            api.start()
            await asyncio.to_thread(api.until_ready)
            pulled = await http.post(api.url + "/api/reward/pull", data={"uuid": ticket, "type": "length"}, timeout=30)
            assert pulled.json()["scores"] == {"length": [1.0, 2.0, 3.0]}


@in_loop
async def test_redis_is_killed_and_comes_back(tmp_path, start_redis):
    server = start_redis()
    reward = dict(SLOW)
    with hosts(tmp_path, "api", "workers", settings=server.settings, reward=reward) as (api, _):
        async with client() as http:
            asking = asyncio.create_task(scores(http, api.url, prompts(24)))
            await begun(tmp_path, 2)
            server.kill()
            assert (await http.get(api.url + "/health")).status_code == 200
            refused = await http.post(api.url + "/v1/rewards", json={"items": [{"prompt": "away"}]}, timeout=30)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert "the queue cannot be reached" in refused.json()["error"]["message"]
            ready = await http.get(api.url + "/ready", timeout=30)
            assert ready.status_code == 503 and "the queue cannot be reached" in ready.json()["queue"]
            server.start()
            assert await asking == [float(length) for length in range(1, 25)]


@in_loop
async def test_redis_stalls(tmp_path, start_redis):
    server = start_redis()
    with hosts(tmp_path, "api", "workers", settings=server.settings, reward=dict(SLOW)) as (api, _):
        async with client() as http:
            asking = asyncio.create_task(scores(http, api.url, prompts(12)))
            await begun(tmp_path, 2)
            server.signal(signal.SIGSTOP)
            await asyncio.sleep(2)  # longer than the silence
            server.signal(signal.SIGCONT)
            assert await asking == [float(length) for length in range(1, 13)]


@in_loop
async def test_the_disk_of_redis_is_full_for_a_while(tmp_path, start_redis):
    server = start_redis()
    with hosts(tmp_path, "api", "workers", settings=server.settings, reward=dict(SLOW)) as (api, _):
        async with client() as http:
            asking = asyncio.create_task(scores(http, api.url, prompts(12)))
            await begun(tmp_path, 2)
            unlimited = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            redis = server.client()
            await asyncio.to_thread(until, lambda: redis.info("persistence")["aof_last_write_status"] == "err")
            refused = await http.post(api.url + "/v1/rewards", json={"items": [{"prompt": "full"}]}, timeout=30)
            assert refused.status_code == 503
            assert "the queue cannot be reached (it answers MISCONF)" in refused.json()["error"]["message"]
            resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, unlimited)
            assert await asking == [float(length) for length in range(1, 13)]


@in_loop
async def test_the_disk_of_the_log_is_full(tmp_path, redis_server):
    with hosts(tmp_path, "api", "workers", settings=redis_server.settings, reward={"options": {}}) as running:
        for host in running:
            resource.prlimit(host.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        async with client() as http:
            assert await scores(http, running[0].url, prompts(4)) == [1, 2, 3, 4]


@in_loop
async def test_a_client_that_goes_takes_its_request_along_unless_another_wants_it(tmp_path, redis_server):
    reward = {"batch_tokens": 1, "options": {"seconds": 0.6}}
    with hosts(tmp_path, "api", "workers", settings=redis_server.settings, reward=reward) as (api, _):
        async with client() as http, client() as leaving:
            busy = asyncio.create_task(ask(http, api.url, "busy"))
            await begun(tmp_path)
            going = [asyncio.create_task(ask(leaving, api.url, prompt)) for prompt in ("shared", "alone")]
            staying = asyncio.create_task(ask(http, api.url, "shared"))
            await _waiting(http, api, 2)
            for one in going:
                one.cancel()
            await _waiting(http, api, 1)
            assert [score_of(await one) for one in (busy, staying)] == [4, 6]
    assert scored_batches(tmp_path) == [["busy"], ["shared"]]


async def _waiting(http: httpx.AsyncClient, api: Host, jobs: int) -> None:
    line = f'vlmrm_queue_jobs{{reward="length"}} {jobs}.0'
    while line not in (await http.get(api.url + "/metrics")).text:
        await asyncio.sleep(0.01)


@in_loop
async def test_what_is_begun_is_finished_when_a_worker_host_is_told_to_stop(tmp_path, redis_server):
    with hosts(tmp_path, "api", "workers", "workers", settings=redis_server.settings, reward=dict(SLOW)) as running:
        async with client() as http:
            asking = asyncio.create_task(scores(http, running[0].url, prompts(24)))
            await begun(tmp_path, 3)
            running[1].process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(running[1].process.wait, 20) in (0, -signal.SIGTERM)
            assert await asking == [float(length) for length in range(1, 25)]
    computed = [prompt for batch in scored_batches(tmp_path) for prompt in batch]
    assert len(computed) == len(set(computed))
