"""Every sentence that `MemoryBackend` says, of each backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.redis_server import RedisServer
from tests.serving.services import fake, in_loop, settings_of
from vlmrm.conversation import Outcome
from vlmrm.serving import backend as serving_backend
from vlmrm.serving import memory_backend, redis_backend
from vlmrm.serving.backend import Job, Overloaded, State, queues
from vlmrm.serving.service import make_backend
from vlmrm.serving.worker.channel import unpack

if TYPE_CHECKING:
    from vlmrm.serving.backend import Backend

Backends = Callable[..., AbstractAsyncContextManager["Backend"]]


@pytest.fixture(params=["memory", "redis"])
def server(request) -> RedisServer | None:
    return request.getfixturevalue("redis_server") if request.param == "redis" else None


@pytest.fixture(autouse=True)
def _looks_at_nothing_twice(monkeypatch) -> None:
    """Who waits for something in Redis is woken, or not at all."""
    monkeypatch.setattr(redis_backend, "POLL_S", 600.0)


@pytest.fixture
def elapse(server, monkeypatch) -> Callable[[float], None]:
    """Has so many seconds go by for what is kept for a time; in Redis, what is kept is that much nearer its end."""
    clock = SimpleNamespace(time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr(memory_backend, "time", clock)

    def go_by(seconds: float) -> None:
        past = clock.monotonic
        clock.monotonic = lambda: past() + seconds
        if server is not None:
            client = server.client()
            for key in client.scan_iter():
                if (left := client.pttl(key)) >= 0:
                    client.pexpire(key, left - round(1000 * seconds))

    return go_by


@pytest.fixture
def backends(server) -> Backends:
    """Makes a backend with the rewards, by default `length` and `other`, and limits that it is given."""

    @asynccontextmanager
    async def made(*rewards: dict[str, Any], **limits: Any) -> AsyncGenerator[Backend]:
        settings = {} if server is None else server.settings
        rewards = rewards or (fake(), fake("other"))
        backend = make_backend(settings_of(*rewards, **settings, limits=limits))
        await backend.start()
        try:
            yield backend
        finally:
            await backend.stop()

    return made


def job(prompt: str = "a", reward: str = "length", **settings: Any) -> Job:
    return Job.of(reward, [{"prompt": prompt}], **{"revisions": ["r1"], **settings})


async def put_all(backend: Backend, *named: str, **settings: Any) -> list[str]:
    return [await backend.put(job(prompt, **settings)) for prompt in named]


async def batches(backend: Backend, budget: int, count: int) -> list[list[str]]:
    return [prompts(await backend.take("length", budget)) for _ in range(count)]


def prompts(jobs: list[Job]) -> list[str]:
    return [item["prompt"] for one in jobs for item in unpack(one.packed)["items"]]


async def is_waiting(task: asyncio.Task[Any]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=0.05)
    return not done


@in_loop
async def test_a_job_goes_from_queued_to_done(backends):
    async with backends() as backend:
        origin = {"prefixes": {"é": 5}, "client": "one", "request_id": "two", "wanted": "r1"}
        given = Job.of("length", [{"prompt": "a", "image": b"\xff"}, {"prompt": "b"}], cost=7, priority=3, **origin)
        assert await backend.put(given) == given.id
        assert (await backend.status(given.id)).state is State.queued
        [taken] = await backend.take("length", 1000)
        for name in ("id", "reward", "packed", "count", "cost", "priority", "attempts", "size", "key", *origin):
            assert getattr(taken, name) == getattr(given, name), name
        assert (await backend.status(given.id)).state is State.running
        await backend.finish(taken, [Outcome(1.5, extra={"why": "ü"}), Outcome(error="no")], 0.25, "r1")
        status = await backend.status(given.id)
        assert (status.state, status.seconds, status.revision) == (State.done, 0.25, "r1")
        assert status.outcomes == [Outcome(1.5, extra={"why": "ü"}), Outcome(error="no")]
        assert await backend.status(given.id) == status  # as often as one likes


@in_loop
async def test_an_equal_job_shares_results_unless_it_failed(backends):
    async with backends() as backend:
        first = await backend.put(job("a"))
        assert await backend.put(job("a")) == first
        assert await backend.put(job("a", reward="other")) != first
        [taken] = await backend.take("length", 1000)
        assert await backend.put(job("a")) == first
        await backend.finish(taken, [Outcome(1.0)], 0.1, "r1")
        assert await backend.put(job("a")) == first

        failed = await backend.put(job("b"))
        await backend.fail((await backend.take("length", 1000))[0], "it broke")
        status = await backend.status(failed)
        assert (status.state, status.error) == (State.failed, "it broke")
        assert await backend.put(job("b")) != failed


@in_loop
async def test_a_result_is_shared_only_for_its_revision(backends):
    async with backends() as backend:
        first = await backend.put(job("a"))
        await backend.finish((await backend.take("length", 1000))[0], [Outcome(1.0)], 0.1, "r1")
        assert await backend.put(job("a", revisions=["r0", "r1"])) == first
        second = await backend.put(job("a", revisions=["r2"]))
        assert second != first
        await backend.finish((await backend.take("length", 1000))[0], [Outcome(2.0)], 0.1, "r2")
        statuses = [await backend.status(job_id) for job_id in (first, second)]
        assert [(one.revision, one.outcomes[0].score) for one in statuses] == [("r1", 1.0), ("r2", 2.0)]


@in_loop
async def test_the_queue_is_bounded_in_items_and_bytes(backends):
    async with backends(queue_items=3) as backend:
        await backend.put(Job.of("length", [{"prompt": "a"}, {"prompt": "b"}], slow=True))
        with pytest.raises(Overloaded, match="the queue of length is full, with 2 items") as refused:
            await backend.put(Job.of("length", [{"prompt": "c"}, {"prompt": "d"}]))
        assert refused.value.retry_after >= 1
        await backend.put(job("c"))
        assert len(await backend.take(queues("length")[1], 1000)) == 1  # what runs does not wait
        await backend.put(Job.of("length", [{"prompt": "c"}, {"prompt": "d"}]))
    large = job("a" * 1000, reward="other")
    async with backends(queue_bytes=2 * large.size + 10) as backend:
        await backend.put(large)
        with pytest.raises(Overloaded, match="the queue of other is full"):
            await backend.put(job("b", reward="other"))
        await backend.put(job("b"))  # another reward has room of its own
    async with backends(fake(), queue_bytes=2 * large.size) as backend:
        await backend.put(large)  # for another service
        with pytest.raises(Overloaded, match="the queue of length is full"):  # but not beyond that of all
            await backend.put(job("b" * 1100))


@in_loop
async def test_take_waits_for_a_job(backends):
    async with backends() as backend:
        taking = asyncio.create_task(backend.take("length", 1000))
        await backend.put(job(reward="other"))
        assert await is_waiting(taking)
        await backend.put(job("a"))
        assert prompts(await taking) == ["a"]


@in_loop
async def test_take_fills_the_budget_with_at_least_one(backends):
    async with backends() as backend:
        for prompt, cost in (("a", 9), ("b", 2), ("c", 2), ("d", 2)):
            await backend.put(job(prompt, cost=cost))
        assert await batches(backend, 4, 3) == [["a"], ["b", "c"], ["d"]]


@in_loop
async def test_the_higher_priority_goes_first_then_the_earlier(backends):
    async with backends() as backend:
        for prompt, priority in (("a", 0), ("b", -7), ("c", 100), ("d", 0), ("e", 100)):
            await backend.put(job(prompt, priority=priority))
        assert prompts(await backend.take("length", 1000)) == ["c", "e", "a", "d", "b"]


@in_loop
async def test_a_lower_priority_waits_but_not_for_ever(backends, monkeypatch):
    async with backends() as backend:
        await put_all(backend, "high 0", "high 1", priority=100, client="one")
        await put_all(backend, "low", client="two")
        assert prompts(await backend.take("length", 1)) == ["high 0"]
        monkeypatch.setattr(serving_backend, "AGING_S", 0.0)
        assert prompts(await backend.take("length", 1)) == ["low"]


@pytest.mark.parametrize(("cost", "weight"), [(5, 1.0), (10, 2.0)])
@in_loop
async def test_clients_share_tokens_by_weight(backends, cost, weight):
    async with backends() as backend:
        await put_all(backend, *(f"a{number}" for number in range(9)), client="a", cost=10)
        assert await batches(backend, 5, 3) == [["a0"], ["a1"], ["a2"]]
        await put_all(backend, *(f"b{number}" for number in range(9)), client="b", cost=cost, weight=weight)
        # What it did not ask for earlier is not made up for.
        assert await batches(backend, 5, 6) == [["b0"], ["b1"], ["a3"], ["b2"], ["b3"], ["a4"]]
        await put_all(backend, "late", client="c", cost=10)
        assert sorted(await batches(backend, 5, 2)) == [["b4"], ["late"]]


@in_loop
async def test_a_client_that_pauses_keeps_its_debt(backends):
    async with backends() as backend:
        await put_all(backend, "a0", client="a", cost=30)
        await put_all(backend, "b0", "b1", "b2", client="b", cost=10)
        assert await batches(backend, 5, 2) == [["a0"], ["b0"]]
        await put_all(backend, "a1", client="a", cost=30)
        assert await batches(backend, 5, 3) == [["b1"], ["b2"], ["a1"]]


@in_loop
async def test_mates_of_a_prompt_come_along(backends):
    async with backends() as backend:
        for prompt in ("a0", "b0", "a1", "b1", "c0", "e0", "d0", "d1"):
            await backend.put(job(prompt, cost=5, prefixes={prompt[0]: 4}))
        assert await batches(backend, 6, 2) == [["a0", "a1"], ["b0", "b1"]]  # a prompt costs once
        assert prompts(await backend.take("length", 12, {"d"})) == ["c0", "d0", "d1"]  # what the worker has computed


@in_loop
async def test_a_worker_killing_job_retries_alone_then_fails(backends):
    async with backends() as backend:
        bad = await backend.put(job("bad"))
        await put_all(backend, *"ab")
        await backend.requeue(await backend.take("length", 1), "the worker died")
        alone = await backend.take("length", 1000)
        assert prompts(alone) == ["bad"] and alone[0].attempts == 1
        others = await backend.take("length", 1000)
        assert prompts(others) == ["a", "b"]
        await backend.requeue(alone, "the worker died")
        status = await backend.status(bad)
        assert status.state is State.failed
        assert status.error == "the worker died, for the second time with this request: it is not tried again"


@in_loop
async def test_a_job_past_its_deadline_fails_without_starting(backends):
    async with backends() as backend:
        late = await backend.put(job("late", deadline=time.monotonic() - 1))
        extended = await backend.put(job("extended", deadline=time.monotonic() - 1))
        assert await backend.put(job("extended", deadline=time.monotonic() + 600)) == extended
        assert prompts(await backend.take("length", 1000)) == ["extended"]
        status = await backend.status(late)
        assert (status.state, status.error) == (State.failed, "its deadline had passed before it was begun")


@in_loop
async def test_status_forgets_after_the_time_to_live(backends, elapse):
    async with backends(result_ttl=600) as backend:
        assert await backend.status("never") is None
        first = await backend.put(job("a"))
        [taken] = await backend.take("length", 1000)
        elapse(601)
        assert (await backend.status(first)).state is State.running  # it is not over
        await backend.finish(taken, [Outcome(1.0)], 0.1, "r1")
        elapse(400)
        assert await backend.put(job("a")) == first  # which has it kept for as long again
        elapse(400)
        assert (await backend.status(first)).state is State.done
        elapse(601)
        assert await backend.status(first) is None
        assert await backend.put(job("a")) != first


@in_loop
async def test_wait_ends_with_the_job_or_the_time(backends):
    async with backends() as backend:
        assert await backend.wait("never", 600) is None
        first = await backend.put(job("a"))
        assert (await backend.wait(first, 0.05)).state is State.queued
        waiting = [asyncio.create_task(backend.wait(first, 600)) for _ in range(2)]
        [taken] = await backend.take("length", 1000)
        assert await is_waiting(waiting[0])
        await backend.finish(taken, [Outcome(1.0)], 0.1, "r1")
        assert [status.outcomes for status in await asyncio.gather(*waiting)] == [[Outcome(1.0)]] * 2
        assert (await backend.wait(first, 600)).state is State.done


@in_loop
async def test_cancel_ends_what_waits_once_nobody_wants_it(backends):
    async with backends() as backend:
        shared = await backend.put(job("a"))
        await backend.put(job("a"))
        assert not await backend.cancel(shared)
        assert (await backend.status(shared)).state is State.queued
        waiting = asyncio.create_task(backend.wait(shared, 600))
        assert await backend.cancel(shared)
        assert (await waiting).state is State.cancelled
        assert await backend.put(job("a")) != shared

        [running] = await backend.take("length", 1000)
        assert not await backend.cancel(running.id)
        assert not await backend.cancel("never")
        assert (await backend.status(running.id)).state is State.running
        await backend.requeue([running], None)
        assert (await backend.status(running.id)).state is State.cancelled


@in_loop
async def test_a_taking_that_nobody_waits_for_loses_nothing(backends):
    async with backends() as backend:
        taking = asyncio.create_task(backend.take("length", 1000))
        assert await is_waiting(taking)
        putting = asyncio.create_task(backend.put(job("a")))
        await asyncio.sleep(0)
        taking.cancel()
        await putting
        assert prompts(await backend.take("length", 1000)) == ["a"]


@in_loop
async def test_a_record_is_kept_for_its_time(backends, elapse):
    async with backends() as backend:
        assert await backend.load_record("a") is None
        await backend.save_record("a", {"jobs": {"ü": "1"}}, 600)
        await backend.save_record("b", {}, 600)
        elapse(400)
        await backend.save_record("a", {"jobs": {"ü": "2"}}, 600)
        assert await backend.load_record("b") == {}
        elapse(400)
        assert await backend.load_record("b") is None
        assert await backend.load_record("a") == {"jobs": {"ü": "2"}}
