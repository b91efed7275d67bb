"""Which jobs a worker is given together: a group whose candidates come one after another; and who does not wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from services import eventually, in_loop

from vlmrm.conversation import Outcome
from vlmrm.formats.wire import Item
from vlmrm.serving import replica
from vlmrm.serving.backend import Job
from vlmrm.serving.media import count_prefixes, estimate_tokens
from vlmrm.serving.memory_backend import MemoryBackend
from vlmrm.serving.replica import Replica
from vlmrm.serving.settings import Limits
from vlmrm.serving.telemetry import Metrics
from vlmrm.serving.worker_spec import WorkerSpec


class Worker:
    """Remembers the prompts of each batch."""

    def __init__(self):
        self.died = asyncio.get_running_loop().create_future()
        self.batches, self.computed = [], {}

    async def score(self, items, timeout, requests, begun):
        self.batches.append([item["prompt"] for item in items])
        return [Outcome(1.0) for _ in items], 0.0, 0.0


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch):
    """Nothing here may depend on how fast the machine is."""
    monkeypatch.setattr(replica, "QUIET_S", 600.0)
    monkeypatch.setattr(replica, "GATHERING_S", 600.0)


def fed(budget):
    return Replica("length", WorkerSpec("fake.Length", budget=budget), MemoryBackend(Limits()), Metrics()), Worker()


def job(prompt, cost=1, **settings):
    return Job("length", [{"prompt": prompt}], cost=cost, **settings)


@in_loop
async def test_candidates_that_come_one_after_another_are_one_batch():
    one, worker = fed(budget=3)
    batch = asyncio.create_task(one._run_batch(worker))
    for prompt in "abc":
        await one.backend.put(job(prompt))
        await asyncio.sleep(0)
    await batch
    assert worker.batches == [["a", "b", "c"]]


@in_loop
async def test_candidates_of_one_prompt_fill_a_batch_by_what_each_adds():
    one, worker = fed(budget=16)
    batch = asyncio.create_task(one._run_batch(worker))
    for prompt in "abcd":
        await one.backend.put(job(prompt, cost=12, prefixes={"picture": 10}))
        await asyncio.sleep(0)
    await batch
    assert worker.batches == [["a", "b", "c"]]


@in_loop
async def test_who_was_given_a_prompt_is_given_its_further_answers_first():
    one, worker = fed(budget=4)
    for prompt, prefix in (("a", "x"), ("b", "y"), ("c", "z"), ("d", "x")):
        await one.backend.put(job(prompt, cost=4 if prompt == "a" else 2, prefixes={prefix: 0}, created=0.0))
        if prompt == "a":
            await one._run_batch(worker)
    await one._run_batch(worker)
    assert worker.batches == [["a"], ["b", "d"]]


@in_loop
async def test_a_job_goes_to_the_idle_worker_that_has_its_prompt():
    queue = MemoryBackend(Limits())
    idle = {name: asyncio.create_task(queue.take("length", 100, [name])) for name in ("x", "y", "z")}
    await asyncio.sleep(0)
    await queue.put(job("a", prefixes={"z": 1}))
    assert [one.items[0]["prompt"] for one in await idle.pop("z")] == ["a"]
    assert not any(task.done() for task in idle.values())
    await queue.put(job("b", prefixes={"y": 1}))
    idle["y"].cancel()  # it is woken and leaves before it takes anything
    assert [one.items[0]["prompt"] for one in await idle["x"]] == ["b"]
    unknown = asyncio.create_task(queue.take("length", 100, ["x"]))
    await asyncio.sleep(0)
    await queue.put(job("c", prefixes={"nobody's": 1}))
    assert [one.items[0]["prompt"] for one in await unknown] == ["c"]


@in_loop
async def test_who_asks_for_one_thing_at_a_time_does_not_wait():
    one, worker = fed(budget=1)
    for number in range(replica.RECENT):
        await one.backend.put(job(str(number)))
        await one._run_batch(worker)
    one.spec.budget = 1000
    await one.backend.put(job("alone"))
    await one._run_batch(worker)
    assert worker.batches[-1] == ["alone"]


@in_loop
async def test_a_backlog_is_not_waited_for():
    one, worker = fed(budget=1000)
    await one.backend.put(job("old", created=0.0))
    await one._run_batch(worker)
    assert worker.batches == [["old"]]


@pytest.mark.parametrize("late", [{"cost": 3}, {"attempts": 1}], ids=["over the budget", "a worker died with it"])
@in_loop
async def test_what_must_not_join_a_batch_is_the_next_one(late):
    one, worker = fed(budget=3)
    batch = asyncio.create_task(one._run_batch(worker))
    await one.backend.put(job("a"))
    await asyncio.sleep(0)
    await one.backend.put(job("late", **late))
    await batch
    await one._run_batch(worker)
    assert worker.batches == [["a"], ["late"]]


async def nothing_waits(one: Replica) -> None:
    async def empty() -> bool:
        return await one.backend.depth("length") == (0, 0)

    await eventually(empty)


@in_loop
async def test_what_was_gathered_goes_back_when_the_service_stops():
    one, worker = fed(budget=3)
    batch = asyncio.create_task(one._run_batch(worker))
    for prompt in "ab":
        await one.backend.put(job(prompt))
        await eventually(lambda: one.busy)
        await nothing_waits(one)
    batch.cancel()
    await asyncio.wait({batch})
    assert worker.batches == []
    assert [taken.items[0]["prompt"] for taken in await one.backend.take("length", 1000)] == ["a", "b"]


def test_a_picture_costs_its_tokens_however_well_it_is_compressed(picture_files):
    for data in picture_files:
        assert estimate_tokens({"image": {"bytes": data}}) == 57 * 57 + 1
        assert estimate_tokens({"image": {"bytes": data}}, max_pixels=28 * 28 * 100) == 101


def asked(answer: str, picture: bytes, **part: Any) -> Item:
    content = [{"type": "image", "image": {"bytes": picture}, **part}, {"type": "text", "text": "What is it?"}]
    answers = [{"type": "text", "text": answer}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answers}]}


def test_a_prompt_costs_its_tokens_once_however_many_answers_it_has(picture_files):
    one, other = picture_files
    alone, [(prompt, tokens)] = priced(asked("a" * 400, one))
    assert tokens > 57 * 57 and alone == estimate_tokens(asked("a" * 400, one))
    both, shared = priced(asked("a" * 400, one), asked("b" * 400, bytes(bytearray(one))))
    assert shared == [(prompt, tokens)] and both == 2 * alone - tokens
    reordered = asked("c", one)
    reordered["messages"] = [dict(reversed(message.items())) for message in reordered["messages"]]
    assert priced(reordered)[1] == shared
    for different in (asked("a", other), asked("a", one, min_pixels=1), asked("a", one[:-1] + b"?")):
        assert priced(different)[1] != shared
    assert len(priced(asked("a", one), asked("a", other))[1]) == 2


def test_the_prompt_of_a_sample_is_what_is_not_its_answer(picture_files):
    one, other = picture_files
    image = {"prompt": "Draw a cat.", "image": {"bytes": one}}
    assert priced(image)[1] == priced({**image, "image": {"bytes": other}, "group": "g"})[1]
    text = {**image, "response": "A cat."}
    assert priced(text)[1] == priced({**text, "response": "A dog."})[1] != priced(image)[1]
    assert priced(text)[1] != priced({**text, "image": {"bytes": other}})[1]


def priced(*items: Any) -> tuple[int, list[tuple[str, int]]]:
    cost, prefixes = count_prefixes(items)
    return cost, list(prefixes.items())


@pytest.fixture
def picture_files():
    """One picture of 1596 x 1596 pixels in two forms."""
    import io

    from PIL import Image

    files = []
    for form in ("PNG", "JPEG"):
        file = io.BytesIO()
        Image.new("RGB", (1596, 1596), "red").save(file, form)
        files.append(file.getvalue())
    return files
