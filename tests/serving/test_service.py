"""The core of the service with real worker processes: nothing accepted is lost, nothing is answered wrongly."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.serving.services import Gate, eventually, fake, in_loop, queued, rewards, running, submit
from vlmrm.conversation import Outcome
from vlmrm.serving.worker_spec import revision_of


@in_loop
async def test_waiting_requests_are_batched_and_equal_ones_merged(tmp_path):
    log, gate = tmp_path / "batches", Gate(tmp_path)
    async with running(fake(options={"log": str(log)})) as (service, client):
        busy = asyncio.create_task(rewards(client, gate.prompt))
        await gate.reached()
        asking = [asyncio.create_task(rewards(client, prompt)) for prompt in ("first", "a", "bb", "a", "ccc")]
        await queued(service, 4)
        gate.open()
        await busy
        assert [(await one).json()["data"][0]["score"] for one in asking] == [5, 1, 2, 1, 3]
    [_, together] = log.read_text().splitlines()
    assert sorted(together.split("|")) == ["a", "bb", "ccc", "first"]


@in_loop
async def test_a_dead_worker_is_replaced_and_requests_answered(tmp_path):
    async with running() as (_, client):
        answers = await asyncio.gather(rewards(client, f"die once {tmp_path / 'died'}"), rewards(client, "aaa"))
        assert [one.json()["data"][0]["score"] for one in answers] == [1, 3]
        assert 'vlmrm_worker_restarts_total{reward="length"} 1.0' in (await client.get("/metrics")).text


@in_loop
async def test_only_a_request_killing_two_workers_fails():
    async with running() as (_, client):
        guilty, innocent = await asyncio.gather(rewards(client, "die"), rewards(client, "aaa"))
        assert guilty.status_code == 500
        assert "ended by SIGKILL, for the second time with this request" in guilty.json()["error"]["message"]
        assert innocent.json()["data"][0]["score"] == 3


@pytest.mark.parametrize(("engine", "what"), [("Length", "hang"), ("Prepared", "hang"), ("Prepared", "prepare: hang")])
@in_loop
async def test_a_worker_that_hangs_counts_as_dead(tmp_path, engine, what):
    reward = fake(engine=f"fake_reward.{engine}", options={"log": str(tmp_path / "log")}, batch_timeout=0.3)
    async with running(reward) as (_, client):
        answer = await rewards(client, what)
    assert answer.status_code == 500
    assert "hung for 0.3 s, for the second time" in answer.json()["error"]["message"]


@in_loop
async def test_a_batch_error_reaches_only_its_cause(tmp_path):
    log, gate = tmp_path / "batches", Gate(tmp_path)
    async with running(fake(options={"log": str(log)})) as (service, client):
        busy = asyncio.create_task(rewards(client, gate.prompt))
        await gate.reached()
        asking = [asyncio.create_task(rewards(client, prompt)) for prompt in ("raise", "aaa")]
        await queued(service, 2)
        gate.open()
        _, bad, good = await asyncio.gather(busy, *asking)
        assert bad.status_code == 500 and "RuntimeError: out of memory" in bad.json()["error"]["message"]
        assert good.json()["data"][0]["score"] == 3
        assert service.replicas["length"][0].process_id == gate.worker  # the process went on
    _, together, *alone = log.read_text().splitlines()
    assert sorted(together.split("|")) == sorted(alone) == ["aaa", "raise"]


@in_loop
async def test_results_of_replaced_weights_are_not_served(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_text("1")
    async with running(fake("model", "fake_reward.Weights", model_path=str(tmp_path))) as (service, client):
        [replica] = service.replicas["model"]

        async def ask():
            answer = (await rewards(client, "aaa")).json()
            return answer["data"][0]["score"], answer["revision"]

        first = await ask()
        assert await ask() == first
        weights.write_text("2")
        os.kill(replica.process_id, signal.SIGKILL)
        await eventually(lambda: not replica.ready)
        second = await ask()
        assert (first[0], second[0]) == (1, 2) and None not in (first[1], second[1]) and first[1] != second[1]
        [known] = (await client.get("/v1/models")).json()["data"]
        assert known["revision"] == second[1]


@in_loop
async def test_reward_settings_are_part_of_the_revision(tmp_path):
    (tmp_path / "model.safetensors").write_text("1")
    said = []
    for given in ({}, {}, {"devices": ["cpu"]}, {"dtype": "float32"}, {"options": {"info": {"by": "me"}}}):
        async with running(fake(**given, engine="fake_reward.Settings")) as (_, client):
            said.append((await rewards(client, "a")).json()["revision"])
    assert said[0] is not None and said[0] == said[1] == said[2]
    assert len(set(said)) == 3


@pytest.mark.parametrize("name", ["checkpoint_path", "template_file", "base_name_or_path", "rubric"])
def test_files_named_by_settings_count_by_content(tmp_path, name):
    def revisions(setting: str) -> list[str]:
        said = []
        for content in ("one", "one", "other"):
            (tmp_path / "file").write_text(content)
            said.append(revision_of("engine", {setting: str(tmp_path / "file")}, "", {}))
        return said

    first, same, other = revisions(name)
    assert first == same != other
    assert len(set(revisions("download_path"))) == 1


@in_loop
async def test_an_item_fails_alone_and_not_when_repeated(tmp_path):
    asked = "aaa", f"refuse once {tmp_path / 'asked'}", "bb"
    async with running() as (_, client):
        answers = [(await rewards(client, *asked)).json()["data"] for _ in range(2)]
    assert [[one["score"] for one in answer] for answer in answers] == [[3, None, 2], [3, 1, 2]]
    assert [one["error"] for one in answers[0]] == [None, "it is refused", None]


@in_loop
async def test_a_nondeterministic_reward_is_computed_every_time(tmp_path):
    log = tmp_path / "batches"
    async with running(fake(engine="fake_reward.Dice", options={"log": str(log)})) as (_, client):
        for _ in range(2):
            await rewards(client, "a")
    assert log.read_text().splitlines() == ["a", "a"]


@in_loop
async def test_an_unloadable_reward_is_reported_and_refused(tmp_path):
    gate = Gate(tmp_path)
    async with running(fake("broken", "fake_reward.Broken", options={"prompt": gate.prompt})) as (service, client):
        [replica] = service.replicas["broken"]
        await gate.reached()
        waiting = asyncio.create_task(rewards(client, "a", timeout=1))
        await queued(service, 1, "broken")
        gate.open()
        await eventually(lambda: replica.error is not None)
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "FileNotFoundError: weights.bin" in ready.json()["rewards"]["broken"]["errors"][0]
        refused = await rewards(client, "b")
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert (await client.get("/health")).status_code == 200
        assert (await waiting).status_code == 504


@in_loop
async def test_a_nonfinite_detail_costs_neither_worker_nor_score():
    async with running(fake("extra", "fake_reward.Extra")) as (service, client):
        told = (await rewards(client, "nan", "a")).json()["data"]
        process = service.replicas["extra"][0].process_id
        refused = await rewards(client, "set")
        assert service.replicas["extra"][0].process_id == process
    assert [one["score"] for one in told] == [1, 1]
    assert [one["details"]["values"] for one in told] == [[None, {"most": None}, 1.5], 0]
    assert refused.status_code == 500 and "not JSON serializable" in refused.json()["error"]["message"]


@in_loop
async def test_a_full_queue_says_when_to_come_again(tmp_path):
    gate = Gate(tmp_path)
    async with running(limits={"queue_items": 2}) as (service, client):
        accepted = [asyncio.create_task(rewards(client, gate.prompt))]
        await gate.reached()
        accepted += [asyncio.create_task(rewards(client, prompt)) for prompt in "ab"]
        await queued(service, 2)
        for prompt in "cdef":
            refused = await rewards(client, prompt, timeout=1)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        gate.open()
        assert [(await one).status_code for one in accepted] == [200] * 3
        assert (await rewards(client, "c")).status_code == 200


@in_loop
async def test_an_unqueueable_request_is_refused_for_good():
    async with running(limits={"queue_items": 2}) as (_, client):
        items = await rewards(client, "a", "b", "c")
        flow_factory = await client.post("/compute", json={"prompt": ["a", "b", "c"]})
    async with running(limits={"queue_bytes": 100}) as (_, client):
        size = await rewards(client, "a" * 100)
    for answer in (items, size):
        assert answer.status_code == 413 and "retry-after" not in answer.headers
        assert "over what the queue can hold" in answer.json()["error"]["message"]
    assert flow_factory.status_code == 200 and "send fewer at a time" in flow_factory.json()["error"]


@in_loop
async def test_accepted_requests_are_finished_when_the_service_stops(tmp_path):
    gate = Gate(tmp_path)

    async def open_once_it_stops(service):
        await eventually(lambda: service.draining)
        gate.open()

    async with running(fake(batch_tokens=1)) as (service, _):
        held = await submit(service, "length", [{"prompt": gate.prompt}])
        jobs = [await submit(service, "length", [{"prompt": "x" * n}]) for n in range(4)]
        await gate.reached()
        opening = asyncio.create_task(open_once_it_stops(service))
    await opening
    assert (await service.backend.status(held)).finished
    statuses = [await service.backend.status(job) for job in jobs]
    assert [status.outcomes for status in statuses] == [[Outcome(float(n))] for n in range(4)]


@pytest.mark.smoke
@in_loop
async def test_rewards_have_their_own_workers_and_environments():
    rewards_ = [fake("one", replicas=2), fake("two", options={"info": {"by": "two"}})]
    async with running(*rewards_) as (service, client):
        first, second = await asyncio.gather(rewards(client, "a", model="one"), rewards(client, "bb", model="two"))
        assert [answer.json()["model"] for answer in (first, second)] == ["one", "two"]
        assert first.json()["revision"] != second.json()["revision"]
        unknown = await rewards(client, "a", model="three")
        assert unknown.status_code == 404 and "there is no reward three: choose from one, two." in unknown.text
        assert (await rewards(client, "a")).status_code == 404
        assert len(service.replicas["one"]) == 2
