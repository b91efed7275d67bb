"""Which jobs a worker is given together: a group whose candidates come one after another; and who does not wait."""

from __future__ import annotations

import asyncio

import pytest
from services import in_loop

from vlmrm.conversation import Outcome
from vlmrm.serving import replica
from vlmrm.serving.backend import Job
from vlmrm.serving.memory_backend import MemoryBackend
from vlmrm.serving.replica import Replica
from vlmrm.serving.service import estimate_tokens
from vlmrm.serving.settings import Limits
from vlmrm.serving.telemetry import Metrics
from vlmrm.serving.worker_process import WorkerSpec


class Worker:
    """Remembers the prompts of each batch."""

    def __init__(self):
        self.died = asyncio.get_running_loop().create_future()
        self.batches = []

    async def score(self, items, timeout, requests):
        self.batches.append([item["prompt"] for item in items])
        return [Outcome(1.0) for _ in items]


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


@in_loop
async def test_what_was_gathered_goes_back_when_the_service_stops():
    one, worker = fed(budget=3)
    batch = asyncio.create_task(one._run_batch(worker))
    for prompt in "ab":
        await one.backend.put(job(prompt))
        while not one.busy or await one.backend.depth("length") != (0, 0):
            await asyncio.sleep(0)
    batch.cancel()
    await asyncio.wait({batch})
    assert worker.batches == []
    assert [taken.items[0]["prompt"] for taken in await one.backend.take("length", 1000)] == ["a", "b"]


def test_a_picture_costs_its_tokens_however_well_it_is_compressed(picture_files):
    for data in picture_files:
        assert estimate_tokens({"image": {"bytes": data}}) == 57 * 57 + 1
        assert estimate_tokens({"image": {"bytes": data}}, max_pixels=28 * 28 * 100) == 101


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
