"""Every sentence that `Backend` says, of each backend."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from redis_server import RedisServer
from services import fake, in_loop, settings_of

from vlmrm.conversation import Outcome
from vlmrm.serving import backend as serving_backend
from vlmrm.serving import memory_backend, redis_backend
from vlmrm.serving.backend import Backend, Job, Overloaded, State
from vlmrm.serving.memory_backend import MemoryBackend
from vlmrm.serving.service import make_backend
from vlmrm.serving.settings import Limits

Backends = Callable[..., AbstractAsyncContextManager[Backend]]


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
    return Job(reward, [{"prompt": prompt}], **{"revisions": ["r1"], **settings})


async def put_all(backend: Backend, *named: str, **settings: Any) -> list[str]:
    return [await backend.put(job(prompt, **settings)) for prompt in named]


async def batches(backend: Backend, budget: int, count: int) -> list[list[str]]:
    return [prompts(await backend.take("length", budget)) for _ in range(count)]


def prompts(jobs: list[Job]) -> list[str]:
    return [item["prompt"] for one in jobs for item in one.items]


async def is_waiting(task: asyncio.Task[Any]) -> bool:
    done, _ = await asyncio.wait({task}, timeout=0.05)
    return not done


@in_loop
async def test_a_job_goes_from_queued_over_running_to_done(backends):
    async with backends() as backend:
        given = Job("length", [{"prompt": "a", "image": {"bytes": b"\x00\xff"}}, {"prompt": "b"}], cost=7, priority=3)
        given.prefixes, given.client, given.request_id, given.wanted = {"é": 5}, "one", "two", "r1"
        given.trace = "00-1-2-01"
        assert await backend.put(given) == given.id
        assert (await backend.status(given.id)).state is State.queued
        [taken] = await backend.take("length", 1000)
        origin = ("prefixes", "client", "request_id", "wanted", "trace")
        for name in ("id", "reward", "items", "cost", "priority", "attempts", "size", "key", *origin):
            assert getattr(taken, name) == getattr(given, name), name
        assert (await backend.status(given.id)).state is State.running
        await backend.finish(taken, [Outcome(1.5, extra={"why": "ü"}), Outcome(error="no")], 0.25, "r1")
        status = await backend.status(given.id)
        assert (status.state, status.seconds, status.revision) == (State.done, 0.25, "r1")
        assert status.outcomes == [Outcome(1.5, extra={"why": "ü"}), Outcome(error="no")]
        assert await backend.status(given.id) == status  # as often as one likes


@in_loop
async def test_an_equal_job_shares_the_result_unless_it_failed(backends):
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
async def test_a_result_is_shared_with_those_who_ask_for_its_revision_alone(backends):
    async with backends() as backend:
        first = await backend.put(job("a"))
        await backend.finish((await backend.take("length", 1000))[0], [Outcome(1.0)], 0.1, "r1")
        assert await backend.put(job("a", revisions=["r0", "r1"])) == first
        second = await backend.put(job("a", revisions=["r2"]))
        assert second != first
        assert await backend.put(job("a", revisions=[])) == second  # whoever computes it now
        await backend.finish((await backend.take("length", 1000))[0], [Outcome(2.0)], 0.1, "r2")
        assert await backend.put(job("a", revisions=["r2"])) == second
        statuses = [await backend.status(job_id) for job_id in (first, second)]
        assert [(one.revision, one.outcomes) for one in statuses] == [
            ("r1", [Outcome(1.0)]),
            ("r2", [Outcome(2.0)]),
        ]
        third = await backend.put(job("a", revisions=[]))  # of which nobody knows who would compute it
        assert third not in (first, second)


@in_loop
async def test_a_result_with_an_error_is_told_to_those_who_asked_and_to_nobody_later(backends):
    async with backends() as backend:
        first = await backend.put(Job("length", [{"prompt": "a"}, {"prompt": "b"}], revisions=["r1"]))
        assert await backend.put(Job("length", [{"prompt": "a"}, {"prompt": "b"}], revisions=["r1"])) == first
        outcomes = [Outcome(1.0), Outcome(error="the judge is busy")]
        await backend.finish((await backend.take("length", 1000))[0], outcomes, 0.1, "r1")
        assert await backend.put(Job("length", [{"prompt": "a"}, {"prompt": "b"}], revisions=["r1"])) != first
        assert (await backend.wait(first, 600)).outcomes == outcomes  # as often as one likes
        assert (await backend.status(first)).outcomes == outcomes


@in_loop
async def test_the_queue_is_bounded_in_items_and_in_bytes(backends):
    async with backends(queue_items=3) as backend:
        await backend.put(Job("length", [{"prompt": "a"}, {"prompt": "b"}]))
        with pytest.raises(Overloaded, match="the queue of length is full, with 2 items") as refused:
            await backend.put(Job("length", [{"prompt": "c"}, {"prompt": "d"}]))
        assert refused.value.retry_after >= 1
        await backend.put(job("c"))
        await backend.take("length", 1000)  # what runs does not wait
        await backend.put(Job("length", [{"prompt": "c"}, {"prompt": "d"}]))
    large = job("a" * 1000, reward="other")
    async with backends(queue_bytes=2 * large.size + 10) as backend:
        await backend.put(large)
        with pytest.raises(Overloaded, match="the queue of other is full"):
            await backend.put(job("b", reward="other"))
        await backend.put(job("b"))  # another reward has room of its own


@in_loop
async def test_all_queues_together_are_bounded_too(backends):
    size = job("a").size
    wide = [fake(name, queue_bytes=3 * size) for name in ("length", "other")]
    async with backends(*wide, queue_bytes=3 * size) as backend:
        await put_all(backend, "a", "b")
        await backend.put(job("a", reward="other"))
        with pytest.raises(Overloaded, match=r"the queue of other is full, with 1 items.* in all queues"):
            await backend.put(job("b", reward="other"))


@in_loop
async def test_depth_counts_what_waits(backends):
    async with backends() as backend:
        jobs = [job("a"), job("bb"), job("ccc", reward="other")]
        for one in jobs:
            await backend.put(one)
        assert await backend.depth("length") == (2, jobs[0].size + jobs[1].size)
        await backend.cancel(jobs[1].id)
        assert await backend.depth("length") == (1, jobs[0].size)
        taken = await backend.take("length", 1000)
        assert await backend.depth("length") == (0, 0)
        await backend.requeue(taken, None)
        assert await backend.depth("length") == (1, jobs[0].size)
        assert await backend.depth("other") == (1, jobs[2].size)


@in_loop
async def test_take_waits_for_a_job(backends):
    async with backends() as backend:
        taking = asyncio.create_task(backend.take("length", 1000))
        await backend.put(job(reward="other"))
        assert await is_waiting(taking)
        await backend.put(job("a"))
        assert prompts(await taking) == ["a"]


@in_loop
async def test_take_ends_at_the_budget_with_at_least_one(backends):
    async with backends() as backend:
        for prompt, cost in (("a", 9), ("b", 2), ("c", 2), ("d", 2)):
            await backend.put(job(prompt, cost=cost))
        assert prompts(await backend.take("length", 4)) == ["a"]
        assert prompts(await backend.take("length", 4)) == ["b", "c"]
        assert prompts(await backend.take("length", 4)) == ["d"]


@in_loop
async def test_the_higher_priority_goes_first_then_the_earlier(backends):
    async with backends() as backend:
        for prompt, priority in (("a", 0), ("b", -7), ("c", 100), ("d", 0), ("e", 100)):
            await backend.put(job(prompt, priority=priority))
        assert prompts(await backend.take("length", 1000)) == ["c", "e", "a", "d", "b"]


@in_loop
async def test_a_lower_priority_waits_long_and_not_for_ever(backends, monkeypatch):
    async with backends() as backend:
        await put_all(backend, *(f"high {number}" for number in range(9)), priority=100, client="one")
        await put_all(backend, "low 0", "low 1", client="two")
        assert prompts(await backend.take("length", 1)) == ["high 0"]
        with monkeypatch.context() as later:
            later.setattr(serving_backend, "AGING_S", 0.0)
            assert prompts(await backend.take("length", 2)) == ["low 0", "low 1"]
            await put_all(backend, "low 2", client="two")
            assert prompts(await backend.take("length", 2)) == ["high 1", "high 2"]  # now these have waited longer
            assert prompts(await backend.take("length", 2)) == ["low 2", "high 3"]
        await put_all(backend, "low 3", client="two")
        assert prompts(await backend.take("length", 2)) == ["high 4", "high 5"]


@in_loop
async def test_clients_have_equal_shares_of_tokens_however_much_they_send(backends):
    async with backends() as backend:
        await put_all(backend, *(f"a{number}" for number in range(9)), client="a", cost=10)
        assert await batches(backend, 10, 3) == [["a0"], ["a1"], ["a2"]]
        await put_all(backend, *(f"b{number}" for number in range(9)), client="b", cost=5)
        # What it did not ask for earlier is not made up for.
        assert await batches(backend, 10, 4) == [["b0", "b1"], ["a3"], ["b2", "b3"], ["a4"]]
        await put_all(backend, "late", client="c", cost=10)
        assert sorted(await batches(backend, 10, 2)) == [["b4"], ["late"]]


@in_loop
async def test_who_comes_again_has_had_what_it_has_had(backends):
    async with backends() as backend:
        await put_all(backend, *(f"a{number}" for number in range(9)), client="a", cost=10)
        await put_all(backend, "large", client="b", cost=35)
        assert await batches(backend, 1, 2) == [["a0"], ["large"]]
        await put_all(backend, "another", client="b")
        assert await batches(backend, 1, 4) == [["a1"], ["a2"], ["a3"], ["another"]]


@in_loop
async def test_a_client_that_cancels_has_lost_nothing(backends):
    async with backends() as backend:
        ids = await put_all(backend, *(f"b{number}" for number in range(5)), client="b", cost=1000)
        await put_all(backend, "a0", "a1", client="a")
        for job_id in ids:
            assert await backend.cancel(job_id)
        await put_all(backend, "c", client="c")
        await put_all(backend, "b", client="b")
        assert sorted(await batches(backend, 1, 3)) == [["a0"], ["b"], ["c"]]


@in_loop
async def test_a_batch_counts_what_its_jobs_share_once(backends):
    async with backends() as backend:
        for prompt in "abcd":
            await backend.put(job(prompt, cost=12, prefixes={"picture": 10}))
        await backend.put(job("other", cost=12, prefixes={"another": 10}))
        assert await batches(backend, 16, 2) == [["a", "b", "c"], ["d"]]  # 12, and 2 for each further one
        assert await batches(backend, 24, 1) == [["other"]]


@in_loop
async def test_those_of_a_prompt_come_together_behind_whose_turn_it_is(backends):
    async with backends() as backend:
        for number in range(9):
            await backend.put(job(f"{number}", cost=12, prefixes={"xyz"[number % 3]: 10}, client=f"{number // 3}"))
        await backend.put(job("urgent", cost=16, prefixes={"x": 10}, priority=1))
        assert await batches(backend, 16, 4) == [["urgent"], ["0", "3", "6"], ["4", "1", "7"], ["8", "2", "5"]]


@in_loop
async def test_what_the_worker_has_computed_lately_comes_behind_whose_turn_it_is(backends):
    async with backends() as backend:
        for prompt, prefix in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "y"), ("e", "x")):
            await backend.put(job(prompt, cost=2, prefixes={prefix: 1}))
        await backend.put(job("low", cost=2, prefixes={"z": 1}, priority=-1))
        assert prompts(await backend.take("length", 6, ["z", "y", "never"])) == ["a", "e", "c"]
        assert prompts(await backend.take("length", 1000, ["z"])) == ["b", "d", "low"]


@in_loop
async def test_who_shares_a_prompt_pays_for_what_it_adds(backends):
    async with backends() as backend:
        await put_all(backend, "a0", "a1", "a2", client="a", cost=12, prefixes={"x": 10})
        await put_all(backend, "b0", "b1", "b2", client="b", cost=4)
        await put_all(backend, "a3", client="a", cost=12, prefixes={"y": 10})
        assert await batches(backend, 16, 1) == [["a0", "a1", "a2"]]  # 16 tokens
        assert await batches(backend, 1, 4) == [["b0"], ["b1"], ["b2"], ["a3"]]


@in_loop
async def test_what_is_given_back_goes_before_others(backends):
    async with backends() as backend:
        for prompt in "abc":
            await backend.put(job(prompt))
        await backend.requeue(await backend.take("length", 1), None)
        assert prompts(await backend.take("length", 1000)) == ["a", "b", "c"]


@in_loop
async def test_a_job_that_a_worker_died_with_comes_alone_and_is_failed_after_the_second_time(backends):
    async with backends() as backend:
        bad = await backend.put(job("bad"))
        for prompt in "ab":
            await backend.put(job(prompt))
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
async def test_a_job_past_its_deadline_is_failed_instead_of_begun(backends):
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
        assert (await backend.status(first)).state is State.done
        elapse(601)
        assert await backend.status(first) is None
        assert await backend.put(job("a")) != first


@in_loop
async def test_a_result_is_kept_for_whoever_asked_for_it_last(backends, elapse):
    async with backends(result_ttl=600) as backend:
        first = await backend.put(job("a"))
        [taken] = await backend.take("length", 1000)
        await backend.finish(taken, [Outcome(1.0)], 0.1, "r1")
        elapse(400)
        assert await backend.put(job("a")) == first
        elapse(400)
        assert (await backend.status(first)).state is State.done


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


@in_loop
async def test_what_nobody_wants_any_more_is_not_begun_again(backends):
    async with backends() as backend:
        for blame in (None, "the worker died"):
            await put_all(backend, "wanted", "left", "asked for again")
            taken = await backend.take("length", 1000)
            for one in taken[1:]:
                assert not await backend.cancel(one.id)
            assert await backend.put(job("asked for again")) == taken[2].id
            await backend.requeue(taken, blame)
            assert (await backend.status(taken[1].id)).state is State.cancelled
            again = await batches(backend, 1, 2)
            assert again == [["wanted"], ["asked for again"]]
            for one in taken:
                await backend.finish(one, [Outcome(1.0)], 0.1, "")


@in_loop
async def test_results_that_somebody_still_wants_are_counted_where_they_go_with_the_process(backends):
    async with backends() as backend:
        counts = []
        for number in (1, 0):
            first = await backend.put(job(str(number)))
            counts.append((await backend.unfetched()).get("length", 0))
            if number:
                [taken] = await backend.take("length", 1000)
                await backend.finish(taken, [Outcome(1.0)], 0.1, "r1")
                counts.append((await backend.unfetched()).get("length", 0))
                await backend.wait(first, 600)
            else:
                await backend.cancel(first)
            counts.append((await backend.unfetched()).get("length", 0))
        await backend.put(job("2"))
        [taken] = await backend.take("length", 1000)
        await backend.cancel(taken.id)  # its client has gone, and it runs on
        counts.append((await backend.unfetched()).get("length", 0))
    assert counts == ([0] * 6 if backend.persistent else [1, 1, 0, 1, 0, 0])


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
async def test_what_processes_say_of_themselves_is_known(backends):
    async with backends() as backend:
        await backend.announce("one", {"rewards": {}}, 600)
        await backend.announce("two", {"rewards": {"length": {"ready": 1}}}, 600)
        await backend.announce("one", {"rewards": {"ü": 1}}, 600)
        both = {"one": {"rewards": {"ü": 1}}, "two": {"rewards": {"length": {"ready": 1}}}}
        assert await backend.announcements() == (both if backend.persistent else {})  # alone there is no other


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


@pytest.mark.parametrize("seed", range(3))
@in_loop
async def test_both_queues_have_one_order(redis_server, monkeypatch, seed):
    """Whatever is put, taken, cancelled and given back."""
    monkeypatch.setattr(serving_backend, "AGING_S", 600.0)
    random, rewards = Random(seed), (fake(), fake("other"))
    queues = [make_backend(settings_of(*rewards, **settings)) for settings in ({}, redis_server.settings)]
    for queue in queues:
        await queue.start()
    running: list[list[list[Job]]] = []
    ids: list[list[str]] = []
    for number in range(300):
        action = random.random()
        if action < 0.5:
            prefixes = dict.fromkeys(random.sample("uvwxyz", random.choice([0, 1, 1, 2])), 5)
            settings = {"cost": random.randint(10, 30), "prefixes": prefixes, "client": random.choice("abc")}
            settings |= {"priority": random.choice([-7, 0, 0, 0, 100]), "reward": random.choice(["length", "other"])}
            ids.append([await queue.put(job(str(number), **settings)) for queue in queues])
        elif action < 0.6 and ids:
            one = random.choice(ids)
            assert len({await queue.cancel(job_id) for queue, job_id in zip(queues, one, strict=True)}) == 1
        elif action < 0.7 and running:
            taken, blame = running.pop(random.randrange(len(running))), random.choice([None, "the worker died"])
            for queue, batch in zip(queues, taken, strict=True):
                await queue.requeue(batch, blame)
        else:
            reward, budget, cached = (
                random.choice(["length", "other"]),
                random.randint(1, 150),
                random.sample("uvw", 2),
            )
            depths = {await queue.depth(reward) for queue in queues}
            assert len(depths) == 1
            if depths.pop()[0]:
                running.append([await queue.take(reward, budget, cached) for queue in queues])
                assert prompts(running[-1][0]) == prompts(running[-1][1])
    for queue in queues:
        await queue.stop()


@in_loop
async def test_the_memory_of_a_process_keeps_the_newest_results_and_records():
    backend = MemoryBackend(Limits(max_results=2))
    ids = [await backend.put(job("x" * number)) for number in range(3)]
    for one in await backend.take("length", 1000):
        await backend.finish(one, [Outcome(1.0)], 0.1, "r1")
    assert [await backend.status(job_id) is None for job_id in ids] == [True, False, False]
    for name in "abc":
        await backend.save_record(name, {}, 60)
    assert [await backend.load_record(name) is None for name in "abc"] == [True, False, False]
