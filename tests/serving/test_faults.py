"""What may go wrong on several machines, with real processes: nothing accepted is lost, or answered wrongly.

The fake reward scores the length of a prompt, and no two prompts are equally long: a result in another's place shows.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx2 as httpx
import numpy as np
import pytest

from tests.serving.hosts import Host, ask, hosts, score_of, scored_batches, until
from tests.serving.sent_media import npy
from tests.serving.services import Gate, eventually, in_loop

SILENCE = 5.0  # of tests that wait for its end; a worker says each second that it lives


def prompts(count: int) -> list[str]:
    return ["x" * length for length in range(1, count + 1)]


async def scores(client: httpx.AsyncClient, url: str, asked: Sequence[str]) -> list[float]:
    return [score_of(answer) for answer in await asyncio.gather(*(ask(client, url, prompt) for prompt in asked))]


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=300)


@asynccontextmanager
async def held_up(
    http: httpx.AsyncClient, api: Host, gate: Gate, count: int
) -> AsyncGenerator[Callable[[], Awaitable[None]]]:
    """So many prompts are asked for, with a worker at the gate; what this yields opens it and checks the scores."""
    first = asyncio.create_task(ask(http, api.url, gate.prompt))
    await gate.reached()
    asking = asyncio.create_task(scores(http, api.url, prompts(count)))

    async def scored() -> None:
        gate.open()
        assert score_of(await first) == len(gate.prompt)
        assert await asking == [float(length) for length in range(1, count + 1)]

    yield scored


async def waiting(http: httpx.AsyncClient, api: Host, jobs: int) -> None:
    """Until so many jobs wait for a worker."""
    line = f'vlmrm_queue_jobs{{reward="length"}} {jobs}.0'

    async def says() -> bool:
        return line in (await http.get(api.url + "/metrics")).text

    await eventually(says, lambda: f"{line} was never in /metrics")


async def said(host: Host, what: str) -> None:
    await asyncio.to_thread(until, lambda: what in host.said.read_text(), lambda: host.said.read_text())


def who_waits(gate: Gate, running: Sequence[Host]) -> Host:
    [host] = [one for one in running if one.role == "workers" and one.worker == gate.worker]
    return host


def assert_once(folder: Path) -> None:
    computed = [prompt for batch in scored_batches(folder) for prompt in batch]
    assert len(computed) == len(set(computed)), "an accepted request was computed twice"


FEW = {"batch_tokens": 4}  # of many prompts, so that they are many batches


@in_loop
async def test_a_worker_host_is_killed_in_a_batch(tmp_path, redis_server):
    gate, roles = Gate(tmp_path), ("api", "workers", "workers")
    with hosts(tmp_path, *roles, settings=redis_server.settings, silence=SILENCE, **FEW) as running:
        async with client() as http, held_up(http, running[0], gate, 24) as scored:
            who_waits(gate, running).kill()
            await scored()


@in_loop
async def test_a_worker_host_stalls_and_goes_on(tmp_path, redis_server):
    gate, roles = Gate(tmp_path), ("api", "workers", "workers")
    with hosts(tmp_path, *roles, settings=redis_server.settings, silence=SILENCE, **FEW) as running:
        async with client() as http, held_up(http, running[0], gate, 24) as scored:
            stalled = who_waits(gate, running)
            stalled.stop()  # with what it has; the other host gets it after the silence
            await scored()
            stalled.go_on()  # and now says what it had computed
            await asyncio.to_thread(stalled.until_ready)
            assert await scores(http, running[0].url, prompts(26)) == [float(length) for length in range(1, 27)]


@pytest.mark.parametrize("who", ["worker", "service"])
@in_loop
async def test_a_service_without_redis_stalls_and_goes_on(tmp_path, who):
    gate = Gate(tmp_path)
    with hosts(tmp_path, "", settings={}, silence=SILENCE, **FEW) as [service]:
        worker = service.worker
        stalled = worker if who == "worker" else service.process.pid
        async with client() as http, held_up(http, service, gate, 24) as scored:
            os.kill(stalled, signal.SIGSTOP)
            # The stall of a service has no other sign than its length.
            await (said(service, "was silent for") if who == "worker" else asyncio.sleep(SILENCE + 1))
            with suppress(ProcessLookupError):  # a worker that was silent was killed
                os.kill(stalled, signal.SIGCONT)
            await scored()
        assert (service.worker == worker) is (who == "service")


@in_loop
async def test_the_api_process_stalls_while_workers_go_on(tmp_path, redis_server):
    gate = Gate(tmp_path)
    with hosts(tmp_path, "api", "workers", settings=redis_server.settings, **FEW) as (api, _):
        async with client() as http, held_up(http, api, gate, 24) as scored:
            await waiting(http, api, 24)
            api.stop()
            gate.open()
            await asyncio.to_thread(until, lambda: sum(map(len, scored_batches(tmp_path))) == 25)
            api.go_on()
            await scored()
    assert_once(tmp_path)


@in_loop
async def test_a_killed_api_process_leaves_results_to_another(tmp_path, redis_server):
    gate, roles = Gate(tmp_path), ("api", "api", "workers")
    with hosts(tmp_path, *roles, settings=redis_server.settings) as (api, other, _):
        async with client() as http, held_up(http, api, gate, 8) as scored:
            await waiting(http, api, 8)
            api.kill()
            gate.open()
            assert score_of(await ask(http, other.url, "x")) == 1.0
            api.start()
            await scored()
    assert_once(tmp_path)


@in_loop
async def test_a_polling_client_gets_results_after_a_restart(tmp_path, redis_server):
    gate = Gate(tmp_path)
    asked = {"prompts": [gate.prompt, "bb"], "reward_fn": {"length": 1.0}, "media_type": "image"}
    with hosts(tmp_path, "api", "workers", settings=redis_server.settings) as (api, _):
        async with client() as http:
            body = json.dumps(asked).encode() + b"\n" + npy(np.zeros((2, 5, 4, 3), dtype=np.uint8))
            ticket = (await http.post(api.url + "/api/reward/enqueue", content=body)).json()["uuid"]
            api.kill()
            api.start()
            await asyncio.to_thread(api.until_ready)
            gate.open()
            pull = {"uuid": ticket, "type": "length"}
            while (pulled := await http.post(api.url + "/api/reward/pull", data=pull)).status_code == 425:
                pass
            assert pulled.json()["scores"] == {"length": [len(gate.prompt), 2.0]}


async def without_queue(http: httpx.AsyncClient, api: Host) -> None:
    """Until the process says that its queue cannot be reached."""

    async def says() -> bool:
        ready = await http.get(api.url + "/ready")
        return ready.status_code == 503 and "the queue cannot be reached" in ready.json()["queue"]

    await eventually(says)


@in_loop
async def test_redis_is_killed_and_comes_back(tmp_path, start_redis):
    server, gate = start_redis(), Gate(tmp_path)
    with hosts(tmp_path, "api", "workers", settings=server.settings, **FEW) as (api, _):
        async with client() as http, held_up(http, api, gate, 24) as scored:
            await waiting(http, api, 24)
            server.kill()
            assert (await http.get(api.url + "/health")).status_code == 200
            refused = await http.post(api.url + "/v1/rewards", json={"items": [{"prompt": "away"}]})
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            await without_queue(http, api)
            server.start()
            await scored()


@in_loop
async def test_redis_stalls(tmp_path, start_redis):
    server, gate = start_redis(), Gate(tmp_path)
    with hosts(tmp_path, "api", "workers", settings=server.settings, silence=SILENCE, **FEW) as (api, _):
        async with client() as http, held_up(http, api, gate, 12) as scored:
            await waiting(http, api, 12)
            server.signal(signal.SIGSTOP)
            await without_queue(http, api)
            server.signal(signal.SIGCONT)
            await scored()


@in_loop
async def test_a_leaving_client_withdraws_only_unshared_requests(tmp_path, redis_server):
    gate, settings, redis = Gate(tmp_path), redis_server.settings, redis_server.client()
    with hosts(tmp_path, "api", "workers", settings=settings, batch_tokens=1) as (api, _):
        async with client() as http, client() as leaving:
            busy = asyncio.create_task(ask(http, api.url, gate.prompt))
            await gate.reached()
            going = [asyncio.create_task(ask(leaving, api.url, prompt)) for prompt in ("shared", "alone")]
            await waiting(http, api, 2)
            staying = asyncio.create_task(ask(http, api.url, "shared"))
            jobs = redis.keys(f"{settings['redis_prefix']}:job:*")
            await eventually(lambda: b"2" in [redis.hget(job, "asked") for job in jobs])
            for one in going:
                one.cancel()
            await waiting(http, api, 1)
            gate.open()
            assert [score_of(await one) for one in (busy, staying)] == [len(gate.prompt), 6]
    assert scored_batches(tmp_path) == [[gate.prompt], ["shared"]]


@in_loop
async def test_a_stopping_worker_host_finishes_what_it_began(tmp_path, redis_server):
    gate, roles = Gate(tmp_path), ("api", "workers", "workers")
    with hosts(tmp_path, *roles, settings=redis_server.settings, **FEW) as running:
        async with client() as http, held_up(http, running[0], gate, 24) as scored:
            leaving = who_waits(gate, running)
            leaving.process.send_signal(signal.SIGTERM)
            await said(leaving, "Stopping")
            await scored()
            assert await asyncio.to_thread(leaving.process.wait, 300) in (0, -signal.SIGTERM)
    assert_once(tmp_path)
