"""One request and its answer for each route, as the clients of each protocol send and read them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.services import Gate, fake, in_loop, queued, rewards, running

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.json"))


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, Any]]:
    """The status and answer to each golden request, all asked at once of one service."""

    async def ask() -> list[tuple[int, Any]]:
        async with running(fake("characters", "fake_reward.Characters")) as (_, client):

            async def one(path: Path) -> tuple[int, Any]:
                golden = json.loads(path.read_text())
                answer = await client.post(golden["route"], json=golden["request"])
                return answer.status_code, answer.json()

            return await asyncio.gather(*map(one, GOLDEN))

    return dict(zip([path.stem for path in GOLDEN], asyncio.run(ask()), strict=True))


@pytest.mark.parametrize("name", [path.stem for path in GOLDEN])
def test_the_answer_is_the_golden_one(answers, name):
    golden = json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())
    status, answer = answers[name]
    assert (status, known(answer, golden["answer"])) == (golden["status"], golden["answer"])


def known(answer: Any, golden: Any) -> Any:
    """The answer, with `*` where the golden one allows anything, and its numbers where they are as near as float64."""
    if golden == "*":
        return golden
    if isinstance(golden, dict) and isinstance(answer, dict):
        return {name: known(value, golden.get(name)) for name, value in answer.items()}
    if isinstance(golden, list) and isinstance(answer, list) and len(answer) == len(golden):
        return [known(*pair) for pair in zip(answer, golden, strict=True)]
    return golden if isinstance(golden, float) and answer == pytest.approx(golden, abs=1e-12) else answer


@in_loop
async def test_routes_need_a_reward_name_where_several_exist():
    async with running(fake("one", "fake_reward.Characters"), fake("two", "fake_reward.Characters")) as (_, client):
        body = {"inputs": ["Why?", "So."], "raw_scores": True}
        assert (await client.post("/two/predict", json=body)).json() == [{"score": 0.7, "label": "LABEL_0"}]
        refused = await client.post("/predict", json=body)
        assert refused.status_code == 404 and "a request names no reward: choose from one, two." in refused.text
        assert (await client.post("/classify", json={"model": "two", "messages": []})).status_code == 400


IMAGE_OF_3 = [{"role": "user", "content": [{"type": "image_url", "image_url": 3}]}]
ALTERED = ({"truncate_prompt_tokens": 5}, {"add_generation_prompt": True}, {"instruction": "Judge."}, {"messages": []})


@pytest.mark.parametrize(
    ("route", "body", "status", "reason"),
    [
        ("/predict", {"inputs": [["a", "b"], ["a", "b", "c"]]}, 400, "item 1: an input has 3 texts"),
        ("/predict", {"inputs": "Why? So."}, 400, "item 0: it is no conversation"),
        ("/get_reward", {"query": ["Why?So."], "labels": ["{"]}, 400, "item 0: its label looks like JSON"),
        ("/classify", {"messages": [{"content": [{"text": 5}]}]}, 400, "item 0: the text of a content part"),
        ("/classify", {"messages": IMAGE_OF_3}, 400, "item 0:"),
        *(("/classify", {"input": "x", **one}, 422, min(one)) for one in ALTERED),
        ("/classify", {"input": "x", "use_actvation": False}, 422, "use_activation"),
        ("/classify", {"input": [1, 2, 3]}, 422, "input"),
        ("/classify", {}, 422, "input"),
    ],
)
@in_loop
async def test_unreadable_or_score_changing_requests_are_refused(route, body, status, reason):
    async with running(fake("characters", "fake_reward.Characters"), workers=False) as (_, client):
        answer = await client.post(route, json=body)
    assert answer.status_code == status and reason in answer.json()["error"]["message"]


@in_loop
async def test_clients_that_never_retry_wait_for_queue_room(tmp_path):
    gate = Gate(tmp_path)
    async with running(limits={"queue_items": 2}) as (service, client):
        busy = asyncio.create_task(rewards(client, gate.prompt))
        await gate.reached()
        five = {"image": None, "video": None, "condition_images": None, "condition_videos": None}
        bodies = [{"prompt": ["x" * number], **five} for number in range(5)]
        asking = [asyncio.create_task(client.post("/compute", json=body)) for body in bodies]
        await queued(service, 2)
        gate.open()
        _, *answers = await asyncio.gather(busy, *asking)
    assert [answer.json() for answer in answers] == [{"rewards": [float(number)]} for number in range(5)]


@in_loop
async def test_an_impossible_transform_is_refused_before_computing(tmp_path):
    known = fake("known", options={"info": {"reward_mean": 1.0, "reward_std": 2.0}})
    async with running(known, fake("unknown", options={"log": str(tmp_path / "log")})) as (_, client):
        await rewards(client, "warm", model="unknown")
        refused = await rewards(client, "abc", model="unknown", transform="normalized")
        answer = await rewards(client, "abc", model="known", transform="normalized")
    assert refused.status_code == 400 and "choose another transform" in refused.json()["error"]["message"]
    assert (tmp_path / "log").read_text() == "warm\n"
    [one] = answer.json()["data"]
    assert (one["raw"], one["score"]) == (3.0, 1.0)
